"""Upstream's client scripts, as of releases that differ, against real processes; docs/triton.md has the outcomes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from compat import tiny_llama
from compat.client_scripts import PAGE, SCRIPTS, SERVERS, Refused, Script, Server, render
from compat.plain_http import PlainHttp
from compat.triton import Triton
from e2e.mesh import PATIENT, Mesh, running_mesh
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPT = {
    "ensemble": {"template": "ensemble", "decoupled": False},
    "tensorrt_llm": {"template": "gpt"},
    "preprocessing": {"template": "preprocessing"},
    "postprocessing": {"template": "postprocessing"},
}
FLAGS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "dated": ("--triton-release", "RELEASE"),
    "wrapping": ("--triton-wrap-token-ids", "true"),
    "gpt": ("--triton-models", json.dumps(GPT)),
    "llmapi": ("--triton-models", json.dumps({"tensorrt_llm": {"template": "llmapi"}})),
    "adapted": (),
}
"""Flags of the router for each configuration; all have an engine with adapters."""


class Servers:
    """The routers over one engine, started when first asked for."""

    def __init__(self, mesh: Mesh, stack: AsyncExitStack) -> None:
        self._mesh = mesh
        self._stack = stack
        self._started: dict[tuple[str, ...], Server] = {}

    async def of(self, script: Script, release: str) -> Server:
        flags = tuple(flag.replace("RELEASE", release) for flag in FLAGS[script.server])
        if flags not in self._started:
            self._started[flags] = await self._start(flags)
        return self._started[flags]

    async def _start(self, flags: tuple[str, ...]) -> Server:
        if flags:
            await self._mesh.start_router(*PATIENT, *flags)
            await self._mesh.ready(1, 1)
        router = self._mesh.router
        triton = await self._stack.enter_async_context(Triton(router.address))
        http = await self._stack.enter_async_context(PlainHttp(router.http_address))
        return Server(triton, http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    folder = tiny_llama.build(tmp_path_factory.mktemp("llama"))
    flags = (*tiny_llama.engine_flags(folder), "--torch-adapters-host-bytes", str(2**20))
    async with (
        running_mesh(engine_flags=flags, router_flags=PATIENT, model_dir=folder) as mesh,
        AsyncExitStack() as stack,
    ):
        servers = Servers(mesh, stack)
        await servers.of(SCRIPTS[0], SCRIPTS[0].since)
        yield servers


def every_run_has(script: Script, release: str) -> bool:
    """Routers differ by release where theirs is told; elsewhere the tensors do, which test_releases has of each."""
    return script.server == "dated" or release in (script.releases[0], script.releases[-1])


@pytest.mark.parametrize(
    ("script", "release"),
    [
        pytest.param(
            *(script, release),
            id=f"{script.name} {script.options} {script.server}-{release}",
            marks=[] if every_run_has(script, release) else pytest.mark.soak,
        )
        for script in SCRIPTS
        for release in script.releases
    ],
)
async def test_script(servers: Servers, script: Script, release: str) -> None:
    server = await servers.of(script, release)
    if not script.refused:
        await script.run(server, release)
        return
    with pytest.raises(Refused) as caught:
        await script.run(server, release)
    known = [name for name in script.refused if name in str(caught.value)]
    assert known == list(script.refused)


async def test_wrapped_ids_are_those_modulo_the_vocabulary(servers: Servers) -> None:
    (script,) = [each for each in SCRIPTS if each.server == "wrapping"]
    server = await servers.of(script, script.since)
    size = tiny_llama.VOCABULARY_SIZE
    told = []
    for ids in ([1, size + 9, 40 * size + 300], [1, 9, 300]):
        tensors = {"input_ids": ids, "input_lengths": 3, "request_output_len": 8}
        response = await server.triton.infer("tensorrt_llm", tensors)
        told.append(response.outputs["output_ids"].ravel().tolist())
    assert told[0] == told[1]
    assert told[0][:3] == [1, 9, 300]


async def test_an_id_outside_of_the_vocabulary_names_the_setting(servers: Servers) -> None:
    server = await servers.of(SCRIPTS[0], SCRIPTS[0].since)
    tensors = {"input_ids": [1, 99_999], "input_lengths": 2, "request_output_len": 8}
    with pytest.raises(InferenceServerException, match=r"triton\.wrap_token_ids"):
        await server.triton.infer("tensorrt_llm", tensors)


async def test_details_of_old_releases_come_unasked(servers: Servers) -> None:
    """The answer in the manuals of v0.8 to v0.13 has zeros for the details."""
    script = next(each for each in SCRIPTS if each.server == "dated")
    body = {"text_input": "The quick", "max_tokens": 4, "bad_words": "", "stop_words": ""}
    path = "/v2/models/ensemble/generate"
    zeros = {"context_logits": 0.0, "cum_log_probs": 0.0, "generation_logits": 0.0}
    answer = (await (await servers.of(script, "v0.9.0")).http.post(path, body)).json
    assert zeros.items() <= answer.items()
    assert answer["output_log_probs"] == [0.0] * 4
    plain = (await (await servers.of(SCRIPTS[0], SCRIPTS[0].since)).http.post(path, body)).json
    assert not (zeros.keys() | {"output_log_probs"}) & plain.keys()
    assert plain["text_output"] == answer["text_output"]


async def test_asked_details_of_old_releases_are_real(servers: Servers) -> None:
    script = next(each for each in SCRIPTS if each.server == "dated")
    server = await servers.of(script, "v0.9.0")
    tensors = {"text_input": "The quick", "max_tokens": 4, "return_log_probs": True}
    response = await server.triton.infer("ensemble", tensors)
    assert (response.outputs["output_log_probs"] < 0).all()
    assert response.outputs["context_logits"].shape == (1, 1, 1)


async def test_metadata_of_a_server_of_an_old_release(servers: Servers) -> None:
    script = next(each for each in SCRIPTS if each.server == "dated")
    client = (await servers.of(script, "v0.6.0")).triton.client
    metadata = await client.get_model_metadata("tensorrt_llm")
    declared = {given.name: given.datatype for given in metadata.inputs}
    assert (declared["min_length"], declared["random_seed"]) == ("UINT32", "UINT64")
    assert not {"seed", "min_tokens", "draft_input_ids"} & declared.keys()


async def test_the_page_has_the_table_of_the_scripts() -> None:
    assert render() in PAGE.read_text("utf-8"), "run python -m compat.client_scripts in tests"


async def test_every_configuration_is_used() -> None:
    assert set(FLAGS) == set(SERVERS) == {script.server for script in SCRIPTS}
