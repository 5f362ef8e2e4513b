"""Converts adapters: `python -m trtmesh.engine.backends.torch.model.adapter_conversion FROM INTO TYPE [MODEL]`.

`trtmesh adapters convert` runs it. PEFT's format becomes TensorRT-LLM's arrays, and arrays become PEFT's format. Values
are stored as TYPE; `auto` takes the smallest sufficient type.
"""

from __future__ import annotations

import sys
from functools import reduce
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from trtmesh.chassis.errors import StartupError
from trtmesh.chassis.peft_adapter import CONFIG
from trtmesh.engine.adapters import arrays, peft
from trtmesh.engine.adapters.lora import Lora, converted, fit, place_of
from trtmesh.engine.backends.torch.model.conversions import run_conversion
from trtmesh.engine.backends.torch.model.lora_layers import lora_targets
from trtmesh.engine.backends.torch.model.model import model_outline

MOST_BYTES = 1 << 34
AUTO = "auto"


def convert(source: Path, target: Path, dtype: str, model_dir: Path | None) -> None:
    """Writes the other format. Without a model, the layers of a PEFT adapter are not checked.

    Raises InvalidRequest, UnsupportedField or ModelUnusable; StartupError where a file cannot be written.
    """
    model = None if model_dir is None else model_outline(model_dir)
    try:
        if (source / CONFIG).exists():
            _to_arrays(source, target, dtype, model)
        elif model is not None:
            _to_peft(source, target, dtype, model)
        else:
            raise StartupError(f"{source} holds arrays, whose layers only a model names")
    except OSError as error:
        raise StartupError(f"cannot write to {target}: {error.strerror}") from error


def _to_arrays(source: Path, target: Path, dtype: str, model: PreTrainedModel | None) -> None:
    lora = peft.read_peft(source, MOST_BYTES)
    if model is not None:
        fit(lora, lora_targets(model))
    stored = converted(lora, _stored_type(lora, dtype))
    arrays.write_files(stored, target, _type_of(stored))


def _to_peft(source: Path, target: Path, dtype: str, model: PreTrainedModel) -> None:
    targets = lora_targets(model)
    lora = fit(arrays.read_files(source, targets, MOST_BYTES), targets)
    lora = converted(lora, _stored_type(lora, dtype))
    layers = dict(model.named_modules())
    names = {place: name for name in layers if (place := place_of(name)) and place in lora.updates}
    transposed = all(isinstance(layers[name], Conv1D) for name in names.values())
    peft.write_peft(lora, target, str(model.name_or_path), names, fan_in_fan_out=transposed)


def _stored_type(lora: Lora, name: str) -> torch.dtype:
    dtype: torch.dtype = _type_of(lora) if name == AUTO else getattr(torch, name)
    return dtype


def _type_of(lora: Lora) -> torch.dtype:
    """The smallest type sufficient for every value."""
    each = (half.dtype for update in lora.updates.values() for half in (update.a, update.b))
    return reduce(torch.promote_types, each)


if __name__ == "__main__":
    source, target, dtype, *model = sys.argv[1:]
    model_dir = Path(model[0]) if model else None
    sys.exit(run_conversion(lambda: convert(Path(source), Path(target), dtype, model_dir)))
