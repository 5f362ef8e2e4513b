"""Every architecture equals transformers token for token, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.harness import configure, running
from engine.torch.model.test_model import refusal
from oracle import tiny_models

EXPERTS: Mapping[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: Mapping[str, Any] = {
    **EXPERTS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": None,
    "num_key_value_heads": 4,
}
DENSE = (
    "apertus arcee bitnet cohere cwm ernie4_5 gemma glm glm4 gpt_bigcode gpt_neox granite helium hunyuan_v1_dense llama"
    " nemotron olmo olmo2 opt persimmon phi qwen2 seed_oss smollm3 stablelm starcoder2"
)
SLIDING = "cohere2 exaone4 gemma2 ministral ministral3 mistral olmo3 vaultgemma"
OF_EXPERTS = (
    "dots1 ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe granitemoeshared hunyuan_v1_moe jetmoe minimax_m2 mixtral"
    " olmoe phimoe qwen2_moe qwen3_moe"
)
OF_TWO_SIZES = "deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3"

GROUPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (DENSE, {}),
    ("qwen3 biogpt", {"tie_word_embeddings": True}),
    (SLIDING, {"sliding_window": tiny_models.WINDOW}),
    (OF_EXPERTS, EXPERTS),
    (OF_TWO_SIZES, LATENT),
)
SERVED = {model_type: values for names, values in GROUPS for model_type in names.split()}
"""Configuration by model type, in addition to the common shape."""

NEW_TOKENS = 6
FREE = configure(max_tokens=NEW_TOKENS, ignore_end_id=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", sorted(SERVED))
async def test_chunks_in_a_batch_equal_generate(model_type: str, tmp_path: Path) -> None:
    tiny_models.build_type(tmp_path, model_type, **{**tiny_models.SHAPE, **SERVED[model_type]})
    model = tiny_models.reference_model(tmp_path)
    prompts = tiny_models.prompts(4)[1:]
    async with running(tmp_path, max_step_tokens=12, kv_cache_tokens=512) as engine:
        found = await engine.run(prompts, FREE)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == NEW_TOKENS
        assert tokens == tiny_models.likeliest(model, prompt, tokens)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in ("llama", "gemma2", "gpt_oss", "mixtral", "gpt2")),
        ("llama", "float16"),
    ],
)
async def test_half_precision_runs(family: str, dtype: str, tmp_path: Path) -> None:
    """Loading compares the logits; tokens of random models are not comparable."""
    folder = tiny_models.build(tmp_path, family)
    async with running(folder, dtype=dtype, kv_cache_tokens=512) as engine:
        assert not engine.info.capabilities.deterministic
        tokens = await engine.run(tiny_models.prompts(3), FREE)
        assert [len(ids) for ids in tokens] == [NEW_TOKENS] * 3


SMALL: Mapping[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_CALL = "must each call the attention interface of transformers once"
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    # Both directions.
    "camembert": ({**SMALL, "intermediate_size": 64}, "logits differ"),
    "electra": ({**SMALL, "intermediate_size": 64}, "logits differ"),
    # States beside the KV.
    "bamba": (tiny_models.SHAPE, NO_CALL),
    "jamba": ({**tiny_models.SHAPE, **EXPERTS}, NO_CALL),
    "minimax": ({**tiny_models.SHAPE, **EXPERTS}, NO_CALL),
    "qwen3_next": ({**tiny_models.SHAPE, **EXPERTS}, NO_CALL),
    "recurrent_gemma": (tiny_models.SHAPE, NO_CALL),
    # Two calls a layer.
    "diffllama": (tiny_models.SHAPE, "{0: 2, 1: 2}"),
    # Attention of their own.
    "bloom": ({"hidden_size": 64, "n_layer": 2, "n_head": 4}, NO_CALL),
    "mpt": ({"d_model": 64, "n_layers": 2, "n_heads": 4}, NO_CALL),
    "xglm": ({"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}, NO_CALL),
}
"""Configuration and words of the refusal by model type."""


@pytest.mark.parametrize("model_type", sorted(REFUSED))
async def test_models_that_cannot_be_paged_are_refused(model_type: str, tmp_path: Path) -> None:
    values, words = REFUSED[model_type]
    tiny_models.build_type(tmp_path, model_type, **values)
    message = await refusal(tmp_path)
    assert model_type in message
    assert words in message
