"""Attention and gated MLP of transformers with fewer and larger operations.

On a CPU a step of a small batch is as long as its operations are many: each costs some microseconds before it computes
anything. So queries, keys and values come from one product, as do gate and up, and the rotation turns queries and keys
together, in place.

A layer is replaced only where its code is that of a layer known here, and where it computes the same for a trial input.
The code alone does not tell, for functions of the same name differ between models, and a trial alone does not either,
for some models treat positions far behind it differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from trtmesh.engine.backends.torch.attention import ATTRIBUTE, Rule, attach

TRIAL_TOKENS = 3
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Most that a fused layer may differ by, as a share of the largest value: rounding."""


def _codes(kinds: Iterable[type]) -> set[tuple[Any, ...]]:
    return {_code(kind) for kind in kinds}


def _code(kind: type) -> tuple[Any, ...]:
    """What a layer's forward does, but for what its names mean."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    code = forward.__code__
    return code.co_code, code.co_names, code.co_varnames


ATTENTIONS = _codes((LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention))
MLPS = _codes((LlamaMLP,))


def fuse_layers(model: Any) -> None:
    """Replaces what can be replaced in a model of transformers that uses this engine's attention."""
    rotation = Rotation()
    trials = _trials(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused: nn.Module | None = None
            if _code(type(child)) in MLPS:
                fused = _fused_mlp(child)
            elif child in trials:
                fused = _fused_attention(child, trials[child], rotation)
            if fused is not None:
                setattr(parent, name, fused)


class FusedMlp(nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_up = _joined([own.gate_proj, own.up_proj])
        self.act_fn = own.act_fn
        self.down_proj = own.down_proj
        self._size = own.gate_proj.out_features

    def forward(self, hidden: Tensor) -> Tensor:
        both = self.gate_up(hidden)
        product: Tensor = self.down_proj(
            self.act_fn(both[..., : self._size]) * both[..., self._size :]
        )
        return product


class Rotation:
    """The rotary embedding of queries and keys; made ready once a step, for all layers."""

    def __init__(self) -> None:
        self._given: Tensor | None = None

    def turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turns `heads` [tokens, heads, head_dim] in place; `cos` and `sin` are [1, tokens, turned dimensions].

        x * cos + rotate_half(x) * sin, with the signs of rotate_half moved to the sine.
        """
        if sin is not self._given:
            self._given = sin
            self._half = sin.shape[-1] // 2
            self._cos = cos[0].unsqueeze(1)
            self._sin = sin[0].unsqueeze(1).clone()
            self._sin[..., : self._half].neg_()
        if 2 * self._half < heads.shape[-1]:
            heads = heads[..., : 2 * self._half]
        swapped = heads.roll(self._half, -1)
        heads.mul_(self._cos).addcmul_(swapped, self._sin)


class FusedAttention(nn.Module):
    """Self-attention with rotary positions, over a flat batch.

    `own` is the layer that it stands for; it computes where no attention of an engine is attached.
    """

    def __init__(self, own: Any, rule: Rule, rotation: Rotation) -> None:
        super().__init__()
        joined = [own.q_proj, own.k_proj, own.v_proj]
        self.qkv = _joined(joined)
        self.o_proj = own.o_proj
        self.q_norm = getattr(own, "q_norm", None)
        self.k_norm = getattr(own, "k_norm", None)
        self.own = own
        setattr(self, ATTRIBUTE, None)
        size = own.head_dim
        self._shape = (-1, sum(each.out_features for each in joined) // size, size)
        self._heads = own.q_proj.out_features // size
        self._turned = self._heads + own.k_proj.out_features // size
        self._layer = own.layer_idx
        self._rule = rule
        self._rotation = rotation
        first = 0
        for name, each in zip(PROJECTIONS, joined, strict=False):
            setattr(own, name, _Part(lambda: self.qkv, first, first + each.out_features))
            first += each.out_features

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        attention = getattr(self, ATTRIBUTE)
        if attention is None:
            output: tuple[Tensor, None] = self.own(
                hidden_states, position_embeddings, attention_mask, **others
            )
            return output
        qkv = self.qkv(hidden_states[0]).view(self._shape)
        queries = qkv[:, : self._heads]
        if self.q_norm is not None and self.k_norm is not None:
            keys = qkv[:, self._heads : self._turned]
            queries.copy_(self.q_norm(queries))
            keys.copy_(self.k_norm(keys))
        self._rotation.turn(qkv[:, : self._turned], *position_embeddings)
        attended = attention.attend_tokens(self._layer, queries, qkv[:, self._heads :], self._rule)
        return self.o_proj(attended.flatten(1))[None], None


class _Part(nn.Module):
    """Some of the outputs of a linear layer, as a layer of its own."""

    def __init__(self, whole: Callable[[], nn.Module], first: int, last: int) -> None:
        super().__init__()
        self._whole = whole
        self._first, self._last = first, last

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self._whole()(hidden)
        return product[..., self._first : self._last]


def _joined(layers: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several."""
    first = layers[0]
    weight = torch.cat([each.weight for each in layers])
    whole = nn.Linear(first.in_features, len(weight), bias=False, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if first.bias is not None:
        bias = torch.cat([each.bias for each in layers])
        whole.bias = nn.Parameter(bias, requires_grad=False)
    return whole


@dataclass(slots=True)
class _Trial:
    """What an attention layer was given in a forward of the model."""

    hidden: Tensor
    named: dict[str, Any]


class _Seen:
    """Attention that gives the queries back and notes what it is asked; for other layers than are known here, zeros."""

    queries: Tensor
    kv: Tensor
    rule: Rule

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if query.shape[-1] != value.shape[-1]:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        return self.attend_tokens(layer, queries, torch.cat((keys, values), 1), rule)[None]

    def attend_tokens(self, _layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        # Copies, for the caller may go on with its own.
        self.queries, self.kv, self.rule = queries.clone(), kv.clone(), rule
        return self.queries


def _trials(model: Any) -> dict[nn.Module, _Trial]:
    """The layers that may be replaced, as the model calls them."""
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
    projections = [parts[name] for name in PROJECTIONS if type(parts.get(name)) is nn.Linear]
    biases = {each.bias is None for each in projections[:3]}
    return (
        len(projections) == len(PROJECTIONS) == len(parts) - len(norms)
        and len(norms) != 1
        and len(biases) == 1
    )


def _fused_attention(own: Any, trial: _Trial, rotation: Rotation) -> nn.Module | None:
    hidden = _random_like(trial.hidden)
    expected, got = _Seen(), _Seen()
    with torch.inference_mode():
        attach(own, expected)
        output, _ = own(hidden_states=hidden, **trial.named)
        same_size = expected.queries.shape[-1] == expected.kv.shape[-1] == own.head_dim
        if not same_size:
            return None
        weights = {name: getattr(own, name) for name in PROJECTIONS}
        fused = FusedAttention(own, expected.rule, rotation)
        attach(fused, got)
        fused_output, _ = fused(hidden_states=hidden, **trial.named)
    pairs = (
        (output, fused_output),
        (expected.queries, got.queries),
        (expected.kv, got.kv),
    )
    if all(_close(*pair) for pair in pairs):
        return fused
    for name, layer in weights.items():
        setattr(own, name, layer)
    return None


def _fused_mlp(own: Any) -> nn.Module | None:
    parts = dict(own.named_children())
    layers = [parts.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if len(parts) != 4 or any(type(layer) is not nn.Linear for layer in layers):
        return None
    if (own.gate_proj.bias is None) != (own.up_proj.bias is None):
        return None
    fused = FusedMlp(own)
    weight = own.gate_proj.weight
    hidden = _random_like(weight.new_empty(1, TRIAL_TOKENS, own.gate_proj.in_features))
    with torch.inference_mode():
        return fused if _close(own(hidden), fused(hidden)) else None


def _random_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator).to(tensor)


def _close(expected: Tensor, got: Tensor) -> bool:
    if expected.shape != got.shape:
        return False
    difference = (got - expected).abs().amax()
    return bool(difference <= CLOSE[expected.dtype] * expected.abs().amax())
