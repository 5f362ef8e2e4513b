"""Random adapters of a tiny Llama, and the tokens that each of them alone makes likeliest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from oracle import tiny_models
from safetensors.torch import save
from torch import Tensor
from torch.func import functional_call
from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent
from trtmesh.chassis.parsing import parse_config
from trtmesh.engine.adapters.arrays import write_arrays
from trtmesh.engine.adapters.lora import Lora, Update, place_of
from trtmesh.v1 import generation_pb2 as pb

UPDATE_STD = 0.1
"""Of the merged update, two thirds of the weights' own: enough to change most tokens."""

TIE = 1e-3
"""Logits closer than this may change places by rounding."""

INTERMEDIATE = int(tiny_models.SHAPE["intermediate_size"])
HIDDEN = int(tiny_models.SHAPE["hidden_size"])
KEYS = HIDDEN // 2
"""Outputs of the key and value projections: half as many heads."""

Sizes = Mapping[str, tuple[int, int]]
"""Inputs and outputs of the linear layers of a decoder layer."""


def sizes(hidden: int, keys: int, intermediate: int) -> Sizes:
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }


SIZES = sizes(HIDDEN, KEYS, INTERMEDIATE)
OF_SMALL = sizes(192, 64, 384)
"""Those of `e2e.mesh.SMALL`, which has as many layers."""


@dataclass(frozen=True)
class TinyAdapter:
    """The weights of one version, exact in half precision: A and B by name of the layer."""

    rank: int
    updates: Mapping[str, tuple[Tensor, Tensor]]

    @cached_property
    def content(self) -> AdapterContent:
        """A PEFT directory."""
        return AdapterContent(pb.ADAPTER_FORMAT_PEFT, self.config(), save(self.tensors()))

    @cached_property
    def version(self) -> str:
        return self.content.version

    def config(self, **changes: Any) -> bytes:
        """adapter_config.json."""
        targets = sorted({name.rpartition(".")[2] for name in self.updates})
        values = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank, "lora_alpha": self.rank,
            "target_modules": targets, "bias": "none", "base_model_name_or_path": "tiny",
        }  # fmt: skip
        return json.dumps(values | changes).encode()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of adapter_model.safetensors."""
        return {
            f"base_model.model.{name}.lora_{side}.weight": matrix
            for name, update in self.updates.items()
            for side, matrix in zip("AB", update, strict=True)
        }

    @cached_property
    def arrays(self) -> tuple[pb.Tensor, pb.Tensor]:
        """Weights and config, as a request brings them."""
        places = {place_of(name): Update(*update) for name, update in self.updates.items()}
        lora = Lora({place: update for place, update in places.items() if place})
        weights, config = write_arrays(lora, torch.float16)
        return (
            pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=weights.shape, data=_bytes(weights)),
            pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=config.shape, data=_bytes(config)),
        )

    @cached_property
    def arrays_version(self) -> str:
        """The version of the arrays."""
        config = pb.GenerationConfig(lora=self.brought(1))
        lora = parse_config(config).lora
        assert lora is not None
        assert lora.weights is not None
        assert lora.config is not None
        return AdapterContent.of_arrays(lora.weights, lora.config).version

    def brought(self, number: int) -> pb.LoraConfig:
        """What a request sends that brings the adapter."""
        weights, config = self.arrays
        return pb.LoraConfig(id=number, weights=weights, config=config)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def tiny_adapter(
    seed: int, rank: int, layers: Sequence[str] = tuple(SIZES), of: Sizes = SIZES
) -> TinyAdapter:
    """An adapter of all decoder layers, different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    std = (UPDATE_STD / rank**0.5) ** 0.5

    def matrix(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator) * std
        return values.half()

    return TinyAdapter(
        rank,
        {
            f"model.layers.{layer}.{name}": (matrix(rank, inputs), matrix(outputs, rank))
            for layer in range(int(tiny_models.SHAPE["num_hidden_layers"]))
            for name, (inputs, outputs) in of.items()
            if name in layers
        },
    )


def save_adapter(content: AdapterContent, directory: Path) -> None:
    """Writes the files of an adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    names = FILE_NAMES[content.format]
    (directory / names.config).write_bytes(content.config)
    (directory / names.weights).write_bytes(content.weights)


class Oracle:
    """The model of transformers with the weights of one adapter merged, one sequence at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._model = tiny_models.reference_model(model_dir)
        self._base = dict(self._model.named_parameters())

    def is_greedy(
        self, adapter: TinyAdapter | None, prompt: Sequence[int], tokens: Sequence[int]
    ) -> bool:
        """Whether each token is the likeliest after those before it."""
        rows = self._rows(adapter, prompt, tokens)
        chosen = rows.gather(1, torch.tensor([tokens]).T)[:, 0]
        return bool((chosen >= rows.amax(1) - TIE).all())

    def log_probs(
        self, adapter: TinyAdapter | None, prompt: Sequence[int], tokens: Sequence[int]
    ) -> list[float]:
        """The log-probability of each token."""
        rows = self._rows(adapter, prompt, tokens).double().log_softmax(1)
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    def _rows(
        self, adapter: TinyAdapter | None, prompt: Sequence[int], tokens: Sequence[int]
    ) -> Tensor:
        """The logits of each token, [tokens, vocabulary]."""
        ids = torch.tensor([(*prompt, *tokens)])
        with torch.inference_mode():
            output: Any = functional_call(self._model, dict(self._merged(adapter)), (ids,))
        rows: Tensor = output.logits[0, len(prompt) - 1 : -1]
        return rows

    def _merged(self, adapter: TinyAdapter | None) -> Iterator[tuple[str, Tensor]]:
        updates = adapter.updates if adapter else {}
        for name, weight in self._base.items():
            update = updates.get(name.removesuffix(".weight"))
            yield name, weight if update is None else weight + update[1].float() @ update[0].float()
