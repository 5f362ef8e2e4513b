"""`python -m trtmesh.router`: runs a router."""

import trtmesh.chassis.environment  # noqa: F401, I001 - gRPC reads the environment when it is first imported

import sys
from collections.abc import Sequence
from functools import partial

from trtmesh.chassis.allocator import give_back_large_blocks
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.settings import load_beside
from trtmesh.chassis.service import Runtime, run
from trtmesh.router.links.local import LOCAL, LocalService
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings
from trtmesh.router.tokenizers.local_tokenizer import LocalTexts

SWITCH_SECONDS = 0.0001
"""Longest wait of the event loop for the thread that parses a large message: once for each callback of a socket, and a
pass under attack has a hundred."""


def build(
    argv: Sequence[str],
    settings: RouterSettings,
    runtime: Runtime,
    engine: LocalService | None = None,
) -> Router:
    """A router, with a tokenizer in the same process if the settings say so. Raises SettingsError."""
    if LOCAL not in settings.tokenizers:
        return Router(settings, runtime, engine=engine)
    try:
        from trtmesh.tokenizer.service import TokenizerService
        from trtmesh.tokenizer.settings import TokenizerSettings
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"names {LOCAL}, which needs {error.name}: pip install 'trtmesh[tokenizer]'",
            setting="router.tokenizers",
        ) from error
    own = load_beside(TokenizerSettings, argv)
    inside = Runtime(registry=runtime.registry, tracer=runtime.tracer)
    tokenizer = LocalTexts(TokenizerService(own, inside), own, inside)
    return Router(settings, runtime, tokenizer, engine)


if __name__ == "__main__":
    give_back_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.exit(run(RouterSettings, partial(build, sys.argv[1:]), sys.argv[1:]))
