"""A prefill worker and a decode worker answer as one mixed worker does, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
import torch
from chaos.tiny_adapters import tiny_adapter
from e2e.mesh import PATIENT, Mesh, eventually, running_mesh, scrape
from oracle import tiny_models
from process_constants import constants
from processes import ServiceProcess
from trtmesh.client import AdminClient, Client, FinishReason, ItemResult
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTER = "tuned"
PROMPT_TOKENS = 130
"""Not a multiple of a block."""
TOKENS = 14
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100)
"""Prompts of one token to several blocks, and one more or less than a block."""
COMPUTED = 2
"""Most tokens of a submit that the receiver computes for a sequence: the last, and the one before it."""
STEPPED: dict[str, Any] = {"max_tokens": TOKENS, "ignore_end_id": True, "log_probs": True}

TORCH = (
    *("--torch-dtype", "float32", "--torch-threads", "1", "--torch-kv-cache-tokens", "4096"),
    *("--torch-batch-invariant", "true", "--torch-adapters-host-bytes", str(1 << 24)),
    *constants(max_prompt_table_bytes=1 << 20),
)


@dataclass(frozen=True)
class Form:
    """A pair of workers: transport, tokens per block, and prompt tokens of a step, sender's first."""

    transport: str
    blocks: tuple[int, int]
    chunks: tuple[int, int]

    def flags(self, side: int) -> tuple[str, ...]:
        return (
            *("--role", ("prefill", "decode")[side], "--handoff-transports", self.transport),
            *("--torch-kv-cache-tokens-per-block", str(self.blocks[side])),
            *("--torch-batching-max-step-tokens", str(self.chunks[side])),
        )

    def __str__(self) -> str:
        sides = zip(self.blocks, self.chunks, strict=True)
        shapes = [f"blocks-of-{block}-chunks-of-{chunk}" for block, chunk in sides]
        return f"{self.transport}-{'-to-'.join(shapes)}"


BLOCKS = ((16, 16), (16, 32), (32, 16))


def drawn_forms(seed: int) -> list[Form]:
    """A pair for each transport, with blocks and chunks by lot."""
    dice = Random(seed)
    transports = ["shared_memory", "grpc"] + ["nixl"] * (find_spec("nixl_cu12") is not None)
    blocks = dice.sample(BLOCKS, len(BLOCKS))
    return [
        Form(transport, pair, (dice.randint(1, PROMPT_TOKENS), dice.randint(1, PROMPT_TOKENS)))
        for transport, pair in zip(transports, blocks, strict=False)
    ]


@dataclass(frozen=True)
class Figures:
    """Counters of a pair."""

    moved: float
    """Handoffs."""
    received_bytes: float
    computed: float
    """Prompt tokens that the receiver computed."""

    def __sub__(self, earlier: Figures) -> Figures:
        return Figures(
            self.moved - earlier.moved,
            self.received_bytes - earlier.received_bytes,
            self.computed - earlier.computed,
        )


@dataclass
class Pair:
    """A router with a prefill and a decode worker."""

    form: Form
    sender: ServiceProcess
    receiver: ServiceProcess
    router: ServiceProcess
    client: Client
    admin: AdminClient

    async def figures(self) -> Figures:
        router = await scrape(self.router, cause="disaggregated", result="moved")
        receiver = await scrape(self.receiver, side="received", transport=self.form.transport)
        moved = router.get("trtmesh_router_handoffs_total", 0.0)
        seen: list[epb.Load] = []

        async def reported() -> bool:
            workers = (await self.admin.list_workers()).workers
            seen[:] = [each.load for each in workers if each.worker == "receiver"]
            return seen[0].received_handoffs.consumed == moved and not seen[0].running_sequences

        await eventually(reported)
        size = receiver.get("trtmesh_engine_handoff_bytes_total", 0.0)
        return Figures(moved, size, seen[0].computed_prompt_tokens)

    async def settle(self) -> None:
        """Waits until both workers hold nothing."""

        async def idle() -> bool:
            samples = [await scrape(each) for each in (self.sender, self.receiver)]
            names = ("used_blocks", "held_leases", "live_sequences")
            return not any(each[f"trtmesh_engine_{name}"] for each in samples for name in names)

        await eventually(idle)


@dataclass
class Workers:
    """A mixed worker, and pairs of all forms."""

    mesh: Mesh
    pairs: Mapping[Form, Pair]
    folder: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_models.build(tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    forms = drawn_forms(seed_of(request.config))
    model = ("--model-dir", str(folder))
    async with (
        AsyncExitStack() as stack,
        running_mesh(engine_flags=(*TORCH, *model), router_flags=PATIENT, model_dir=folder) as mesh,
    ):
        pairs = await asyncio.gather(*(start_pair(mesh, stack, form, model) for form in forms))
        content = tiny_adapter(3, 8).content
        for admin in (mesh.admin, *(pair.admin for pair in pairs)):
            await admin.upload_adapter(admin_pb.AddAdapterRequest(name=ADAPTER), content)
        yield Workers(mesh, {pair.form: pair for pair in pairs}, folder)


async def start_pair(mesh: Mesh, stack: AsyncExitStack, form: Form, model: tuple[str, ...]) -> Pair:
    sender, receiver = await asyncio.gather(
        mesh.start("engine", "--port", "0", "--worker", "sender", *TORCH, *model, *form.flags(0)),
        mesh.start("engine", "--port", "0", "--worker", "receiver", *TORCH, *model, *form.flags(1)),
    )
    links = ("--engines", f"{sender.address},{receiver.address}")
    tokenizers = ("--tokenizers", mesh.tokenizers[0].address)
    flags = ("--port", "0", *links, *tokenizers, "--handoff-enabled", "always")
    router = await mesh.start("router", *flags)
    client = await stack.enter_async_context(Client(router.address))
    admin = await stack.enter_async_context(AdminClient(router.admin_address))

    async def ready() -> bool:
        states = [each.state for each in (await admin.list_workers()).workers]
        return states == [admin_pb.WORKER_STATE_READY] * 2

    await eventually(ready)
    return Pair(form, sender, receiver, router, client, admin)


def seed_of(config: pytest.Config) -> int:
    seed: int = config.getoption("--forms", default=None) or 0
    return seed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The suite has each case with one form, and all other tests with every form; `make soak` has all with all."""
    if "pair" in metafunc.fixturenames:
        forms = drawn_forms(seed_of(metafunc.config))
        if "case" not in metafunc.fixturenames:
            metafunc.parametrize("pair", forms, ids=map(str, forms), indirect=True)
            return
        runs_all = metafunc.config.getoption("--forms", default=None) is not None
        chosen = [
            (form, case)
            for turn, case in enumerate(CASES)
            for form in (forms if runs_all else [forms[turn % len(forms)]])
        ]
        ids = [f"{form}-{case}" for form, case in chosen]
        metafunc.parametrize(("pair", "case"), chosen, ids=ids, indirect=["pair"])


@pytest.fixture
def pair(workers: Workers, request: pytest.FixtureRequest) -> Pair:
    return workers.pairs[request.param]


def prompt_of(pair: Pair, case: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    """A prompt of the pair's own, so that no worker has its KV."""
    seed = sum(f"{pair.form} {case}".encode())
    generator = torch.Generator().manual_seed(seed)
    prompt: list[int] = torch.randint(2, 300, (tokens,), generator=generator).tolist()
    return prompt


def table() -> pb.PromptTuningConfig:
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)) * tiny_models.WEIGHT_STD
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_FP32, shape=rows.shape, data=rows.numpy().tobytes())
    return pb.PromptTuningConfig(embedding_table=tensor)


CASES: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "adapter": {"adapter": ADAPTER},
    "sampled_adapter": {"adapter": ADAPTER, "temperature": 1.0, "seed": 3},
    "prompt_table": {"prompt_tuning": table()},
    "several_sequences": {"temperature": 1.0, "seed": 5, "num_return_sequences": 3},
    "beams": {"beam_width": 4},
    "prompt_details": {"prompt_log_probs": True, "context_logits": True, "top_log_probs": 3},
    "generation_logits": {"generation_logits": True, "logits_data_type": pb.DATA_TYPE_FP32},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "n_grams": {"no_repeat_ngram_size": 2, "bad_token_ids": [[11], [40, 41]]},
    "decaying_top_p": {"temperature": 1.2, "top_p": 0.9, "top_p_decay": 0.8, "seed": 2},
    "bias": {"embedding_bias_token_ids": [[11], [40]], "embedding_bias_weights": [4.0, -3.0]},
}


def everything(item: ItemResult) -> list[Any]:
    """What a client sees of an item, however its events were cut."""
    assert item.error is None, item.error
    details = item.prompt_details
    return [
        (item.reason, item.usage.prompt_tokens, item.usage.generated_tokens),
        details and details.SerializeToString(deterministic=True),
        *(
            (
                sequence.token_ids,
                sequence.text,
                sequence.finished,
                sequence.log_probs,
                [each.SerializeToString(deterministic=True) for each in sequence.top_log_probs],
                sequence.generation_logits and sequence.generation_logits.data,
            )
            for sequence in item.sequences
        ),
    ]


async def test_pair_equals_a_mixed_worker(workers: Workers, pair: Pair, case: str) -> None:
    prompt = prompt_of(pair, case)
    if case == "prompt_table":
        prompt[5:8] = 320, 321, 322
    options = {**STEPPED, **CASES[case], "request_id": case}
    before = await pair.figures()
    (whole,) = await workers.mesh.client.complete([prompt], **options)
    (split,) = await pair.client.complete([prompt], **options)
    assert everything(split) == everything(whole)
    await pair.settle()
    made = await pair.figures() - before
    assert made.moved == 1
    assert made.received_bytes > 0
    assert made.computed <= COMPUTED * len(split.sequences)


async def test_many_prompts_at_once(workers: Workers, pair: Pair) -> None:
    prompts = [prompt_of(pair, f"many {length}", length) for length in LENGTHS]
    whole = await workers.mesh.client.complete(prompts, **STEPPED)
    before = await pair.figures()
    split = await pair.client.complete(prompts, **STEPPED)
    assert list(map(everything, split)) == list(map(everything, whole))
    made = await pair.figures() - before
    assert made.moved == len(prompts)
    assert made.computed <= COMPUTED * len(prompts)
    await pair.settle()


async def test_present_prefix_is_not_sent_again(workers: Workers, pair: Pair) -> None:
    prompt = prompt_of(pair, "present")
    sizes = []
    for tokens in (len(prompt), len(prompt) + 3):
        asked = [*prompt, 7, 8, 9][:tokens]
        (whole,) = await workers.mesh.client.complete([asked], **STEPPED)
        before = await pair.figures()
        (split,) = await pair.client.complete([asked], **STEPPED)
        assert everything(split) == everything(whole)
        made = await pair.figures() - before
        assert made.moved == 1
        sizes.append(made.received_bytes)
    assert 0 < sizes[1] < sizes[0] / 3


async def test_stop_text_spans_the_handoff(workers: Workers, pair: Pair) -> None:
    """The text begins with the first token, of the sender, and ends with the second, of the receiver."""
    prompt = prompt_of(pair, "stop")
    (whole,) = await workers.mesh.client.complete([prompt], **STEPPED)
    (chunks,) = [sequence.chunks for sequence in whole.sequences]
    text = whole.text
    assert chunks
    for stop_text in (text[1:4], text[5:9]):
        options = {**STEPPED, "stop_texts": [stop_text]}
        (expected,) = await workers.mesh.client.complete([prompt], **options)
        assert expected.reason is FinishReason.STOP_WORD
        (split,) = await pair.client.complete([prompt], **options)
        assert everything(split) == everything(expected)
    await pair.settle()


async def test_end_at_the_first_token_needs_no_receiver(workers: Workers, pair: Pair) -> None:
    prompt = prompt_of(pair, "end")
    (whole,) = await workers.mesh.client.complete([prompt], **STEPPED)
    ends: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": TOKENS, "end_id": whole.token_ids[0]},
    ]
    for options in ends:
        (expected,) = await workers.mesh.client.complete([prompt], **options)
        before = await pair.figures()
        (split,) = await pair.client.complete([prompt], **options)
        assert everything(split) == everything(expected)
        assert (await pair.figures() - before).moved == 0
        await pair.settle()
