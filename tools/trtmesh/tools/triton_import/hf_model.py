"""What a Hugging Face directory says about its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtmesh.chassis.model_dir import read_object

LONGEST = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
"""Names of the longest sequence, by family of models."""


@dataclass(frozen=True, slots=True)
class ModelLengths:
    """Lengths in tokens; None where config.json has none."""

    longest: int | None
    window: int | None

    @classmethod
    def of(cls, directory: Path) -> ModelLengths:
        config = read_object(directory / "config.json")
        text = config.get("text_config") or config
        longest = next((text[name] for name in LONGEST if isinstance(text.get(name), int)), None)
        window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
        return cls(longest, window)


def has_weights(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def reason_unusable(directory: Path) -> str:
    """Why the embedded engine would refuse a directory; '' if it would not. Raises ModelUnusable for torn files."""
    if not has_weights(directory):
        return (
            "has no config.json with *.safetensors: the embedded engine reads Hugging Face models"
            + advice(directory)
        )
    if read_object(directory / "config.json").get("is_encoder_decoder"):
        return "has an encoder-decoder model; the embedded engine runs decoder-only models"
    return ""


def advice(directory: Path) -> str:
    """The end of a message about a directory without safetensors."""
    pickles = (directory / "config.json").is_file() and any(directory.glob("pytorch_model*.bin"))
    return f"; `trtmesh convert {directory}` makes them from pytorch_model.bin" if pickles else ""
