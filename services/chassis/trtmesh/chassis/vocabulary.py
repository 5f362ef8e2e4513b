"""`GenerationConfig` as plain values: the messages of generation.proto under the same names.

An instance comes from `parsing.parse_config` and cannot be wrong: every value is inside its limits. None means
unset, which differs from zero. The proto documents each field, and its values are generated; here stands only what
Python adds.
"""

from __future__ import annotations

from operator import attrgetter

from trtmesh.chassis.frozen import frozen
from trtmesh.v1 import generation_fields
from trtmesh.v1.generation_fields import (
    GREEDY,
    SAMPLES,
    BeamSearch,
    Draft,
    EncoderDecoder,
    GuidedDecoding,
    Handoff,
    IdSequence,
    Image,
    KvCache,
    Lookahead,
    Lora,
    Multimodal,
    Prompt,
    PromptTuning,
    Stopping,
    Tensor,
    TokenRangeRetention,
)

__all__ = [
    "Adapter",
    "BeamSearch",
    "Draft",
    "EncoderDecoder",
    "GenerationConfig",
    "GuidedDecoding",
    "Handoff",
    "IdSequence",
    "Image",
    "KvCache",
    "Lookahead",
    "Lora",
    "Multimodal",
    "Output",
    "Prompt",
    "PromptTuning",
    "Sampling",
    "Stopping",
    "Tensor",
    "TokenRangeRetention",
]


_samples_of, NOT_SAMPLED = attrgetter(*SAMPLES), (None,) * len(SAMPLES)


@frozen
class Sampling(generation_fields.Sampling):
    def ignored_prompt(self, prompt_tokens: int) -> int:
        """How many leading tokens of a prompt the presence and frequency penalties do not count."""
        asked = self.prompt_ignore_length
        return prompt_tokens if asked is None else min(asked, prompt_tokens)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen: sampling is not requested, or excluded by a field."""
        return _samples_of(self) == NOT_SAMPLED or any(
            getattr(self, name) == value for name, value in GREEDY.items()
        )


@frozen
class Output(generation_fields.Output):
    @property
    def per_token(self) -> bool:
        """Whether the client wants data for each generated token."""
        return self.log_probs or self.top_log_probs > 0 or self.generation_logits


@frozen
class Adapter:
    """Identity of a LoRA; `version` is the digest of its content, '' where no worker has reported one."""

    id: int
    name: str = ""
    version: str = ""


@frozen
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
