"""Loads a model with the code of transformers, finds its KV shape by a probe, and refuses unsuitable models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.adapters.lora import Place, Target
from trtmesh.engine.backends.torch.memory.kvcache import KvShape
from trtmesh.engine.backends.torch.model import attention
from trtmesh.engine.backends.torch.model.lora_layers import (
    DeviceAdapters,
    Room,
    adapt_layers,
    lora_targets,
)
from trtmesh.engine.backends.torch.model.prompt_tables import Embedding, PromptTable
from trtmesh.engine.backends.torch.model.weights import check_config

PROBE_TOKENS = 3
DEFAULT_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Model:
    """A causal language model."""

    module: PreTrainedModel
    dtype: torch.dtype
    """Type of weights and KV in memory."""
    compute_dtype: torch.dtype
    """Type of activations."""
    plain: bool
    """Whether the layers can be called in a row, without the code of transformers around them."""
    kv_shape: KvShape
    vocabulary_size: int
    max_positions: int
    end_ids: tuple[int, ...]
    embedding: Embedding
    window: int | None
    """Widest sliding window of all layers; None where a layer sees all tokens."""
    targets: Mapping[Place, Target]
    """The layers open to adapters."""
    adapters: DeviceAdapters | None
    """None where the model takes no adapters."""

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        tables: Sequence[tuple[slice, PromptTable]] = (),
    ) -> Tensor:
        """Next-token logits [rows, vocabulary] in float32 after the tokens at indexes `rows` of a flat batch.

        `token_ids` and `positions` are [tokens]; `tables` gives ranges of tokens their prompt tables.
        """
        return self.computed_logits(token_ids, positions, rows, tables).float()

    def computed_logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        tables: Sequence[tuple[slice, PromptTable]] = (),
    ) -> Tensor:
        """`logits` in the model's type of computation; after every token where `rows` is None."""
        if self.plain:
            logits = self._plain_logits(self.embedding.inputs(token_ids, tables), positions, rows)
        else:
            if tables:
                inputs = {"inputs_embeds": self.embedding.inputs(token_ids, tables)[None]}
            else:
                inputs = {"input_ids": token_ids[None]}
            logits = self.module(
                **inputs,
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            ).logits[0]
        return logits[:, : self.vocabulary_size]

    def _plain_logits(self, embedded: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """The model's forward without masks: paged attention uses none."""
        model: Any = self.module
        body = model.model
        angles = body.rotary_emb(embedded[None], positions[None])
        *before, last = body.layers
        hidden = embedded
        for layer in before:
            hidden = layer.complete(hidden, layer.attend(hidden, angles))
        attended = last.attend(hidden, angles)
        # All later layers see one token at a time. Adapters know the rows of the whole batch.
        is_early = rows is not None and not (self.adapters and self.adapters.in_use)
        if is_early:
            hidden, attended = hidden[rows], attended[rows]
        hidden = last.complete(hidden, attended)
        if rows is not None and not is_early:
            hidden = hidden[rows]
        logits: Tensor = model.lm_head(body.norm(hidden))
        return logits


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of a device's changes to a model's layers."""

    compute_dtype: torch.dtype
    plain: bool = False
    """See `Model.plain`."""


Fit = Callable[[PreTrainedModel, torch.dtype], Fitted]


def load_model(
    model_dir: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    fit: Fit,
    *,
    room: Room | None = None,
    divide: Callable[[PreTrainedModel], None] | None = None,
) -> Model:
    """`dtype` is the type of weights and KV, None for the model's own; `fit` may replace layers; `room` is for
    adapters; `divide` drops the weights of other ranks before the rest goes to the device.

    Raises ModelUnusable with the reason.
    """
    config = _config(model_dir)
    dtype = dtype or _own_dtype(config)
    module = _weights(model_dir, config, dtype)
    if divide:
        divide(module)
    torch.nn.Module.to(module, device)
    torch.nn.Module.eval(module)
    module.requires_grad_(requires_grad=False)
    attention.register()
    module.set_attn_implementation(attention.NAME)
    text = config.get_text_config()
    probe = _probe(module, text.num_hidden_layers, device)
    targets = lora_targets(module)
    fitted = fit(module, dtype)
    adaptable: tuple[Mapping[Place, Target], DeviceAdapters | None] = {}, None
    if room:
        adaptable = adapt_layers(module, targets, room, fitted.compute_dtype, device)
    vocabulary_size = _vocabulary_size(module)
    return Model(
        module=module,
        dtype=dtype,
        compute_dtype=fitted.compute_dtype,
        plain=fitted.plain,
        kv_shape=probe.kv_shape(module),
        window=probe.window,
        vocabulary_size=vocabulary_size,
        max_positions=_max_positions(text, probe),
        end_ids=_end_ids(module),
        embedding=Embedding(module.get_input_embeddings(), vocabulary_size),
        targets=adaptable[0],
        adapters=adaptable[1],
    )


def model_outline(model_dir: Path) -> PreTrainedModel:
    """The layers of a model without their weights. Raises ModelUnusable."""
    check_config(model_dir)
    config = _config(model_dir)
    # Untyped.
    loader: Any = AutoModelForCausalLM
    try:
        with _quiet(), torch.device("meta"):
            outline: PreTrainedModel = loader.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ModelUnusable(f"{model_dir / 'config.json'} is refused: {_text(error)}") from error
    return outline


def _config(model_dir: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelUnusable(f"{model_dir / 'config.json'} is refused: {_text(error)}") from error
    kind = getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnusable(f"model type {kind} is an encoder-decoder; only decoders are served")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelUnusable(f"model type {kind} is not a causal language model of transformers")
    return config


def _own_dtype(config: Any) -> torch.dtype:
    dtype = config.get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _weights(model_dir: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    # Untyped: the declared type lacks the report of output_loading_info.
    loader: Any = AutoModelForCausalLM
    try:
        with _quiet():
            module, report = loader.from_pretrained(
                model_dir,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation="eager",
                output_loading_info=True,
                # Reported below, with names.
                ignore_mismatched_sizes=True,
            )
    except Exception as error:
        raise ModelUnusable(f"the weights of {model_dir} are refused: {_text(error)}") from error
    for trouble in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = sorted(str(key) for key in report.get(trouble) or ())
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ModelUnusable(
                f"the weights of {model_dir} do not fit its config.json, {trouble.replace('_', ' ')}:"
                f" {', '.join(keys[:3])}{more}"
            )
    if not isinstance(module, PreTrainedModel):
        raise ModelUnusable(f"{model_dir} is not a model of transformers")
    return module


class Probe:
    """Records the calls of attention without computing."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.kv_heads: set[int] = set()
        self.sizes: set[int] = set()
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: attention.Rule
    ) -> Tensor:
        self.calls[layer] += 1
        self.kv_heads.add(key.shape[1])
        self.sizes |= {key.shape[3], value.shape[3]}
        self.windows[layer] = rule.window
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    @property
    def window(self) -> int | None:
        """The widest sliding window; None where a layer has no window."""
        windows = [window or 0 for window in self.windows.values()]
        return max(windows) if all(windows) else None

    def kv_shape(self, module: PreTrainedModel) -> KvShape:
        if len(self.kv_heads) > 1:
            raise ModelUnusable(
                f"model type {module.config.model_type} has layers with {sorted(self.kv_heads)} KV heads;"
                " the pool holds one number for all"
            )
        return KvShape(
            layers=len(self.calls), kv_heads=max(self.kv_heads), head_dim=max(self.sizes)
        )


def _probe(module: PreTrainedModel, layers: int, device: torch.device) -> Probe:
    """Runs a few tokens. Raises ModelUnusable where a layer bypasses the attention interface."""
    recorder = Probe()
    attention.attach(module, recorder)
    tokens = torch.arange(PROBE_TOKENS, device=device)[None]
    kind = module.config.model_type
    try:
        with torch.inference_mode():
            module(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=1)
    except Exception as error:
        raise ModelUnusable(f"model type {kind} cannot run here: {_text(error)}") from error
    if recorder.calls != Counter(range(layers)):
        raise ModelUnusable(
            f"model type {kind} cannot be paged: its {layers} layers must each call the attention interface of"
            f" transformers once, but the calls of a forward were {dict(sorted(recorder.calls.items()))}"
        )
    return recorder


def _max_positions(config: Any, probe: Probe) -> int:
    """The model's length, limited to the width of masks unseen by paged attention. Some layers hide tokens by a mask
    alone; up to the width of the mask nothing is hidden.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or DEFAULT_POSITIONS)
    widths = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        width = widths.get(kind)
        if width and not probe.windows.get(layer):
            longest = min(longest, int(width))
    return longest


def _vocabulary_size(module: PreTrainedModel) -> int:
    """Rows of the input embeddings, at most as many as there are logits."""
    untyped: Any = module
    heads = (untyped.get_input_embeddings(), untyped.get_output_embeddings())
    return min(int(head.weight.shape[0]) for head in heads if head is not None)


def _end_ids(module: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(module, "generation_config", None)
    end = getattr(generation, "eos_token_id", None)
    if end is None:
        end = getattr(module.config.get_text_config(), "eos_token_id", None)
    if end is None:
        return ()
    return tuple(end) if isinstance(end, (list, tuple)) else (int(end),)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses progress bars and warnings while loading; refusals carry the reason."""
    # Untyped functions.
    hub: Any = transformers_logging
    bars, verbosity = hub.is_progress_bar_enabled(), hub.get_verbosity()
    hub.disable_progress_bar()
    hub.set_verbosity_error()
    try:
        yield
    finally:
        hub.set_verbosity(verbosity)
        if bars:
            hub.enable_progress_bar()


def _text(error: Exception) -> str:
    """The first line: further lines of transformers are advice for programs of its own kind."""
    lines = str(error).strip().splitlines() or ["no further reason"]
    return f"{type(error).__name__}: {lines[0]}"
