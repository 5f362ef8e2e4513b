"""The random requests of the differential test."""

from __future__ import annotations

from collections import Counter

from compat.differential.drawing import REQUESTS, SEED, draw
from compat.differential.tensors import CORE_NAMES, OLD_NAMES, tensors
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings

MODELS = triton_models(TritonSettings())
CASES = [draw(SEED, number) for number in range(REQUESTS)]
NOT_DRAWN = {
    # Read by the template, or without an effect to compare.
    *("stop", "pad_id", "input_ids", "input_lengths", "text_input", "prompt_vocab_size"),
    # Sent by hand, after preprocessing.
    "prompt_table_extra_ids",
    # Other names of inputs, and one like retention_decode_priority.
    *("output_log_probs", "runtime_top_k_min", "return_kv_cache_reuse_stats"),
    "retention_decode_duration_ms",
}
REFUSED = (
    # The embedded engine does not support them.
    *("image_", "lora_", "guided_", "decoder_", "draft_"),
    *("encoder_", "lookahead_", "mrope_", "multimodal_"),
    *("context_phase_params", "cross_attention_mask", "skip_cross_attn_blocks"),
)


def test_seed_and_number_repeat_a_case() -> None:
    assert [draw(SEED, number) for number in range(REQUESTS)] == CASES
    assert draw(SEED + 1, 0) != CASES[0]


def test_cases_have_every_input_of_the_models() -> None:
    sent = Counter(
        name
        for case in CASES
        for old_names in (False, True)
        for name in tensors(case, stream=True, old_names=old_names)
    )
    known = {*MODELS["ensemble"].inputs, *MODELS["tensorrt_llm"].inputs} - NOT_DRAWN
    assert {name for name in known if name not in sent and not name.startswith(REFUSED)} == set()
    assert {CORE_NAMES["top_k"], *OLD_NAMES.values()} <= set(sent)
