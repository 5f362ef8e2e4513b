"""`GenerationConfig` as plain values: the messages of generation.proto under the same names.

An instance comes from `parsing.parse_config` and cannot be wrong: every value is inside its limits. None means
unset, which differs from zero. The proto documents each field; here stands only what Python adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

IdSequence = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Dense array, row-major and little-endian; `data_type` is a generation_pb2.DataType."""

    data_type: int
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Stopping:
    max_tokens: int | None = None
    min_tokens: int = 0
    end_id: int | None = None
    ignore_end_id: bool = False
    pad_id: int | None = None
    stop_texts: tuple[str, ...] = ()
    stop_token_ids: tuple[IdSequence, ...] = ()
    include_stop_text: bool = False
    bad_texts: tuple[str, ...] = ()
    bad_token_ids: tuple[IdSequence, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_p_min: float | None = None
    top_p_decay: float | None = None
    top_p_reset_id: int | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int | None = None
    no_repeat_ngram_size: int = 0
    embedding_bias: tuple[float, ...] = ()
    embedding_bias_texts: tuple[str, ...] = ()
    embedding_bias_weights: tuple[float, ...] = ()
    num_return_sequences: int = 1
    best_of: int | None = None
    logits_post_processor: str | None = None
    embedding_bias_token_ids: tuple[IdSequence, ...] = ()

    def ignored_prompt(self, prompt_tokens: int) -> int:
        """How many leading tokens of a prompt the presence and frequency penalties do not count."""
        asked = self.prompt_ignore_length
        return prompt_tokens if asked is None else min(asked, prompt_tokens)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen: sampling is not requested, or excluded by a field."""
        asked = (self.temperature, self.top_k, self.top_p, self.min_p)
        forbidden = self.temperature == 0 or self.top_k == 1 or self.top_p == 0
        return forbidden or all(value is None for value in asked)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    beam_width: int = 1
    length_penalty: float | None = None
    early_stopping: int = 0
    diversity_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Output:
    text: bool = True
    skip_special_tokens: bool = True
    exclude_prompt: bool = True
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    logits_data_type: int = 0
    perf_metrics: bool = False
    stream: bool = True
    normalize_log_probs: bool | None = None

    @property
    def per_token(self) -> bool:
        """Whether the client wants data for each generated token."""
        return self.log_probs or self.top_log_probs > 0 or self.generation_logits


@dataclass(frozen=True, slots=True)
class Lora:
    id: int | None = None
    name: str | None = None
    weights: Tensor | None = None
    config: Tensor | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """Identity of a LoRA; `version` is the digest of its content, '' where no worker has reported one."""

    id: int
    name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class PromptTuning:
    embedding_table: Tensor | None = None
    vocabulary_size: int | None = None
    extra_ids: IdSequence = ()


@dataclass(frozen=True, slots=True)
class Draft:
    token_ids: IdSequence = ()
    logits: Tensor | None = None
    acceptance_threshold: float | None = None
    num_draft_tokens: int | None = None
    use_draft_logits: bool = False


@dataclass(frozen=True, slots=True)
class Lookahead:
    window_size: int | None = None
    ngram_size: int | None = None
    verification_set_size: int | None = None


@dataclass(frozen=True, slots=True)
class GuidedDecoding:
    guide_type: int = 0
    guide: str | None = None


@dataclass(frozen=True, slots=True)
class TokenRangeRetention:
    token_start: int = 0
    token_end: int | None = None
    priority: int = 0
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KvCache:
    reuse: bool = True
    salt: str | None = None
    token_ranges: tuple[TokenRangeRetention, ...] = ()
    decode_priority: int | None = None
    decode_duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text or token ids; exactly one is not None."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    encoder_features: Tensor | None = None
    encoder_output_length: int | None = None
    decoder_prompt: Prompt | None = None
    skip_cross_attention: bool = False
    cross_attention_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """An image; exactly one field is not None."""

    encoded: bytes | None = None
    url: str | None = None
    pixels: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Multimodal:
    images: tuple[Image, ...] = ()
    video: Tensor | None = None
    mrope_rotary_cos_sin: Tensor | None = None
    mrope_position_delta: int | None = None
    embedding: Tensor | None = None
    hashes: Tensor | None = None
    item_runs: Tensor | None = None
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Handoff:
    phase: int = 0
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Everything requested of one item. `fields_set` has the paths of non-default fields, such as `sampling.top_k`."""

    stopping: Stopping = Stopping()
    sampling: Sampling = Sampling()
    beam_search: BeamSearch = BeamSearch()
    output: Output = Output()
    lora: Lora | None = None
    prompt_tuning: PromptTuning | None = None
    draft: Draft | None = None
    lookahead: Lookahead | None = None
    guided_decoding: GuidedDecoding | None = None
    kv_cache: KvCache = KvCache()
    encoder_decoder: EncoderDecoder | None = None
    multimodal: Multimodal | None = None
    handoff: Handoff | None = None
    priority: int = 0
    fields_set: frozenset[str] = frozenset()

    @property
    def sequences(self) -> int:
        """Number of returned sequences; beam search returns all beams by default."""
        if (
            self.beam_search.beam_width > 1
            and "sampling.num_return_sequences" not in self.fields_set
        ):
            return self.beam_search.beam_width
        return self.sampling.num_return_sequences
