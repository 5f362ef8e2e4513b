"""Converts the tokenizer files of older models to tokenizer.json, in a child process.

The libraries for these files take hundreds of megabytes and may import torch. The service needs them
only once, so a child process loads them.

    python -m trtmesh.tokenizer.conversion MODEL_DIR OUTPUT_FILE
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.model_dir import read_optional

_TIMEOUT_SECONDS = 600


def convert(model_dir: Path) -> Tokenizer:
    """Loads the tokenizer of a directory without tokenizer.json. Raises ModelUnusable."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "tokenizer.json"
        command = [sys.executable, "-m", __name__, str(model_dir), str(output)]
        done = subprocess.run(  # noqa: S603 - this module, with two paths
            command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise ModelUnusable(
                f"{model_dir} has no tokenizer.json, and its other tokenizer files cannot be converted: {reason[0]}"
            )
        return Tokenizer.from_file(str(output))


def _main(model_dir: str, output: str) -> None:
    if any(Path(model_dir).glob("*.model")):
        # Its stubs need a protobuf as new as their own; transformers would name another library as missing.
        from sentencepiece import sentencepiece_model_pb2  # noqa: F401
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except ValueError:
        if _has_code(Path(model_dir)):
            # The error asks for consent to run it.
            sys.exit("they need code of the model (auto_map), which is never run")
        raise
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        sys.exit(f"{type(tokenizer).__name__} has no fast tokenizer")
    backend.save(output)


def _has_code(model_dir: Path) -> bool:
    return "auto_map" in read_optional(model_dir / "tokenizer_config.json")


if __name__ == "__main__":
    _main(*sys.argv[1:])
