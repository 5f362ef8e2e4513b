"""Generates the stubs and generation_fields.py; `--check` fails if the committed files are stale."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import fields_module
import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).parent
# Typed messages and stubs come from mypy-protobuf; only files that declare a service have a gRPC stub.
MESSAGES = {"python": "", "mypy": "protoc-gen-mypy"}
SERVICES = {"grpc_python": "", "mypy_grpc": "protoc-gen-mypy_grpc"}
PACKAGES = ("trtmesh/v1", "trtmesh/kserve")
SERVED = "trtmesh/v1"
"""The package whose services are ours."""
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi", "generation_fields.py")
DEFAULT_POOL = "_descriptor_pool.Default()"


def generate(target: Path) -> None:
    """Writes every stub below `target`."""
    for package in PACKAGES:
        _run_protoc(sorted(ROOT.glob(f"{package}/*.proto")), MESSAGES, target)
    served = [path for path in sorted(ROOT.glob(f"{SERVED}/*.proto")) if _has_service(path)]
    _run_protoc(served, SERVICES, target)
    for stub in (target / "trtmesh/kserve").glob("*_pb2.py"):
        _use_own_pool(stub)
    _write_fields(target)


def _has_service(proto: Path) -> bool:
    return re.search(r"(?m)^service ", proto.read_text(encoding="utf-8")) is not None


def _write_fields(target: Path) -> None:
    with tempfile.NamedTemporaryFile() as described:
        arguments = [f"-I{ROOT}", "--include_imports", f"--descriptor_set_out={described.name}"]
        _protoc([*arguments, "trtmesh/v1/generation.proto"])
        files = FileDescriptorSet.FromString(Path(described.name).read_bytes())
    (target / fields_module.NAME).write_text(fields_module.render(files), encoding="utf-8")


def _run_protoc(protos: Sequence[Path], outputs: Mapping[str, str], target: Path) -> None:
    """Writes protoc's outputs, each by its plugin."""
    # protoc looks for plugins on PATH, where this environment's programs need not be.
    programs = Path(sys.executable).parent
    arguments = [
        f"-I{ROOT}",
        *(f"--plugin={name}={programs / name}" for name in outputs.values() if name),
        *(f"--{name}_out={target}" for name in outputs),
        *(path.relative_to(ROOT).as_posix() for path in protos),
    ]
    _protoc(arguments)


def _protoc(arguments: list[str]) -> None:
    # The descriptors of google.protobuf, which options extend.
    include = Path(grpc_tools.__file__).parent / "_proto"
    if protoc.main(["protoc", f"-I{include}", *arguments]) != 0:
        raise SystemExit("protoc failed")


def _use_own_pool(stub: Path) -> None:
    """Registers the messages of a stub in the pool of its package, beside any others of the same names."""
    code = stub.read_text(encoding="utf-8")
    if code.count(DEFAULT_POOL) != 1:
        raise SystemExit(f"{stub} does not register its file as expected")
    code = code.replace(
        "from google.protobuf import descriptor_pool as _descriptor_pool",
        "from trtmesh.kserve import pool as _pool",
    )
    stub.write_text(code.replace(DEFAULT_POOL, "_pool.POOL"), encoding="utf-8")


def stubs(root: Path) -> dict[str, bytes]:
    """The generated files below `root` by relative path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for package in PACKAGES
        for pattern in GENERATED
        for path in (root / package).glob(pattern)
    }


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
