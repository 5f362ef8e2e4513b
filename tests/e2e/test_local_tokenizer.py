"""A tokenizer inside the router serves as one of its own process does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e.mesh import DEMO, ENDLESS, Mesh, check_beginning, running_mesh, scrape
from processes import run_to_exit
from tokenizer.tokenizers_zoo import byte_level_bpe, ids_of, save_model_dir
from tokenizers import decoders
from trtmesh.chassis.errors import InvalidField
from trtmesh.client import ItemResult

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: dict[str, dict[str, Any]] = {
    "short": {"prompts": ["Hello there", "naïve 😀 Größe"]},
    "long": {"prompts": ["word " * 5_000], "max_tokens": 2},
    "stop": {"prompts": ["Stop at a letter"], "stop_texts": ["a", "eE"], "max_tokens": 200},
    "several": {"prompts": [f"prompt {n}" for n in range(60)], "max_tokens": 3},
    "ids": {"prompts": [[70, 71, 72]], "num_return_sequences": 3},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "mesh.yaml"
    file.write_text(f"tokenizer:\n  model_dir: {DEMO}\n")
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncIterator[Mesh]:
    """A mesh with a tokenizer process."""
    async with running_mesh() as mesh:
        yield mesh


async def local_router(mesh: Mesh, config: Path, *tokenizers: str) -> None:
    """Starts a router with a tokenizer of its own."""
    flags = ("--config", str(config), "--tokenizers", ",".join(["local", *tokenizers]))
    engines = ",".join(engine.address for engine in mesh.engines)
    await mesh.start_router("--engines", engines, *flags)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(services: Mesh, config: Path) -> AsyncIterator[Mesh]:
    """The same engine behind a router with a tokenizer of its own."""

    async def start(mesh: Mesh) -> None:
        mesh.engines = services.engines
        await local_router(mesh, config)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


def contents(items: Sequence[ItemResult]) -> list[Any]:
    return [[(s.token_ids, s.text, s.finished) for s in item.sequences] for item in items]


@pytest.mark.parametrize("name", ASKED)
async def test_texts_are_those_of_a_tokenizer_service(
    local: Mesh, services: Mesh, name: str
) -> None:
    asked = {"max_tokens": 30, "seed": 5, "temperature": 0.8, **ASKED[name]}
    prompts = asked.pop("prompts")
    ours, theirs = await asyncio.gather(
        *(mesh.client.complete(prompts, **asked) for mesh in (local, services))
    )
    assert all(item.sequences for item in ours)
    assert contents(ours) == contents(theirs)


async def test_text_too_long_ends_its_item_alone(local: Mesh) -> None:
    long, short = await local.client.complete(["x" * (5 << 20), "Hello"], max_tokens=2)
    assert isinstance(long.error, InvalidField)
    assert len(short.sequences[0].token_ids) == 2


async def test_panic_of_the_library_ends_its_item_alone(tmp_path: Path) -> None:
    """This decoder panics at a lone space, with which one prompt ends."""
    panicking = byte_level_bpe()
    panicking.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    space, letter = ids_of(panicking, "Ġ", "a")
    model_dir = save_model_dir(panicking, tmp_path)
    vocabulary = {"size": panicking.get_vocab_size(), "first-token-id": letter}
    vocabulary["last-token-id"] = letter
    flags = [f for n, v in vocabulary.items() for f in (f"--simulated-vocabulary-{n}", str(v))]

    async def start(mesh: Mesh) -> None:
        await mesh.start_engine("--backend", "simulated", "--model", model_dir.name, *flags)
        file = model_dir / "mesh.yaml"
        file.write_text(f"tokenizer: {{model_dir: {model_dir}}}\n")
        await local_router(mesh, file)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        for _ in range(2):
            bad, good = await mesh.client.complete([[space], [letter]], max_tokens=2)
            assert bad.error is not None
            assert (bad.error.reason, "Panic" in bad.error.message) == ("INTERNAL", True)
            assert good.text == "aa"


async def test_it_is_shown_and_counted(local: Mesh) -> None:
    before = (await scrape(local.router))["trtmesh_tokenizer_encoded_tokens_total"]
    await local.client.complete(["Hello there"], max_tokens=2)
    samples = await scrape(local.router)
    assert samples["trtmesh_tokenizer_encoded_tokens_total"] > before
    (shown,) = (await local.status()).tokenizers
    assert shown.address == "local"


async def test_lost_service_beside_it_loses_nothing(services: Mesh, config: Path) -> None:
    """Sequences of a killed tokenizer go on within the router."""

    async def start(mesh: Mesh) -> None:
        mesh.engines = services.engines
        await mesh.start_tokenizer(DEMO)
        await local_router(mesh, config, mesh.tokenizers[0].address)
        await mesh.ready(1, 2)

    async with running_mesh(start=start) as mesh:
        options: dict[str, Any] = {"ignore_end_id": True, "seed": 3}
        prompts = [f"prompt {n}" for n in range(8)]
        expected = await services.client.complete(prompts, max_tokens=100, **options)
        reader = mesh.open(prompts, max_tokens=ENDLESS, **options)
        await reader.until(lambda r: all(r.tokens(index) > 10 for index in range(len(prompts))))
        by_place = {t.address: t.sequences for t in (await mesh.status()).tokenizers}
        assert all(by_place.values()), by_place
        mesh.tokenizers[0].signal(signal.SIGKILL)
        known = max(map(reader.tokens, range(len(prompts))))
        check_beginning(await reader.stopped_at(known + 100), expected)


async def test_drain_ends_running_streams_first(services: Mesh, config: Path) -> None:
    async def start(mesh: Mesh) -> None:
        mesh.engines = services.engines
        await local_router(mesh, config)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        reader = mesh.open(["Hello"], max_tokens=300, ignore_end_id=True)
        await reader.tokens_here(5)
        assert await mesh.router.stop() == 0
        (item,) = await reader.result()
        assert len(item.sequences[0].token_ids) == 300


@pytest.mark.parametrize(
    ("model_dir", "said"),
    [(None, "model_dir"), ("/nowhere/at/all", "/nowhere/at/all")],
)
async def test_start_says_what_is_missing(model_dir: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(f"tokenizer: {{model_dir: {model_dir}}}\n" if model_dir else "router: {}\n")
    flags = ("--config", str(file), "--engines", "127.0.0.1:1", "--port", "0")
    ended = await run_to_exit("router", *flags, "--tokenizers", "local")
    assert ended.status != 0
    assert said in ended.stderr
