"""Adapters in PEFT's format, against the library itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.adapters.test_arrays import same
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, PreTrainedModel
from trtmesh.chassis.errors import InvalidRequest, NotFound, UnsupportedField
from trtmesh.chassis.peft_adapter import CONFIG, MOST_KEY_CHARACTERS, MOST_TENSORS, WEIGHTS
from trtmesh.engine.adapters.arrays import read_files, write_files
from trtmesh.engine.adapters.lora import Lora, Module, Update, fit, place_of
from trtmesh.engine.adapters.peft import read_peft, write_peft
from trtmesh.engine.backends.torch.model.lora_layers import lora_targets

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

MOST = 1 << 30
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _llama() -> PreTrainedModel:
    return _built(LlamaConfig(**SMALL))


def _phi3() -> PreTrainedModel:
    return _built(Phi3Config(**SMALL))


def _gpt2() -> PreTrainedModel:
    return _built(GPT2Config(vocab_size=32, n_embd=16, n_head=4, n_layer=2, n_positions=32))


def _built(config: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    # Untyped.
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config)
    torch.nn.Module.eval(model)
    return model


def _trained(model: PreTrainedModel, directory: Path, **options: Any) -> Tensor:
    """Saves an adapter of random weights and returns its logits."""
    options.setdefault("fan_in_fan_out", model.config.model_type == "gpt2")
    adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    adapted.save_pretrained(directory)
    with torch.no_grad():
        logits: Tensor = adapted(IDS).logits
    return logits


def _logits(model: PreTrainedModel, lora: Lora) -> Tensor:
    """The logits of the model with W x + B A x in each updated layer."""
    updates = fit(lora, lora_targets(model)).updates

    def adding(update: Update) -> Callable[..., Tensor]:
        return lambda _module, given, output: output + given[0] @ update.a.T @ update.b.T

    hooks = [
        layer.register_forward_hook(adding(updates[place]))
        for name, layer in model.named_modules()
        if (place := place_of(name)) is not None and place in updates
    ]
    assert len(hooks) == len(updates)
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize(
    ("build", "targets"),
    [
        (_llama, LLAMA_TARGETS),
        (_llama, ["q_proj", "v_proj"]),
        (_phi3, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        (_gpt2, ["c_attn", "c_proj", "c_fc"]),
    ],
    ids=["llama", "llama_qv", "phi3_fused", "gpt2_conv1d"],
)
@pytest.mark.parametrize("rank", [4, 64])
def test_logits_equal_those_of_peft(
    build: Callable[[], PreTrainedModel], targets: list[str], rank: int, tmp_path: Path
) -> None:
    expected = _trained(build(), tmp_path, r=rank, lora_alpha=10, target_modules=targets)
    assert (expected - build()(IDS).logits).abs().max() > 0.01
    torch.testing.assert_close(_logits(build(), read_peft(tmp_path, MOST)), expected)


def test_rslora_and_patterns_scale_as_in_peft(tmp_path: Path) -> None:
    options = {
        "r": 8,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": LLAMA_TARGETS,
        "rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 5},
        "alpha_pattern": {"v_proj": 7},
    }
    expected = _trained(_llama(), tmp_path, **options)
    lora = read_peft(tmp_path, MOST)
    assert lora.updates[1, Module.ATTN_Q].rank == 3
    assert lora.updates[0, Module.ATTN_Q].rank == 8
    torch.testing.assert_close(_logits(_llama(), lora), expected)


@pytest.mark.parametrize("build", [_llama, _phi3, _gpt2])
def test_round_trip_through_tensorrt_llm_and_back(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    targets = {
        _llama: LLAMA_TARGETS,
        _phi3: ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        _gpt2: ["c_attn", "c_proj", "c_fc"],
    }[build]
    expected = _trained(build(), tmp_path / "a", r=4, lora_alpha=8, target_modules=targets)
    write_files(read_peft(tmp_path / "a", MOST), tmp_path / "b", torch.float32)
    arrays = read_files(tmp_path / "b", lora_targets(build()), MOST)
    torch.testing.assert_close(_logits(build(), arrays), expected)
    names = {place: name for name, _ in build().named_modules() if (place := place_of(name))}
    write_peft(arrays, tmp_path / "c", "base", names)
    again = read_peft(tmp_path / "c", MOST)
    assert same(again, arrays)
    torch.testing.assert_close(_logits(build(), again), expected)


def test_parts_update_a_fused_layer(tmp_path: Path) -> None:
    """An adapter of separate projections on a model that joins them, without one of the three."""
    rows = torch.Generator().manual_seed(3)

    def update(inputs: int, outputs: int) -> Update:
        return Update(
            torch.randn(2, inputs, generator=rows), torch.randn(outputs, 2, generator=rows)
        )

    q, v, up = update(16, 16), update(16, 8), update(16, 24)
    lora = Lora({(0, Module.ATTN_Q): q, (0, Module.ATTN_V): v, (1, Module.MLP_GATE): up})
    fitted = fit(lora, lora_targets(_phi3())).updates
    x = torch.randn(5, 16, generator=rows)
    qkv = fitted[0, Module.ATTN_QKV]
    expected = torch.cat((x @ q.a.T @ q.b.T, torch.zeros(5, 8), x @ v.a.T @ v.b.T), -1)
    torch.testing.assert_close(x @ qkv.a.T @ qkv.b.T, expected)
    gate_up = fitted[1, Module.MLP_GATE_UP]
    expected = torch.cat((torch.zeros(5, 24), x @ up.a.T @ up.b.T), -1)
    torch.testing.assert_close(x @ gate_up.a.T @ gate_up.b.T, expected)


def test_fused_update_is_split_for_separate_layers() -> None:
    rows = torch.Generator().manual_seed(4)
    whole = Update(torch.randn(2, 16, generator=rows), torch.randn(32, 2, generator=rows))
    fitted = fit(Lora({(0, Module.ATTN_QKV): whole}), lora_targets(_llama())).updates
    assert torch.equal(
        torch.cat([fitted[0, m].b for m in (Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V)]),
        whole.b,
    )
    assert all(torch.equal(update.a, whole.a) for update in fitted.values())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    _trained(_llama(), tmp_path, r=4, lora_alpha=8, target_modules=["q_proj"])
    return tmp_path


def _change_config(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / CONFIG).read_text()) | fields
    (directory / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"peft_type": "IA3"},
        {"lora_bias": True},
        {"trainable_token_indices": [1]},
    ],
)
def test_what_is_not_plain_lora_is_refused_by_field(adapter: Path, fields: dict[str, Any]) -> None:
    _change_config(adapter, **fields)
    with pytest.raises(UnsupportedField) as refused:
        read_peft(adapter, MOST)
    assert refused.value.field == f"adapter_config.{next(iter(fields))}"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"r": 0}, "r"),
        ({"r": -1, "use_rslora": True}, "r"),
        ({"r": 10**400}, "r"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern.q_proj"),
    ],
    ids=["zero", "negative", "huge", "infinite", "large_alpha", "pattern", "nan"],
)
def test_ranks_and_alphas_without_a_scale_are_refused_by_file_and_field(
    adapter: Path, fields: dict[str, Any], named: str
) -> None:
    _change_config(adapter, **fields)
    with pytest.raises(InvalidRequest) as refused:
        read_peft(adapter, MOST)
    assert refused.value.field == str(adapter / CONFIG)
    assert f" {named}: " in refused.value.problem


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["(", "*", "([a-z_.0-9]+)+X"])
def test_expressions_outside_the_syntax_are_refused_by_field(
    adapter: Path, field: str, pattern: str
) -> None:
    _change_config(adapter, **{field: {pattern: 1}})
    with pytest.raises(UnsupportedField) as refused:
        read_peft(adapter, MOST)
    assert refused.value.field == f"adapter_config.{field}"


def test_long_names_and_many_tensors_are_refused(adapter: Path) -> None:
    _change_weights(
        adapter, lambda t: t.update({f"layers.{'1' * 5000}.{KEY.format('A')}": torch.ones(4, 16)})
    )
    with pytest.raises(InvalidRequest) as long:
        read_peft(adapter, MOST)
    assert long.value.limit == f"at most {MOST_KEY_CHARACTERS}"
    _change_weights(
        adapter, lambda t: t.update({str(n): torch.ones(1) for n in range(MOST_TENSORS)})
    )
    with pytest.raises(InvalidRequest) as many:
        read_peft(adapter, MOST)
    assert many.value.field == str(adapter / WEIGHTS)


def _change_weights(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def _rename(tensors: dict[str, Tensor], old: str, new: str) -> Tensor:
    tensors[new] = tensors.pop(old)
    return tensors[new]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda t: t[KEY.format("A")].fill_(torch.nan), "adapter.layer_0.attn_q"),
        (lambda t: t.update({KEY.format("B"): torch.ones(16, 3)}), f"adapter.{KEY.format('B')}"),
        (lambda t: t.update({KEY.format("B"): torch.ones(17, 4)}), "adapter.layer_0.attn_q"),
        (lambda t: t.update({KEY.format("A"): torch.ones(5, 16)}), f"adapter.{KEY.format('A')}"),
        (lambda t: t.update({KEY.format("A"): torch.ones(4, 16).int()}), f"adapter.{KEY.format('A')}"),
        (
            lambda t: _rename(t, KEY.format("B"), "x.layers.9.self_attn.q_proj.lora_B.weight"),
            "adapter.model.layers.0.self_attn.q_proj",
        ),
        (
            lambda t: [
                _rename(t, KEY.format(side), KEY.format(side).replace("layers.0", "layers.7"))
                for side in "AB"
            ],
            "adapter.layer_7.attn_q",
        ),
        (lambda t: _rename(t, KEY.format("B"), "embed.lora_embedding_B"), "adapter.embed.lora_embedding_B"),
        (lambda t: [_rename(t, KEY.format(side), f"lm_head.lora_{side}.weight") for side in "AB"], "adapter.lm_head"),
        (dict.clear, "adapter"),
    ],
    ids=["nan", "ranks_differ", "other_model", "rank_of_config", "dtype", "lone_side", "no_such_layer", "embedding",
         "head", "empty"],
)  # fmt: skip
def test_unusable_weights_are_refused_by_layer(
    adapter: Path, change: Callable[[dict[str, Tensor]], None], field: str
) -> None:
    _change_weights(adapter, change)
    with pytest.raises((InvalidRequest, UnsupportedField)) as refused:
        fit(read_peft(adapter, MOST), lora_targets(_llama()))
    assert refused.value.field == field


def test_truncated_huge_and_absent_files_are_refused_by_name(adapter: Path) -> None:
    file = adapter / WEIGHTS
    with pytest.raises(InvalidRequest) as huge:
        read_peft(adapter, 100)
    assert huge.value.limit == "at most 100 bytes"
    assert str(adapter) in huge.value.problem
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InvalidRequest) as torn:
        read_peft(adapter, MOST)
    assert torn.value.field == str(file)
    (adapter / CONFIG).write_text("{")
    with pytest.raises(InvalidRequest) as broken:
        read_peft(adapter, MOST)
    assert broken.value.field == str(adapter / CONFIG)
    (adapter / CONFIG).unlink()
    with pytest.raises(NotFound) as absent:
        read_peft(adapter, MOST)
    assert str(adapter) in absent.value.problem


def test_size_and_rank_are_those_of_the_weights(adapter: Path) -> None:
    lora = read_peft(adapter, MOST)
    assert lora.rank == 4
    assert lora.size_bytes == 2 * 4 * (4 * 16 + 16 * 4)
    assert isinstance(_llama().get_submodule("model.layers.0.self_attn.q_proj"), nn.Linear)
