"""The target of a URL."""

from __future__ import annotations

from trtmesh.tools.bench.targets.generate_stream import generate_stream_target
from trtmesh.tools.bench.targets.kserve import KserveTarget
from trtmesh.tools.bench.targets.native import NativeTarget
from trtmesh.tools.bench.targets.openai import openai_target
from trtmesh.tools.bench.targets.target import Connecting, OpenTarget


def open_target(connecting: Connecting) -> OpenTarget:
    """A connection to the target, to be opened by `async with`."""
    match connecting.url.protocol:
        case "grpc":
            return NativeTarget(connecting)
        case "triton":
            return KserveTarget(connecting, streams=True)
        case "triton+unary":
            return KserveTarget(connecting, streams=False)
        case "triton+http":
            return generate_stream_target(connecting)
        case "openai":
            return openai_target(connecting)
    raise ValueError(connecting.url.protocol)
