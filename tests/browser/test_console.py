"""The console in chromium, before a mesh of real processes. Run by `make console-test`."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e.mesh import DEMO, PATIENT, Mesh, running_mesh
from router.adapters.contents_of import content
from router.scripted import serving_router
from trtmesh.client import GenerationPhase, HandoffConfig
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
TORCH = ("--backend", "torch", "--model-dir", str(DEMO), "--torch-threads", "1")
WORKERS = ("one", "two", "three")
PATIENCE_MS = 60_000
SECRET = "s3cret-and-long"
LONG = "600"
"""Tokens of an answer during which there is time for a click or two."""

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
    async def start(mesh: Mesh) -> None:
        engines = [mesh.start_engine(*TORCH, "--worker", name) for name in WORKERS]
        await asyncio.gather(mesh.start_tokenizer(), *engines)
        await mesh.start_router(*PATIENT, "--http-port", "0")
        await mesh.ready(len(engines), 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


@asynccontextmanager
async def opened(
    browser: Any, address: str, width: int = 1440, scheme: str = "light", expected: str = ""
) -> AsyncIterator[Page]:
    """The console in a tab of its own, which must ask nobody else and report no error but those with `expected`."""
    size = {"width": width, "height": 900}
    context = await browser.new_context(viewport=size, color_scheme=scheme)
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    own, problems, asked = f"http://{address}/", list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        await page.goto(f"{own}console")
        await shown(page.locator("#link"), "live")
        yield page
    finally:
        await context.close()
    assert [each for each in problems if not expected or expected not in each] == []
    assert all(url.startswith(own) and SECRET not in url for url in asked)


async def shown(locator: Any, text: str | re.Pattern[str]) -> None:
    await api.expect(locator).to_contain_text(text, timeout=PATIENCE_MS)


def row(page: Page, table: str, name: str) -> Any:
    return page.locator(f"#{table} tbody tr").filter(has=page.get_by_role("rowheader", name=name))


async def ask(page: Page, tokens: str = LONG) -> None:
    await page.fill("#most", tokens)
    await page.click("#send")
    await page.wait_for_selector("#answer span:nth-child(4)", state="attached")


async def ended(page: Page) -> str:
    """The text of an answer after its end."""
    await shown(page.locator("#said"), "ended: ")
    return str(await page.text_content("#answer"))


async def test_every_panel_shows_the_mesh(browser: Any, mesh: Mesh) -> None:
    await mesh.admin.upload_adapter(admin_pb.AddAdapterRequest(name="<u>tone</u>"), content())
    first_half = HandoffConfig(phase=GenerationPhase.GENERATION_PHASE_CONTEXT_ONLY)
    await mesh.client.complete(
        [list(range(100, 170))], request_id="half", max_tokens=12, text=False, handoff=first_half
    )
    async with opened(browser, mesh.router.admin_address) as page:
        await shown(page.locator("#totals"), "3 of 3")
        for name in WORKERS:
            await shown(row(page, "workers", name), "ready")
        await shown(page.locator("#tokenizers"), "ready")
        await shown(page.locator("#handoffs"), "given")
        await shown(page.locator("#adapters"), "<u>tone</u>")
        reader = mesh.open(["x"], request_id="<i>a</i>", max_tokens=4000, ignore_end_id=True)
        line = row(page, "requests", "<i>a</i>")
        await shown(line, "running")
        await shown(line, re.compile("one|two|three"))
        await line.get_by_role("button", name="Explain").click()
        await shown(page.locator("#candidates"), "chosen")
        await api.expect(page.locator("#candidates tbody tr")).to_have_count(3)
        await line.get_by_role("button", name="Stop").click()
        await line.get_by_role("button", name="Stop").click()
        await reader.result()
        await api.expect(line).to_have_count(0)
        # No text of a request became an element.
        assert await page.locator("main i, main u").count() == 0


async def test_answer_shows_how_sure_the_model_was(browser: Any, mesh: Mesh) -> None:
    async with opened(browser, mesh.router.admin_address) as page:
        await ask(page, "12")
        await ended(page)
        assert await page.locator("#answer span").count() == 12
        await page.locator("#answer span:visible").nth(1).hover()
        await api.expect(page.locator("#tops tbody tr")).to_have_count(5)
        (first, *_) = await page.locator("#tops tbody td:nth-child(3)").all_inner_texts()
        assert 20 <= float(first.strip().removesuffix("%")) <= 100
        said = await page.text_content("#tops caption")
        assert re.search(r"had \d+\.\d%", said)


async def test_stream_moved_from_the_page_has_the_same_text(browser: Any, mesh: Mesh) -> None:
    async with opened(browser, mesh.router.admin_address) as page:
        await ask(page)
        undisturbed = await ended(page)
        await ask(page)
        where = page.locator("#running > span")
        await shown(where, re.compile("on (one|two|three)$"))
        before = await where.inner_text()
        await page.locator("#running").get_by_role("button", name="Move").click()
        await shown(page.locator("#told"), "moves to another engine: done")
        await shown(where, ", moved")
        assert await where.inner_text() != f"{before}, moved"
        assert await ended(page) == undisturbed
        await shown(page.locator("#said"), f"{LONG} tokens, ended: length")


async def test_stream_is_stopped_from_the_page(browser: Any, mesh: Mesh) -> None:
    async with opened(browser, mesh.router.admin_address) as page:
        await ask(page, "4000")
        await page.locator("#running").get_by_role("button", name="Stop").click()
        await ended(page)
        await shown(page.locator("#said"), "stopped before its end")
        assert not (await mesh.admin.list_requests()).requests


async def test_everything_is_reached_by_keyboard(browser: Any, mesh: Mesh) -> None:
    async with opened(browser, mesh.router.admin_address) as page:
        await page.wait_for_selector("#workers .change button")
        reached = list[str]()
        for _ in range(60):
            await page.keyboard.press("Tab")
            name = await page.evaluate(
                "document.activeElement.id || document.activeElement.ariaLabel"
                " || document.activeElement.textContent.trim()"
            )
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none" or name.startswith("trtmesh"), name
            reached.append(name)
            if name == "send":
                break
        wanted = [
            "Skip to the fleet", "Role of one", "Drain one", "model", "most", "temperature",
            "scored", "message", "send",
        ]  # fmt: skip
        assert [name for name in reached if name in wanted] == wanted
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#answer span:nth-child(4)", state="attached")
        for name in ("Stop", "Move", "Explain"):
            await page.keyboard.press("Tab")
            assert await page.evaluate("document.activeElement.textContent") == name
        await page.keyboard.press("Enter")
        await api.expect(page.locator("#why")).to_be_focused()
        await page.focus("#running button")
        await page.keyboard.press("Enter")
        await ended(page)
        await page.focus("#answer span")
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowRight")
        third = await page.locator("#answer span").nth(2).text_content()
        assert await page.evaluate("document.activeElement.textContent") == third
        await api.expect(page.locator("#tops tbody tr")).to_have_count(5)


SEEN = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = color.map((each) => each / 255).map((c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const faint = [], nameless = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility() || node.closest("[aria-disabled]")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color).slice(0, 3)), light(ground(node).slice(0, 3))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${node.textContent}`);
  }
  for (const each of document.querySelectorAll("button, input, select, textarea")) {
    if (!(each.ariaLabel || each.labels?.length || each.textContent.trim())) nameless.push(each.outerHTML);
  }
  for (const each of document.querySelectorAll("table")) if (!each.caption) nameless.push(each.id);
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  return { faint, nameless, twice: ids.filter((id, at) => ids.indexOf(id) !== at),
    over: document.documentElement.scrollWidth - innerWidth, lang: document.documentElement.lang };
}"""
"""What is hard to see, to hear or to reach in the page."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
async def test_page_can_be_read(browser: Any, mesh: Mesh, width: int, scheme: str) -> None:
    reader = mesh.open(["x"], max_tokens=4000, ignore_end_id=True)
    async with opened(browser, mesh.router.admin_address, width, scheme) as page:
        await page.wait_for_selector("#requests tbody tr")
        await ask(page, "8")
        await ended(page)
        await page.focus("#answer span")
        seen = await page.evaluate(SEEN)
    await reader.cancel()
    assert seen == {"faint": [], "nameless": [], "twice": [], "over": 0, "lang": "en"}


async def test_only_the_token_opens_changes(browser: Any, mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    engines = [engine.address for engine in mesh.engines]
    async with serving_router(engines, admin={"token_file": file}, http={"port": 0}) as client:
        address = client.admin.address
        async with opened(browser, address, expected="401 (Unauthorized)") as page:
            await shown(page.locator("#totals"), "3 of 3")
            await shown(page.locator("#rights"), "read-only")
            await shown(page.locator("#no-playground"), "It needs the admin token.")
            assert await page.locator("#workers button, #workers select").count() == 0
            await page.fill("#token", "wrong")
            await page.keyboard.press("Enter")
            await shown(page.locator("#told"), "The token was refused")
            await shown(page.locator("#rights"), "read-only")
            await page.fill("#token", SECRET)
            await page.keyboard.press("Enter")
            await shown(page.locator("#rights"), "you may change things")
            drain = row(page, "workers", "one").locator(".change button")
            await drain.click()
            await shown(drain, "Drain: sure?")
            await drain.click()
            await shown(row(page, "workers", "one"), "draining")
            await drain.click()
            await shown(row(page, "workers", "one"), "ready")
            await page.select_option("#workers tr:has-text('one') select", "decode")
            await row(page, "workers", "one").get_by_role("button", name="Set").click()
            await shown(page.locator("#told"), "one becomes decode: done")
            await page.select_option("#workers tr:has-text('one') select", "mixed")
            await row(page, "workers", "one").get_by_role("button", name="Set").click()
            await shown(page.locator("#told"), "one becomes mixed: done")
            await page.click("#forget")
            await shown(page.locator("#rights"), "read-only")
            assert await page.evaluate("sessionStorage.length") == 0


async def test_killed_engine_is_seen_and_its_stream_goes_on(browser: Any, mesh: Mesh) -> None:
    async with opened(browser, mesh.router.admin_address) as page:
        await ask(page)
        undisturbed = await ended(page)
        await ask(page)
        where = page.locator("#running > span")
        await shown(where, re.compile("on (one|two|three)$"))
        name = (await where.inner_text()).removeprefix("on ")
        addresses = {worker.worker: worker.address for worker in (await mesh.status()).workers}
        (victim,) = [each for each in mesh.engines if each.address == addresses[name]]
        victim.signal(signal.SIGKILL)
        await shown(row(page, "workers", name), "lost")
        await shown(page.locator("#changes"), f"engine {name} is lost")
        await shown(page.locator("#totals"), "2 of 3")
        assert await ended(page) == undisturbed
