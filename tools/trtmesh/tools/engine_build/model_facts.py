"""What `config.json` says about a model: its shape, and from that its number of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.json_text import load_json
from trtmesh.tools.engine_build.families import FAMILY_BY_TYPE, Family

MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The shape of a decoder-only model."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the MLP, or of one expert."""
    experts: int
    """0 without a mixture of experts."""
    vocabulary: int
    learned_positions: int
    positions: int | None
    """Longest sequence; None without a limit."""
    tied: bool

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of one layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp = (3 if self.family.gated else 2) * self.hidden * self.inner
        return attention + mlp * max(1, self.experts)

    @property
    def linear_weights(self) -> int:
        """Weights of the linear layers, which a precision concerns."""
        return self.layers * self.layer_weights

    @property
    def embedding_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def other_weights(self) -> int:
        """Weights beside those of linear layers, embedding and output; they are never quantized."""
        routing = self.layers * self.hidden * self.experts
        return routing + self.learned_positions * self.hidden

    @property
    def weights(self) -> int:
        """All weights but norms and biases, less than a thousandth of the whole."""
        ends = self.embedding_weights * (1 if self.tied else 2)
        return self.linear_weights + ends + self.other_weights


def read_facts(file: Path) -> ModelFacts:
    """Reads a config.json. Raises SettingsError."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise SettingsError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
        config = load_json(data)
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file} must be a JSON object")
    return _facts(config, file)


def _facts(config: Mapping[str, Any], file: Path) -> ModelFacts:
    kind = config.get("model_type")
    family = FAMILY_BY_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(FAMILY_BY_TYPE)
        raise SettingsError(f"{file}: model_type is {kind!r} but must be one of {known}")

    def number(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"{file}: {names[0]} is {value!r} but must be a number above 0")
        return value

    hidden = number("hidden_size", "n_embd")
    heads = number("num_attention_heads", "n_head")
    learned = kind in ("gpt2", "opt")
    unlimited = kind == "bloom" or bool(config.get("alibi"))
    positions = (
        None if unlimited else number("max_position_embeddings", "n_positions", default=2048)
    )
    return ModelFacts(
        family=family,
        hidden=hidden,
        layers=number("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=_falcon_kv_heads(config, heads)
        if kind == "falcon"
        else number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        inner=number("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", default=4 * hidden),
        experts=number("num_local_experts") if kind == "mixtral" else 0,
        vocabulary=number("vocab_size"),
        learned_positions=positions if learned and positions else 0,
        positions=positions,
        tied=bool(config.get("tie_word_embeddings", family.ties)),
    )  # fmt: skip


def _falcon_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or heads)
    return 1 if config.get("multi_query", True) else heads
