"""Unusable adapters, from requests, uploads and directories: one error each, and nothing else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from chaos.fragile import Fragile, fragile_mesh
from chaos.steady_streams import Ask, steady_streams
from chaos.tiny_adapters import HIDDEN, Oracle, TinyAdapter, save_adapter, tiny_adapter
from e2e.mesh import PATIENT, eventually
from engine_streams import router_stream
from oracle import tiny_models
from process_constants import constants
from processes import ServiceProcess
from safetensors.torch import save
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import (
    AdapterMismatch,
    InvalidField,
    InvalidRequest,
    TrtmeshError,
    Unsupported,
)
from trtmesh.client import ItemResult
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST_BYTES = 200_000
MOST_RANK = 16
PROMPT = tiny_models.prompts(2)[1]
TOKENS = 8
GOOD = tiny_adapter(1, 4)
NUMBER = 5
"""Brought before, and used by the streams that must not notice."""


@dataclass
class Lab:
    """A mesh of two workers with a tiny model, and directories of its router."""

    fragile: Fragile
    oracle: Oracle
    root: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    model_dir = tiny_models.build(tmp_path_factory.mktemp("tiny"))
    root = tmp_path_factory.mktemp("root")
    engine = (
        *("--backend", "torch", "--model-dir", str(model_dir), "--torch-threads", "1"),
        *("--torch-kv-cache-tokens", "4096", "--torch-adapters-host-bytes", str(1 << 24)),
        *("--torch-adapters-max-rank", str(MOST_RANK)),
        *constants(max_adapter_bytes=MOST_BYTES),
    )
    router = (
        *(*PATIENT, "--adapters-roots", str(root), *constants(max_adapter_bytes=2 * MOST_BYTES)),
        # Nothing stays in memory: every delivery reads the files again.
        *(
            "--adapters-directory",
            str(tmp_path_factory.mktemp("adapters")),
            "--adapters-bytes",
            "0",
        ),
    )
    async with fragile_mesh(engine, model_dir, router) as fragile:
        yield Lab(fragile, Oracle(model_dir), root)


async def generate(lab: Lab, lora: pb.LoraConfig | None) -> ItemResult:
    options: dict[str, Any] = {} if lora is None else {"adapter": lora}
    (item,) = await lab.fragile.mesh.client.complete(
        [PROMPT], max_tokens=TOKENS, ignore_end_id=True, **options
    )
    return item


def steady(lab: Lab) -> list[Ask]:
    """Streams of the base and of an adapter."""

    def asking(adapter: TinyAdapter | None, lora: pb.LoraConfig | None) -> Ask:
        async def ask() -> None:
            item = await generate(lab, lora)
            assert item.error is None
            assert lab.oracle.is_greedy(adapter, PROMPT, item.token_ids)
            assert len(item.token_ids) == TOKENS

        return ask

    return [asking(None, None), asking(GOOD, GOOD.brought(NUMBER))] * 2


def named(lab: Lab, name: str) -> list[Ask]:
    """A stream of a registered adapter with the good content."""

    async def ask() -> None:
        item = await generate(lab, pb.LoraConfig(name=name))
        assert item.error is None
        assert lab.oracle.is_greedy(GOOD, PROMPT, item.token_ids)

    return [ask]


def peft(adapter: TinyAdapter, **changes: Any) -> AdapterContent:
    config = adapter.config(**changes)
    return AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, save(adapter.tensors()))


def with_first(adapter: TinyAdapter, change: Callable[[torch.Tensor], torch.Tensor]) -> TinyAdapter:
    """A copy with another A of the first layer."""
    name, (a, b) = next(iter(adapter.updates.items()))
    return replace(adapter, updates={**adapter.updates, name: (change(a.clone()), b)})


def with_nan(a: torch.Tensor) -> torch.Tensor:
    a[0, 0] = float("nan")
    return a


def of_layer(adapter: TinyAdapter, layer: int) -> TinyAdapter:
    renamed = {
        name.replace("layers.1.", f"layers.{layer}."): update
        for name, update in adapter.updates.items()
    }
    return replace(adapter, updates=renamed)


WHOLE = GOOD.content
CONTENTS: Mapping[str, tuple[AdapterContent, str, str]] = {
    "truncated": (
        replace(WHOLE, weights=WHOLE.weights[:-100]),
        "INVALID_REQUEST",
        "adapter_model.safetensors",
    ),
    "too large for workers": (
        tiny_adapter(3, 56).content,
        "INVALID_FIELD",
        "load_adapter content",
    ),
    "nan": (peft(with_first(GOOD, with_nan)), "INVALID_REQUEST", "adapter.layer_0.attn_q"),
    "shape": (
        peft(with_first(GOOD, lambda a: a[:, : HIDDEN // 2].contiguous())),
        "INVALID_REQUEST",
        "adapter.layer_0.attn_q",
    ),
    "another rank": (
        peft(GOOD, r=8),
        "INVALID_REQUEST",
        "adapter.base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
    ),
    "rank above the limit": (tiny_adapter(2, 18).content, "INVALID_FIELD", "adapter rank"),
    "another model": (peft(of_layer(GOOD, 7)), "INVALID_REQUEST", "adapter.layer_7.mlp_4h_to_h"),
}
"""Contents with the reason and the field of their error."""


async def check_refused(lab: Lab, lora: pb.LoraConfig, reason: str, field: str) -> TrtmeshError:
    """An item ends with the error and without a token."""
    item = await generate(lab, lora)
    assert item.error is not None
    assert (item.error.reason, item.error.field) == (reason, field)
    assert not item.token_ids
    return item.error


async def settled(lab: Lab) -> None:
    """Nothing is in use, and workers hold no adapter but the good one."""
    await lab.fragile.check_nothing_is_left()
    await settled_under_load(lab)


async def settled_under_load(lab: Lab) -> None:
    """Workers hold no adapter but the good one."""
    await eventually(lambda: only_good_held(lab))


async def only_good_held(lab: Lab) -> bool:
    return all([await holds_only_good(engine) for engine in lab.fragile.engines.values()])


async def holds_only_good(engine: ServiceProcess) -> bool:
    async with router_stream(engine.address) as stream:
        await stream.until(lambda: stream.loads)
        held = [s for s in stream.adapter_states if s.place != epb.ADAPTER_PLACE_ABSENT]
        size = sum(state.size_bytes for state in held)
        # The first report may be older than the states.
        is_told = size == stream.loads[-1].used_adapter_host_bytes
        return is_told and {state.id for state in held} <= {NUMBER}


@pytest.mark.parametrize("by", ["upload", "source"])
async def test_broken_versions_under_load_change_nothing(lab: Lab, by: str) -> None:
    """Neither as first versions, nor as new ones or canaries of an adapter in use."""
    admin, used = lab.fragile.mesh.admin, admin_pb.AddAdapterRequest(name="used", id=NUMBER + 2)

    async def add(kind: str, name: str, share: float | None = None) -> TrtmeshError:
        asked = admin_pb.AddAdapterRequest(name=name, id=NUMBER + 2, canary_share=share)
        adding = admin.upload_adapter(asked, CONTENTS[kind][0])
        if by == "source":
            adding.close()
            asked.source = kind.replace(" ", "-")
            save_adapter(CONTENTS[kind][0], lab.root / asked.source)
            adding = admin.add_adapter(asked)
        with pytest.raises((InvalidRequest, Unsupported)) as refused:
            await adding
        return refused.value

    for kind, (_, reason, field) in CONTENTS.items():
        error = await add(kind, "unknown")
        assert (error.reason, error.field) == (reason, field)
    await admin.upload_adapter(used, GOOD.content)
    async with steady_streams([*steady(lab), *named(lab, "used") * 2]):
        for number, (kind, (content, reason, field)) in enumerate(CONTENTS.items()):
            # Each kind is a canary of one way of the two.
            error = await add(kind, "used", 0.5 if number % 2 == (by == "upload") else None)
            assert (error.reason, error.field) == (reason, field), kind
            (listed,) = [e for e in (await admin.list_adapters()).adapters if e.name == "used"]
            assert [each.version for each in listed.versions] == [GOOD.content.version]
            assert (listed.refused_version, listed.refusal.reason) == (content.version, reason)
    await admin.remove_adapter(used.id)
    await settled(lab)


@asynccontextmanager
async def without_workers(lab: Lab) -> AsyncIterator[None]:
    """No worker can try an adapter meanwhile."""
    admin = lab.fragile.mesh.admin
    for name in lab.fragile.engines:
        await admin.drain_worker(name)
    yield
    for name in lab.fragile.engines:
        await admin.resume_worker(name)


async def test_first_version_that_no_worker_could_try_is_not_the_clients_fault(lab: Lab) -> None:
    admin = lab.fragile.mesh.admin
    content, _, field = CONTENTS["nan"]
    async with without_workers(lab):
        added = await admin.upload_adapter(admin_pb.AddAdapterRequest(name="untried"), content)
    error = await check_refused(lab, pb.LoraConfig(name="untried"), "ADAPTER_BROKEN", "")
    assert field in error.message
    await admin.remove_adapter(added.id)
    await settled(lab)


def brought(adapter: TinyAdapter) -> pb.LoraConfig:
    return adapter.brought(NUMBER + 1)


def cut_short(lora: pb.LoraConfig) -> pb.LoraConfig:
    lora.weights.data = lora.weights.data[:-100]
    return lora


def of_another_rank(lora: pb.LoraConfig) -> pb.LoraConfig:
    row = bytearray(lora.config.data)
    row[8:12] = (9).to_bytes(4, "little")
    lora.config.data = bytes(row)
    return lora


BROUGHT: Mapping[str, tuple[pb.LoraConfig, str, str]] = {
    "truncated": (cut_short(brought(GOOD)), "INVALID_FIELD", "lora.weights.data"),
    "too large": (
        brought(tiny_adapter(3, 56)),
        "INVALID_FIELD",
        "load_adapter content",
    ),
    "nan": (brought(with_first(GOOD, with_nan)), "INVALID_REQUEST", "adapter.layer_0.attn_q"),
    "another rank": (
        of_another_rank(brought(GOOD)),
        "INVALID_REQUEST",
        "adapter.layer_0.attn_q",
    ),
    "rank above the limit": (brought(tiny_adapter(2, 18)), "INVALID_FIELD", "adapter rank"),
    "another model": (
        brought(of_layer(GOOD, 7)),
        "INVALID_REQUEST",
        "adapter.layer_7.attn_q",
    ),
}


async def test_unusable_weights_end_the_items_that_bring_them(lab: Lab) -> None:
    async with steady_streams(steady(lab)):
        for kind, (lora, reason, field) in BROUGHT.items():
            if kind == "truncated":
                with pytest.raises(InvalidRequest) as refused:
                    await generate(lab, lora)
                assert refused.value.reason == reason
            else:
                await check_refused(lab, lora, reason, field)
            await settled_under_load(lab)
    await settled(lab)


SOURCES = ("../outside", "/etc", "link", "absent", "a/../../outside", "")


async def test_source_outside_the_roots_is_refused(lab: Lab) -> None:
    outside = lab.root.parent / "outside"
    save_adapter(WHOLE, outside)
    (lab.root / "link").symlink_to(outside)
    async with steady_streams(steady(lab)):
        for source in SOURCES:
            asked = admin_pb.AddAdapterRequest(name="outside", source=source)
            with pytest.raises(InvalidField) as refused:
                await lab.fragile.mesh.admin.add_adapter(asked)
            assert refused.value.field == "source", source
            listed = (await lab.fragile.mesh.admin.list_adapters()).adapters
            assert "outside" not in [each.name for each in listed], source
    await settled(lab)


async def test_too_large_upload_is_refused(lab: Lab) -> None:
    large = replace(WHOLE, weights=WHOLE.weights + bytes(4 * MOST_BYTES))
    asked = admin_pb.AddAdapterRequest(name="large")
    async with steady_streams(steady(lab)):
        with pytest.raises(InvalidField) as refused:
            await lab.fragile.mesh.admin.upload_adapter(asked, large)
        assert refused.value.limit == f"at most {2 * MOST_BYTES} bytes"
    await settled(lab)


async def test_content_with_another_digest_is_refused(lab: Lab) -> None:
    admin, other = lab.fragile.mesh.admin, tiny_adapter(4, 4)
    save_adapter(WHOLE, lab.root / "digest")
    asked = admin_pb.AddAdapterRequest(name="digest", source="digest", version=other.version)
    async with steady_streams(steady(lab)):
        with pytest.raises(AdapterMismatch) as refused:
            await admin.add_adapter(asked)
        assert (refused.value.field, refused.value.limit) == ("version", WHOLE.version)
        uploaded = admin_pb.AddAdapterRequest(name="digest", version=other.version)
        with pytest.raises(AdapterMismatch) as refused:
            await admin.upload_adapter(uploaded, WHOLE)
        assert refused.value.field == "version"
    await settled(lab)


async def test_items_fail_once_the_files_of_a_version_change(lab: Lab) -> None:
    admin, other = lab.fragile.mesh.admin, tiny_adapter(4, 4)
    save_adapter(WHOLE, lab.root / "changing")
    async with without_workers(lab):
        asked = admin_pb.AddAdapterRequest(name="changing", source="changing")
        added = await admin.add_adapter(asked)
    save_adapter(other.content, lab.root / "changing")
    async with steady_streams(steady(lab)):
        lora = pb.LoraConfig(name="changing")
        error = await check_refused(lab, lora, "ADAPTER_BROKEN", "")
        assert "changed on disk" in error.message
        save_adapter(WHOLE, lab.root / "changing")
        item = await generate(lab, lora)
        assert lab.oracle.is_greedy(GOOD, PROMPT, item.token_ids)
        await admin.remove_adapter(added.id)
    await settled(lab)
