"""Unusable model directories are refused with a reason; rotary embeddings are made independent of the batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.short_names import by_short_names
from engine.torch.harness import configure, running
from oracle import tiny_models
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.settings import TorchSettings


async def refusal(folder: Path, **settings: Any) -> str:
    """The message of the backend's refusal to start."""
    backend = TorchBackend(folder, by_short_names(TorchSettings, threads=1, **settings))
    with pytest.raises(ModelUnusable) as caught:
        await backend.start(lambda _: None, lambda _: None)
    return str(caught.value)


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A model for tests to break."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


async def test_directories_without_a_model_are_refused(copy: Path, tmp_path: Path) -> None:
    assert "does not exist" in await refusal(tmp_path / "nowhere")
    (copy / "config.json").unlink()
    assert "has no config.json" in await refusal(copy)
    (copy / "config.json").write_text("{")
    assert "config.json is refused" in await refusal(copy)


async def test_pickles_are_not_opened(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"anything")
    assert f"pytorch_model.bin: run trtmesh convert {copy}" in await refusal(copy)


@pytest.mark.parametrize("damage", ["torn", "garbage", "empty"])
async def test_damaged_weights(copy: Path, damage: str) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(
        {"torn": content[: len(content) // 2], "garbage": b"\xff" * 100, "empty": b""}[damage]
    )
    assert "model.safetensors is not a readable safetensors file" in await refusal(copy)


async def test_weights_that_do_not_fit_the_config(copy: Path) -> None:
    file = copy / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != name}, file, {"format": "pt"})
    assert f"missing keys: {name}" in await refusal(copy)
    save_file({**weights, "model.extra": weights[name].clone()}, file, {"format": "pt"})
    assert "unexpected keys: model.extra" in await refusal(copy)
    save_file({**weights, name: weights[name][:5].clone()}, file, {"format": "pt"})
    assert f"mismatched keys: ('{name}'" in await refusal(copy)
    save_file(weights, file, {"format": "pt"})
    change_config(copy, num_hidden_layers=1)
    assert "unexpected keys" in await refusal(copy)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 320}


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("mamba", {**SMALL, "state_size": 4}, "must each call the attention interface"),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8}, "attention interface"),
        (
            "bert",
            {**SMALL, "num_attention_heads": 2, "intermediate_size": 32, "is_decoder": False},
            "refused",
        ),
    ],
)
async def test_architectures_that_cannot_be_paged(
    tmp_path: Path, model_type: str, values: dict[str, Any], words: str
) -> None:
    tiny_models.build_type(tmp_path, model_type, **values)
    assert words in await refusal(tmp_path)


async def test_an_encoder_decoder_and_an_unknown_type(copy: Path) -> None:
    change_config(copy, model_type="t5", is_encoder_decoder=True)
    assert "encoder-decoder" in await refusal(copy)
    change_config(copy, model_type="no-such-type", is_encoder_decoder=False)
    assert "config.json is refused" in await refusal(copy)


async def test_code_in_the_directory_is_not_run(copy: Path) -> None:
    (copy / "modeling.py").write_text("raise SystemExit('this ran')")
    change_config(copy, model_type="own", auto_map={"AutoConfig": "modeling.Config"})
    said = await refusal(copy)
    assert "config.json is refused" in said
    assert "code of a model is never run" in said
    assert "trust_remote_code" not in said


async def test_weights_that_are_not_numbers(copy: Path) -> None:
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, file, {"format": "pt"})
    assert "logits differ by nan" in await refusal(copy)


async def test_the_self_check_finds_a_layer_that_sees_too_little(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtmesh.engine.backends.torch.compute import grouping

    right = grouping.Grouping._chunk_group

    def nearsighted(self: Any, *arguments: Any) -> Any:
        step, sequence, token, count, _ = arguments
        return right(self, step, sequence, token, count, 4)

    monkeypatch.setattr(grouping.Grouping, "_chunk_group", nearsighted)
    assert "differ by" in await refusal(llama)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_sequence_tokens": 1000}, "limits.max_sequence_tokens is 1000 but the model has 512"),
        ({"kv_cache_tokens": 3}, "holds no block of 16"),
    ],
)
async def test_sizes_that_do_not_fit_the_model(
    llama: Path, settings: dict[str, Any], words: str
) -> None:
    assert words in await refusal(llama, **settings)


DYNAMIC = {
    "rope_type": "dynamic",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i / 2 for i in range(8)],
}


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
async def test_rotary_embeddings_that_look_at_the_batch_are_frozen(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    folder = tiny_models.build(tmp_path, rope_parameters=rope)
    short, long = tiny_models.prompts(1)[0], [7] * 100
    config = configure(max_tokens=8, ignore_end_id=True)
    async with running(folder) as engine:
        alone = await engine.run([short], config)
        assert await engine.run([short, long, long], config) == [
            *alone,
            *(await engine.run([long], config)) * 2,
        ]


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
async def test_within_the_original_length_they_are_those_of_transformers(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    folder = tiny_models.build(tmp_path, rope_parameters=rope)
    model = tiny_models.reference_model(folder)
    prompts = [prompt[:20] for prompt in tiny_models.prompts(4)]
    expected = [tiny_models.greedy(model, prompt, 8) for prompt in prompts]
    async with running(folder, max_sequence_tokens=32) as engine:
        assert await engine.run(prompts, configure(max_tokens=8, ignore_end_id=True)) == expected


async def test_a_model_that_attends_in_chunks_is_served_up_to_one_chunk(tmp_path: Path) -> None:
    folder = tiny_models.build_type(
        tmp_path,
        "llama4_text",
        **tiny_models.SHAPE,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=40,
    )
    model = tiny_models.reference_model(folder)
    prompts = [prompt[:30] for prompt in tiny_models.prompts(3)]
    expected = [tiny_models.greedy(model, prompt, 8) for prompt in prompts]
    async with running(folder) as engine:
        assert engine.info.max_sequence_tokens == 40
        assert await engine.run(prompts, configure(max_tokens=8, ignore_end_id=True)) == expected
    assert "has 40 positions" in await refusal(folder, max_sequence_tokens=41)


async def test_an_unknown_rotary_embedding_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtmesh.engine.backends.torch.model import rope

    monkeypatch.setattr(rope, "INDEPENDENT", frozenset({"linear"}))
    assert "rotary embedding type ['default']" in await refusal(llama)


async def test_the_description_says_what_was_loaded(
    llama: Path, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    async with running(llama, max_batch_size=3) as engine:
        info = engine.info
        assert (info.backend, info.model, info.max_batch_size) == ("torch", llama.name, 3)
        assert (info.vocabulary_size, info.max_sequence_tokens) == (320, 512)
        assert info.total_blocks == 3 * 512 // 16
        assert not info.capabilities.deterministic
        assert len(info.tokenizer_fingerprint) == 64
    moved = Path(shutil.copytree(llama, tmp_path / "elsewhere"))
    async with running(moved) as engine:
        assert engine.info.model == "elsewhere"
        assert engine.info.model_fingerprint == info.model_fingerprint
    async with running(moved, dtype="bfloat16") as engine:
        assert not engine.info.capabilities.deterministic
        assert engine.info.model_fingerprint != info.model_fingerprint
        (tokens,) = await engine.run([[5, 6]], configure(max_tokens=4, ignore_end_id=True))
        assert len(tokens) == 4
    async with running(model_dir("qwen3")) as engine:
        assert engine.info.model_fingerprint != info.model_fingerprint


async def test_bfloat16_weights_are_computed_in_float32(llama: Path, tmp_path: Path) -> None:
    loader: Any = AutoModelForCausalLM
    folder = Path(shutil.copytree(llama, tmp_path / "half"))
    loader.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(folder)
    model = tiny_models.reference_model(folder)
    prompts = tiny_models.prompts(3)
    expected = [tiny_models.greedy(model, prompt, 8) for prompt in prompts]
    async with running(folder) as engine:
        assert await engine.run(prompts, configure(max_tokens=8, ignore_end_id=True)) == expected
