"""Builds with the fake tool chain, in processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cli.commands import start_command, trtmesh

FAKE = Path(__file__).with_name("fake_tools.py")

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


def plan_of(**changes: Any) -> dict[str, Any]:
    """A plan with a step of every verb of the TensorRT-engine flow."""
    model = {
        "name": "tiny",
        "hub": "owner/tiny",
        "precisions": ["bf16", {"weights": "fp8", "kv_cache": "fp8"}],
        "tensor": [2],
        "lengths": {"input": 64, "output": 32},
        "batch_sizes": 8,
    }
    tool = [sys.executable, str(FAKE)]
    plan: dict[str, Any] = {
        "release": "1.2.1",
        "flow": "tensorrt",
        "output": "out",
        "gpu": {"architecture": 90},
        "tools": {
            "hub": [*tool, "hub"],
            "python": tool,
            "trtllm_build": [*tool, "trtllm-build"],
        },
        "models": [model],
    }
    model |= changes.pop("model", {})
    return plan | changes


@dataclass
class Workshop:
    """A directory with a plan, the switches of the tools, and the results."""

    directory: Path

    @property
    def control(self) -> Path:
        return self.directory / "control"

    @property
    def out(self) -> Path:
        return self.directory / "out"

    def write(self, plan: Mapping[str, Any]) -> Workshop:
        self.control.mkdir(parents=True, exist_ok=True)
        (self.directory / "tiny.json").write_text(json.dumps(TINY))
        (self.directory / "plan.yaml").write_text(yaml.safe_dump(dict(plan), sort_keys=False))
        return self

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "FAKE_TOOLS": str(self.control),
            "FAKE_CONFIG": str(self.directory / "tiny.json"),
        }

    def start(self, *options: str) -> subprocess.Popen[str]:
        return start_command(
            "build", "plan.yaml", *options, env=self.environment, directory=self.directory
        )

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return trtmesh(
            "build", "plan.yaml", *options, env=self.environment, directory=self.directory
        )

    def switch(self, name: str) -> Path:
        """Turns on a switch of the tools; the returned file turns it off when removed."""
        file = self.control / name
        file.touch()
        return file

    def calls(self) -> list[str]:
        """The verbs of all started tools, in order."""
        file = self.control / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)[0] for line in lines]

    def results(self) -> dict[str, str]:
        """The contents of all published files."""
        files = [file for file in self.out.rglob("*") if file.is_file()]
        names = {str(file.relative_to(self.out)): file for file in files}
        return {
            name: file.read_bytes().decode("latin-1").replace(str(self.directory), "HERE")
            for name, file in sorted(names.items())
            if not name.startswith(("logs/", ".lock")) and not name.endswith(".trtmesh-begun")
        }
