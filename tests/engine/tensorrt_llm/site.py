"""What engine processes need to run the backend over the stand-in."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from e2e.mesh import DEMO, Mesh
from engine.tensorrt_llm.stand_in.package import write_package


class Site:
    """Where engine processes find the stand-in of a release and a model."""

    def __init__(self, directory: Path, release: str) -> None:
        library = write_package(directory / "library", release)
        known = os.environ.get("PYTHONPATH", "")
        self.env = {
            "PYTHONPATH": f"{library}{os.pathsep}{known}" if known else str(library),
            "TRTLLM_STAND_IN_STEP_MS": "4",
        }
        self.flags = (
            *("--backend", "tensorrt_llm", "--model", "demo"),
            *("--model-dir", str(long_model(directory / "model"))),
            *("--tensorrt-llm-limits-max-sequence-tokens", "8192"),
            *("--load-interval-seconds", "0.02"),
        )

    async def engine(self, mesh: Mesh, *flags: str, **stand_in: str) -> None:
        """Starts an engine; `stand_in` are parameters of its stand-in."""
        env = self.env | {f"TRTLLM_STAND_IN_{name}": value for name, value in stand_in.items()}
        await mesh.start_engine(*self.flags, *flags, env=env)


def half(role: str, **options: Any) -> tuple[str, ...]:
    """Flags of a worker with a role, whose library hands KV over; `options` are the library's."""
    options["cache_transceiver_config"] = {"backend": "UCX"}
    if role == "prefill":
        options["disable_overlap_scheduler"] = True
    return ("--role", role, "--tensorrt-llm-options", json.dumps(options))


def long_model(directory: Path) -> Path:
    """The demo model with room for long sequences: the stand-in reads its configuration alone."""
    directory.mkdir(parents=True)
    for file in DEMO.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((DEMO / "config.json").read_text())
    config["max_position_embeddings"] = 32768
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def suite_of(*suites: ModuleType, but: Container[str] = ()) -> Mapping[str, Any]:
    """The tests of other backends, for a module with fixtures of its own."""
    found: dict[str, Any] = {}
    for suite in suites:
        tests = {name: test for name, test in vars(suite).items() if name.startswith("test_")}
        assert not found.keys() & tests.keys(), "one would hide the other"
        found |= {name: test for name, test in tests.items() if name not in but}
    return found
