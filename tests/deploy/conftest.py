"""The stack of all scenarios; they run in order and leave every service running."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from deploy.images import build_images, why_not
from deploy.stack import ComposeStack, running


@pytest.fixture(scope="session")
def stack() -> Iterator[ComposeStack]:
    if reason := why_not():
        pytest.skip(f"containers cannot run here: {reason}")
    build_images()
    with running(ComposeStack()) as stack:
        asyncio.run(stack.until_it_answers())
        yield stack
