"""Generates the stubs; `--check` fails if the committed stubs are stale."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("trtmesh/v1/*.proto"))
# Typed messages and stubs come from mypy-protobuf; only files that declare a service have a gRPC stub.
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Writes every stub below `target`."""
    # protoc looks for plugins on PATH, where this environment's programs need not be.
    programs = Path(sys.executable).parent
    arguments = [
        f"-I{ROOT}",
        *(f"--plugin={name}={programs / name}" for name in PLUGINS),
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out={target}",
        f"--mypy_grpc_out={target}",
        *SOURCES,
    ]
    if protoc.main(["protoc", *arguments]) != 0:
        raise SystemExit("protoc failed")


def stubs(root: Path) -> dict[str, bytes]:
    """The generated files below `root` by relative path."""
    package = root / "trtmesh" / "v1"
    return {path.name: path.read_bytes() for pattern in GENERATED for path in package.glob(pattern)}


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = stubs(Path(scratch)), stubs(ROOT)
    stale = sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))
    if stale:
        raise SystemExit(f"stubs differ from their protos, run `make protos`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
