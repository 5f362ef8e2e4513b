"""Reads and writes adapters as TensorRT-LLM's arrays `lora_weights` and `lora_config`.

`lora_config` [modules, 3 or 4] int32 holds (module id, layer, rank[, is DoRA]). A row of `lora_weights`
[modules, width] holds A [rank, in], then B [out, rank] with the scale, then zeros. In files both have a leading
dimension of 1.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from trtmesh.chassis.adapter_content import FILE_NAMES, MOST_MODULES, AdapterContent
from trtmesh.chassis.errors import InvalidField, InvalidRequest, UnsupportedField
from trtmesh.engine.adapters.lora import (
    DTYPES,
    Lora,
    Module,
    Place,
    Target,
    Update,
    misfit,
    sizes_at,
    swap_halves,
)
from trtmesh.engine.adapters.safetensors_file import data_of
from trtmesh.v1 import generation_pb2 as pb

CONFIG_FILE, WEIGHTS_FILE = FILE_NAMES[pb.ADAPTER_FORMAT_ARRAYS]
BITS = np.dtype("V2")
_TORCH_TYPES = {
    np.dtype("<f4"): torch.float32,
    np.dtype("<f2"): torch.float16,
    BITS: torch.bfloat16,
    np.dtype("<i4"): torch.int32,
}
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_arrays(weights: Tensor, config: Tensor, targets: Mapping[Place, Target]) -> Lora:
    """Takes the arrays apart by the sizes of the model's layers.

    Raises InvalidRequest or UnsupportedField with the row. A row of zeros is an update without effect and is left out:
    TensorRT-LLM fills in whichever of queries, keys and values an adapter lacks.
    """
    weights, config = _without_batch("lora_weights", weights), _without_batch("lora_config", config)
    if config.shape[1] not in (3, 4) or not 0 < len(config) <= MOST_MODULES:
        raise InvalidField.of("lora_config", list(config.shape), "[1 or more, 3 or 4]")
    if len(weights) != len(config) or weights.dtype not in DTYPES:
        raise InvalidField.of(
            "lora_weights",
            f"{weights.dtype} {list(weights.shape)}",
            f"{len(config)} rows of FP16",
            "lora_config",
        )
    updates: dict[Place, Update] = {}
    for number, (row, (module, layer, rank, *dora)) in enumerate(
        zip(weights, config.tolist(), strict=True)
    ):
        if any(dora):
            raise UnsupportedField("is a DoRA update", field=f"lora_config[{number}]")
        place = (layer, _module(number, module))
        if place in updates:
            raise InvalidRequest(
                "names a layer for the second time", field=f"lora_config[{number}]"
            )
        if row.any():
            updates[place] = _update(number, row, place, rank, targets)
    if not updates:
        raise InvalidField.of("lora_weights", "zeros", "the weights of at least one layer")
    return Lora(updates)


def write_arrays(lora: Lora, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`lora_weights` in `dtype` and `lora_config`, both without the leading dimension."""
    rows, config = [], []
    for (layer, module), update in sorted(lora.updates.items()):
        own = swap_halves(update) if module is Module.MLP_GATE_UP else update
        rows.append(torch.cat((own.a.flatten(), own.b.flatten())).to(dtype))
        config.append((int(module), layer, own.rank))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(config).int()


def read_files(directory: Path, targets: Mapping[Place, Target], most_bytes: int) -> Lora:
    """Reads a directory of at most `most_bytes`. Raises NotFound, or the errors of `parse_arrays` with its path."""
    return parse_arrays(AdapterContent.read(directory, most_bytes), targets, f"{directory}/")


def parse_arrays(content: AdapterContent, targets: Mapping[Place, Target], where: str = "") -> Lora:
    """Takes a content apart. Raises InvalidRequest or UnsupportedField with file or row, and the reason; `where`
    precedes the names of files. Nothing is unpickled."""
    return read_arrays(
        _parse_npy(content.weights, where + WEIGHTS_FILE),
        _parse_npy(content.config, where + CONFIG_FILE),
        targets,
    )


def write_files(lora: Lora, directory: Path, dtype: torch.dtype) -> None:
    """Writes both files; numpy has no bfloat16, so its bits are stored as V2, as TensorRT-LLM does."""
    weights, config = write_arrays(lora, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    half = dtype == torch.bfloat16
    stored = weights.view(torch.int16).numpy().view(BITS) if half else weights.numpy()
    np.save(directory / WEIGHTS_FILE, stored[None])
    np.save(directory / CONFIG_FILE, config[None].numpy())


def _without_batch(name: str, array: Tensor) -> Tensor:
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2:
        raise InvalidField.of(name, list(array.shape), "[modules, values]")
    return array


def _module(number: int, module: int) -> Module:
    try:
        return Module(module)
    except ValueError:
        known = ", ".join(str(int(each)) for each in Module)
        raise UnsupportedField(
            f"has module id {module}, but only {known} can be updated here",
            field=f"lora_config[{number}]",
        ) from None


def _update(
    number: int, row: Tensor, place: Place, rank: int, targets: Mapping[Place, Target]
) -> Update:
    inputs, outputs = sizes_at(place, targets)
    fused = targets.get((place[0], Module.MLP_GATE_UP))
    if place[1] is Module.MLP_H_TO_4H and fused and row[rank * (inputs + outputs) :].any():
        outputs = fused.outputs
    values = rank * (inputs + outputs)
    if rank < 1 or values > len(row) or row[values:].any():
        used = int(row.nonzero()[-1]) + 1
        raise misfit(
            place,
            f"has rank {rank} and {used} weights in row {number} of lora_weights, but the layer of {inputs} inputs and"
            f" {outputs} outputs takes {max(0, values)}: rank or model is another",
        )
    a, b = row[: rank * inputs], row[rank * inputs : values]
    update = Update(a.view(rank, inputs), b.view(outputs, rank))
    return swap_halves(update) if place[1] is Module.MLP_GATE_UP else update


def _parse_npy(data: bytes, name: str) -> Tensor:
    """The array of a .npy file; its values are one copy, made without the GIL."""
    file = io.BytesIO(data)
    try:
        read_header = _HEADERS[npy.read_magic(file)]
        shape, fortran_order, dtype = read_header(file)
        values = data_of(data, file.tell())
        if dtype not in _TORCH_TYPES:
            raise InvalidRequest(
                f"holds {dtype}", field=name, limit="float32, float16, bfloat16 as V2 or int32"
            )
        if not all(type(size) is int and 0 <= size <= len(data) for size in shape):
            raise InvalidRequest(
                f"has shape {shape}"[:200], field=name, limit="the values of the file"
            )
        array = values.view(_TORCH_TYPES[dtype])
        return (
            array.view(shape[::-1]).permute(*reversed(range(len(shape))))
            if fortran_order
            else array.view(shape)
        )
    except InvalidRequest:
        raise
    except Exception as error:
        # Broad on purpose: a broken file fails in many types.
        raise InvalidRequest(f"is not a readable .npy file: {error}", field=name) from error
