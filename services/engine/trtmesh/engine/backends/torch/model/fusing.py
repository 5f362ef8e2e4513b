"""Replaces layers of a model by fused layers.

A layer is replaced only if the code equals the code of a known layer and the fused layer gives the same result in a
trial. The code alone does not suffice: functions of the same name differ between models. Nor does the trial: some
models treat later positions differently.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from trtmesh.engine.backends.torch.model.attention import Rule, attach
from trtmesh.engine.backends.torch.model.fused_layers import (
    FusedAttention,
    FusedLayer,
    FusedMlp,
    Norm,
    Rotation,
)

TRIAL_TOKENS = 3
NORM_ROWS = 5
NORM_CLOSE = 1e-5
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
JOINED_PROJECTIONS = ("qkv_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Largest difference from the original, as a share of the largest value: rounding."""


def _codes(*kinds: type[nn.Module]) -> set[tuple[Any, ...]]:
    return {_code(kind) for kind in kinds}


def _code(kind: type[nn.Module]) -> tuple[Any, ...]:
    """The code of a module's forward, without the meaning of names."""
    forward: Any = inspect.unwrap(kind.forward)
    code = forward.__code__
    return code.co_code, code.co_names, code.co_varnames


ATTENTIONS = _codes(
    llama.LlamaAttention,
    mistral.MistralAttention,
    qwen2.Qwen2Attention,
    qwen3.Qwen3Attention,
    phi3.Phi3Attention,
    gemma2.Gemma2Attention,
    gemma3.Gemma3Attention,
)
MLPS = _codes(llama.LlamaMLP)
JOINED_MLPS = _codes(phi3.Phi3MLP)
LAYERS = _codes(
    llama.LlamaDecoderLayer,
    mixtral.MixtralDecoderLayer,
    phi3.Phi3DecoderLayer,
    gemma2.Gemma2DecoderLayer,
    gemma3.Gemma3DecoderLayer,
)
BODIES = _codes(
    llama.LlamaModel,
    mistral.MistralModel,
    phi3.Phi3Model,
    qwen2.Qwen2Model,
    mixtral.MixtralModel,
    qwen3_moe.Qwen3MoeModel,
)
MODELS = _codes(llama.LlamaForCausalLM, mixtral.MixtralForCausalLM, qwen3_moe.Qwen3MoeForCausalLM)
EXPERTS = _codes(mixtral.MixtralExperts, qwen3_moe.Qwen3MoeExperts)
ROUTERS = _codes(mixtral.MixtralTopKRouter, qwen3_moe.Qwen3MoeTopKRouter)
"""The layers that choose the experts of a mixture."""


def replace_layers(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)


def fuse_layers(
    model: Any,
    rotation: Rotation,
    mlp: type[FusedMlp] = FusedMlp,
    layer: Callable[[Any], FusedLayer] = FusedLayer,
) -> None:
    """Replaces the known layers of a model with this engine's attention. `rotation`, `mlp` and `layer` are the
    device's; `layer` takes the replaced layer."""
    trials = _trials(model)

    def fused(own: nn.Module) -> nn.Module | None:
        if _code(type(own)) in MLPS | JOINED_MLPS:
            return _fused_mlp(own, mlp)
        return _fused_attention(own, trials[own], rotation) if own in trials else None

    replace_layers(model, fused)

    def fused_layer(own: Any) -> nn.Module | None:
        known = _code(type(own)) in LAYERS and isinstance(own.self_attn, FusedAttention)
        return layer(own) if known else None

    replace_layers(model, fused_layer)


def fuse_norms(model: nn.Module, kind: type[Norm]) -> None:
    """Replaces the norms of a model by the given kind, if equal in result."""
    replace_layers(model, lambda own: _fused_norm(own, kind))


def fuse_experts(model: nn.Module, kind: Callable[[Any], nn.Module]) -> None:
    """Replaces the experts of known mixtures by the given kind, if equal in result."""

    def fused(own: Any) -> nn.Module | None:
        if _code(type(own)) not in EXPERTS or "silu" not in type(own.act_fn).__name__.lower():
            return None
        count, size, _ = own.down_proj.shape
        chosen = min(2, count)
        hidden = _random_like(own.down_proj.new_empty(TRIAL_TOKENS, size))
        ids = torch.arange(TRIAL_TOKENS * chosen, device=hidden.device).view(-1, chosen) % count
        factors = torch.linspace(0.2, 1, ids.numel(), device=hidden.device).view(-1, chosen)
        new = kind(own)
        with torch.inference_mode():
            is_same = _close(own(hidden, ids, factors), new(hidden, ids, factors))
        return new if is_same else None

    replace_layers(model, fused)


def fuse_routers(model: nn.Module, kind: Callable[[Any], nn.Module]) -> None:
    """Replaces the layers that choose experts by the given kind, if equal in result."""

    def fused(own: Any) -> nn.Module | None:
        if _code(type(own)) not in ROUTERS:
            return None
        hidden = _random_like(own.weight.new_empty(TRIAL_TOKENS, own.weight.shape[1]))
        new = kind(own)
        with torch.inference_mode():
            pairs = [*zip(own(hidden), new(hidden), strict=True)]
        is_same = all(each.dtype == other.dtype for each, other in pairs)
        return new if is_same and all(_close(*pair) for pair in pairs[:2]) else None

    replace_layers(model, fused)


def is_plain(model: Any) -> bool:
    """Whether a model with fused layers is just embeddings, fused layers, a norm and a head in a row, with the same
    positions for all layers."""
    body: Any = getattr(model, "model", None)
    return (
        _code(type(model)) in MODELS
        and _code(type(body)) in BODIES
        and all(isinstance(layer, FusedLayer) for layer in body.layers)
    )


def has_plain_layers(model: Any) -> bool:
    """Whether a model of transformers has only layers known to fuse into a plain model."""
    body: Any = getattr(model, "model", None)
    return (
        _code(type(model)) in MODELS
        and _code(type(body)) in BODIES
        and all(
            _code(type(layer)) in LAYERS
            and _code(type(layer.self_attn)) in ATTENTIONS
            and _has_known_parts(layer.self_attn)
            and _code(type(layer.mlp)) in MLPS
            for layer in body.layers
        )
    )


@dataclass(slots=True)
class _Trial:
    """The arguments of an attention layer in a forward of the model."""

    hidden: Tensor
    named: dict[str, Any]


class _Seen:
    """Attention for recording the arguments. Returns the queries; zeros for unknown layers."""

    queries: Tensor
    kv: Tensor
    rule: Rule
    turns = False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if query.shape[-1] != value.shape[-1]:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        return self.attend_tokens(layer, queries, torch.cat((keys, values), 1), rule)[None]

    def attend_tokens(self, _layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        # Copies: the caller may change the arguments.
        self.queries, self.kv, self.rule = queries.clone(), kv.clone(), rule
        return self.queries


def _trials(model: Any) -> dict[nn.Module, _Trial]:
    """The candidates for replacement, with their arguments in a forward."""
    trials: dict[nn.Module, _Trial] = {}

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not given and {"hidden_states", "position_embeddings"} <= named.keys():
            others = {name: value for name, value in named.items() if name != "hidden_states"}
            trials[module] = _Trial(named["hidden_states"], others)

    candidates = [
        module
        for module in model.modules()
        if _code(type(module)) in ATTENTIONS and _has_known_parts(module)
    ]
    if not candidates:
        return trials
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in candidates]
    attach(model, _Seen())
    tokens = torch.arange(TRIAL_TOKENS, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return trials


def _has_known_parts(module: nn.Module) -> bool:
    parts = dict(module.named_children())
    norms = [name for name in HEAD_NORMS if name in parts]
    names = _projections(module)
    projections = [parts[name] for name in names if type(parts.get(name)) is nn.Linear]
    biases = {each.bias is None for each in projections[:-1]}
    return (
        len(projections) == len(names) == len(parts) - len(norms)
        and len(norms) != 1
        and len(biases) == 1
    )


def _projections(module: nn.Module) -> tuple[str, ...]:
    return JOINED_PROJECTIONS if hasattr(module, "qkv_proj") else PROJECTIONS


def _fused_attention(own: Any, trial: _Trial, rotation: Rotation) -> nn.Module | None:
    hidden = _random_like(trial.hidden)
    expected, got = _Seen(), _Seen()
    with torch.inference_mode():
        attach(own, expected)
        output, _ = own(hidden_states=hidden, **trial.named)
        same_size = expected.queries.shape[-1] == expected.kv.shape[-1] == own.head_dim
        if not same_size:
            return None
        weights = {name: getattr(own, name) for name in _projections(own)}
        fused = FusedAttention(own, expected.rule, rotation)
        attach(fused, got)
        fused_output, _ = fused(hidden_states=hidden, **trial.named)
    pairs = ((output, fused_output), (expected.queries, got.queries), (expected.kv, got.kv))
    if all(_close(*pair) for pair in pairs):
        return fused
    for name, layer in weights.items():
        setattr(own, name, layer)
    return None


def _fused_mlp(own: Any, kind: type[FusedMlp]) -> nn.Module | None:
    parts = dict(own.named_children())
    joined = "gate_up_proj" in parts
    names = ("gate_up_proj",) if joined else ("gate_proj", "up_proj")
    layers = [parts.get(name) for name in (*names, "down_proj")]
    if len(parts) != len(layers) + 1 or any(type(layer) is not nn.Linear for layer in layers):
        return None
    if not joined and (own.gate_proj.bias is None) != (own.up_proj.bias is None):
        return None
    fused = kind(own)
    weight = fused.gate_up.weight
    hidden = _random_like(weight.new_empty(1, TRIAL_TOKENS, weight.shape[1]))
    with torch.inference_mode():
        return fused if _close(own(hidden), fused(hidden)) else None


def _fused_norm(module: nn.Module, kind: type[Norm]) -> nn.Module | None:
    """A norm of this kind with the same results as `module`, or None."""
    own: Any = module
    weight = getattr(own, "weight", None)
    epsilon = getattr(own, "variance_epsilon", getattr(own, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
        return None
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.dtype not in kind.dtypes:
        return None
    if len(module.state_dict()) > 1 or len(inspect.signature(module.forward).parameters) > 1:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, NORM_ROWS, len(weight), generator=generator).to(weight)
    # Small enough for epsilon to matter.
    rows[:, 0] *= math.sqrt(epsilon)
    with torch.inference_mode():
        expected = module(rows)
        # Gemma adds 1 to the weights.
        for each in (weight.float(), 1 + weight.float()):
            fused = kind(each, epsilon)
            if weight.dtype is not torch.float32:
                is_same = _close(expected, fused(rows))
            else:
                is_same = torch.allclose(fused(rows), expected, rtol=NORM_CLOSE, atol=NORM_CLOSE)
            if is_same:
                return fused
    return None


def _random_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator).to(tensor)


def _close(expected: Tensor, got: Tensor) -> bool:
    if expected.shape != got.shape:
        return False
    difference = (got - expected).abs().amax()
    return bool(difference <= CLOSE[expected.dtype] * expected.abs().amax())
