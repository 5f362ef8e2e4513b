"""Adapters are directories to the library: written when loaded, with a number of their own, removed when unloaded."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.tiny_adapters import TinyAdapter, tiny_adapter
from engine.backend_lab import Lab, config_of, lab
from engine.tensorrt_llm.harness import PROMPT, backend, last_call, tokens, watch
from oracle import tiny_models
from safetensors.torch import load_file, save
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import AdapterNotFound, InvalidField, InvalidRequest, TrtmeshError
from trtmesh.chassis.parsing import parse_config
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import AdapterLoad, HeldAdapter
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

NEW: dict[str, Any] = {"max_tokens": 6, "ignore_end_id": True}
ROOM = {"disk_bytes": 2**24}
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
LAYERS = ["attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h"]
ALL = {"lora_config": {"lora_target_modules": LAYERS}}


def with_adapter(number: int, version: str) -> dict[str, Any]:
    return {**NEW, "adapter": pb.LoraConfig(id=number, version=version)}


def content(seed: int, rank: int = 8) -> AdapterContent:
    """An adapter of the layers that workers compute unless told otherwise."""
    return tiny_adapter(seed, rank, ATTENTION).content


@pytest.fixture(autouse=True)
def _temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "adapters"))


async def load(on: Lab, number: int, of: AdapterContent, version: str) -> HeldAdapter | None:
    """Loads a content; returns its state, or None where it is not in memory."""
    on.adapters.load_adapter(AdapterLoad(Adapter(number, "prose", version), of))
    found: list[HeldAdapter] = []

    def is_known() -> bool:
        found[:] = [each for each in on.adapters.adapters() if each.adapter.version == version]
        return bool(found)

    await on._until(is_known)
    return found[0]


async def test_an_adapter_arrives_as_a_directory_of_its_content(
    release: str, tmp_path: Path
) -> None:
    async with lab(backend(adapters=ROOM)) as on:
        given = content(1)
        held = await load(on, 7, given, "a")
        assert held is not None
        assert (held.rank, held.place) == (8, epb.ADAPTER_PLACE_HOST)
        adapted = await tokens(on, **with_adapter(7, "a"))
        request = last_call()["lora_request"]
        assert request.lora_name == "prose"
        files = Path(request.lora_path)
        assert (files / "adapter_config.json").read_bytes() == given.config
        assert (files / "adapter_model.safetensors").read_bytes() == given.weights
        assert adapted != await tokens(on, **NEW)
        with pytest.raises(AdapterNotFound):
            on.submit(PROMPT, config_of(with_adapter(8, "a")))
    assert list((tmp_path / "adapters").iterdir()) == []


async def test_every_content_keeps_a_number_of_its_own(release: str) -> None:
    """The library caches by number, and has no call to forget one."""
    async with lab(backend(adapters=ROOM)) as on:
        numbers, places = [], []

        async def use(version: str, of: AdapterContent) -> None:
            await load(on, 7, of, version)
            await tokens(on, **with_adapter(7, version))
            request = last_call()["lora_request"]
            numbers.append(request.lora_int_id)
            places.append(request.lora_path)

        await use("a", content(1))
        await use("b", content(2))
        on.adapters.unload_adapter(7, "a", unpin=False)
        await on._until(lambda: len(on.adapters.adapters()) == 1)
        await use("a", content(1))
        first, other, again = numbers
        assert first != other
        assert first == again
        assert len(set(places)) == 3


async def test_an_unloaded_adapter_leaves_with_its_last_sequence(
    release: str,
) -> None:
    async with lab(backend(adapters=ROOM)) as on:
        await load(on, 7, content(1), "a")
        endless = {**with_adapter(7, "a"), "max_tokens": 1500}
        keys = on.submit(PROMPT, config_of(endless))
        await on._until(lambda: bool(on.outcomes[keys[0]].token_ids))
        on.adapters.unload_adapter(7, "a", unpin=False)
        assert len(on.adapters.adapters()) == 1
        on.backend.stop(keys, pb.FINISH_REASON_STOPPED)
        await on.ended(keys)
        assert on.adapters.adapters() == []


async def test_files_of_killed_workers_leave_and_those_of_others_stay(
    target: str, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    left = folder / "trtmesh-adapters-left"
    (left / "1").mkdir(parents=True)
    (folder / "other").mkdir()
    async with lab(backend(adapters=ROOM)) as on:
        await load(on, 7, content(1), "a")
        assert not left.exists()
        async with lab(backend(adapters=ROOM)):
            assert await tokens(on, **with_adapter(7, "a"))
            assert len(list(folder.glob("trtmesh-adapters-*/1"))) == 1
    assert [each.name for each in folder.iterdir()] == ["other"]


async def test_a_request_that_the_library_refuses_holds_no_adapter(
    target: str, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    async with lab(backend(adapters=ROOM)) as on:
        await load(on, 7, content(1), "a")
        for files in folder.glob("*/*"):
            shutil.rmtree(files)
        with pytest.raises(InvalidRequest, match="does not exist"):
            on.submit(PROMPT, config_of(with_adapter(7, "a")))
        on.adapters.unload_adapter(7, "a", unpin=False)
        assert on.adapters.adapters() == []


async def test_a_failed_load_leaves_nothing(release: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    settings = {**ROOM, "max_rank": 4}
    async with lab(backend(adapters=settings)) as on:
        news: list[HeldAdapter] = []
        watch(on, lambda step: news.extend(step.adapters))
        on.adapters.load_adapter(AdapterLoad(Adapter(7, "", "a"), content(1, rank=8)))
        await on._until(lambda: bool(news))
        assert news[0].error is not None
        assert "max_rank" in news[0].error.message
        assert on.adapters.adapters() == []
        (own,) = folder.iterdir()
        assert list(own.iterdir()) == []


async def refusal(content: AdapterContent, **settings: Any) -> TrtmeshError:
    """Why a content is not loaded."""
    async with lab(backend(adapters={**ROOM, **settings})) as on:
        news: list[HeldAdapter] = []
        watch(on, lambda step: news.extend(step.adapters))
        on.adapters.load_adapter(AdapterLoad(Adapter(7, "", "a"), content))
        await on._until(lambda: bool(news))
        assert on.adapters.adapters() == []
        assert news[0].error is not None
        return news[0].error


async def test_a_layer_that_the_library_does_not_compute_is_refused(target: str) -> None:
    """The library would compute the others alone."""
    error = await refusal(tiny_adapter(3, 4, [*ATTENTION, "mlp.up_proj"]).content)
    assert isinstance(error, InvalidField)
    assert "mlp.up_proj (mlp_gate)" in error.message
    assert "options.lora_config.lora_target_modules" in error.message
    async with lab(backend(adapters=ROOM, options=ALL)) as on:
        await on.load([AdapterLoad(Adapter(7, "", "a"), tiny_adapter(3, 4).content)])


async def test_a_layer_without_a_word_of_the_library_is_refused(target: str) -> None:
    adapter = tiny_adapter(3, 4, ATTENTION)
    tensors = adapter.tensors() | {
        f"base_model.model.lm_head.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"
    }
    content = AdapterContent(pb.ADAPTER_FORMAT_PEFT, adapter.config(), save(tensors))
    assert "lm_head" in (await refusal(content)).message


@pytest.mark.parametrize(
    "change",
    [{"alpha_pattern": {"q_proj": 8}}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}],
    ids=lambda change: next(iter(change)),
)
async def test_a_configuration_that_the_library_does_not_follow_is_refused(
    target: str, change: dict[str, Any]
) -> None:
    adapter = tiny_adapter(3, 4, ATTENTION)
    config, weights = adapter.config(**change), adapter.content.weights
    error = await refusal(AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, weights))
    assert next(iter(change)) in error.message


def brought(adapter: TinyAdapter) -> AdapterContent:
    """The arrays of a request."""
    lora = parse_config(pb.GenerationConfig(lora=adapter.brought(7))).lora
    assert lora is not None
    assert lora.weights is not None
    assert lora.config is not None
    return AdapterContent.of_arrays(lora.weights, lora.config)


async def test_arrays_become_a_directory_of_peft(target: str, tmp_path: Path) -> None:
    """What a request brings inline has a format that the library's interface does not take."""
    model = tiny_models.build(tmp_path / "model", "llama")
    adapter = tiny_adapter(3, rank=4)
    async with lab(backend(model, adapters=ROOM, options=ALL)) as on:
        await load(on, 7, brought(adapter), "a")
        await tokens(on, prompt=[9, 40, 41], **with_adapter(7, "a"))
        files = Path(last_call()["lora_request"].lora_path)
        written = load_file(files / "adapter_model.safetensors")
        given = adapter.tensors()
        assert written.keys() == given.keys()
        for name, tensor in written.items():
            if name.endswith("lora_A.weight"):
                assert tensor.equal(given[name].to(tensor.dtype))


async def test_arrays_of_several_ranks_are_written_with_one(target: str, tmp_path: Path) -> None:
    """The library divides one alpha by the rank of each layer, whatever patterns say."""
    model = tiny_models.build(tmp_path / "model", "llama")
    low, high = tiny_adapter(3, 2, ATTENTION[:1]), tiny_adapter(4, 8, ATTENTION[1:])
    mixed = TinyAdapter(8, {**low.updates, **high.updates})
    async with lab(backend(model, adapters=ROOM)) as on:
        await load(on, 7, brought(mixed), "a")
        await tokens(on, prompt=[9, 40, 41], **with_adapter(7, "a"))
        files = Path(last_call()["lora_request"].lora_path)
        config = json.loads((files / "adapter_config.json").read_bytes())
        written = load_file(files / "adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"], config["alpha_pattern"]) == (8, 8, {})
    for name, (a, b) in mixed.updates.items():
        whole_a = written[f"base_model.model.{name}.lora_A.weight"].float()
        whole_b = written[f"base_model.model.{name}.lora_B.weight"].float()
        assert len(whole_a) == 8
        assert (whole_b @ whole_a).allclose(b.float() @ a.float(), atol=1e-5)


async def test_arrays_of_a_layer_that_is_not_computed_are_refused(
    target: str, tmp_path: Path
) -> None:
    model = tiny_models.build(tmp_path / "model", "llama")
    async with lab(backend(model, adapters=ROOM)) as on:
        news: list[HeldAdapter] = []
        watch(on, lambda step: news.extend(step.adapters))
        on.adapters.load_adapter(AdapterLoad(Adapter(7, "", "a"), brought(tiny_adapter(3, 4))))
        await on._until(lambda: bool(news))
        assert isinstance(news[0].error, InvalidField)
        assert "options.lora_config.lora_target_modules" in news[0].error.message
