"""The console in chromium, before a mesh of real processes. Run by `make console-test`."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from e2e.mesh import ENDLESS, SIMULATED, Mesh, running_mesh

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDE, NARROW = (1440, 900), (360, 800)

Page = Any
"""Of playwright, which not every environment has."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    async with api.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    http = ("--http-port", "0")
    async with running_mesh(engines=3, engine_flags=SIMULATED, router_flags=http) as mesh:
        yield mesh


@asynccontextmanager
async def opened(
    browser: Any, mesh: Mesh, size: tuple[int, int] = WIDE, scheme: str = "light"
) -> AsyncIterator[Page]:
    """The console in a tab of its own, which must ask nobody else and report no error."""
    width, height = size
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme
    )
    page = await context.new_page()
    page.set_default_timeout(60_000)
    own, problems, asked = f"http://{mesh.router.admin_address}/", list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        await page.goto(f"{own}console")
        await shown(page.locator("#link"), "live")
        yield page
    finally:
        await context.close()
    assert problems == []
    assert all(url.startswith(own) for url in asked)


async def shown(locator: Any, text: str | re.Pattern[str]) -> None:
    await api.expect(locator).to_contain_text(text, timeout=60_000)


def row(page: Page, table: str, name: str) -> Any:
    return page.locator(f"#{table} tbody tr").filter(has=page.get_by_role("rowheader", name=name))


async def test_fleet_is_shown_and_a_killed_engine_seen(browser: Any, mesh: Mesh) -> None:
    async with opened(browser, mesh) as page:
        await api.expect(page.locator("#workers tbody tr")).to_have_count(3)
        await shown(page.locator("#totals"), "3 of 3")
        await shown(page.locator("#tokenizers"), "ready")
        victim = mesh.engines.pop()
        status = await mesh.status()
        (name,) = [each.worker for each in status.workers if each.address == victim.address]
        await shown(row(page, "workers", name), "ready")
        victim.signal(signal.SIGKILL)
        await shown(row(page, "workers", name), "lost")
        await shown(page.locator("#changes"), f"engine {name} is lost")
        await shown(page.locator("#totals"), "2 of 3")


async def test_streams_are_shown(browser: Any, mesh: Mesh) -> None:
    async with opened(browser, mesh) as page:
        reader = mesh.open(["x"], request_id="<i>a</i>", max_tokens=ENDLESS)
        line = row(page, "requests", "<i>a</i>")
        await shown(line, "running")
        await shown(line, re.compile(r"\w-\d"))
        await reader.cancel()
        await api.expect(line).to_have_count(0)
