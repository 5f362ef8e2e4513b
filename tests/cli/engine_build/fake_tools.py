"""A tool chain that writes small files, for the tests of builds.

`fake_tools.py hub download ...`, `fake_tools.py SCRIPT.py ...` and `fake_tools.py trtllm-build ...`. Files in the
directory FAKE_TOOLS decide: `VERB.hang` waits in the middle of the output, `VERB.fail`, `VERB.full`, `VERB.missing`
and `VERB.truncated` spoil it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

CONTROL = Path(os.environ["FAKE_TOOLS"])
OUTPUTS = {
    "download": "--local-dir",
    "convert": "--output_dir",
    "quantize": "--output_dir",
    "ptq": "--export_path",
    "build": "--output_dir",
}
SOURCES = ("--model_dir", "--pyt_ckpt_path", "--checkpoint_dir")


def verb_of(words: list[str]) -> str:
    names = {
        "hub": "download",
        "convert_checkpoint.py": "convert",
        "quantize.py": "quantize",
        "hf_ptq.py": "ptq",
        "trtllm-build": "build",
    }
    return names[Path(words[0]).name]


def option(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


def asked(verb: str, what: str) -> bool:
    return (CONTROL / f"{verb}.{what}").exists()


def hang(verb: str) -> None:
    """Announces the middle of the output, and waits until the test lets go of it."""
    if asked(verb, "hang"):
        begun = CONTROL / f"{verb}.begun.new"
        begun.write_text(str(os.getpid()))
        begun.rename(CONTROL / f"{verb}.begun")
    while asked(verb, "hang"):
        time.sleep(0.01)


def tensors(file: Path, seed: str, *, truncated: bool) -> None:
    data = hashlib.sha256(seed.encode()).digest() * 8
    header = json.dumps({"w": {"dtype": "U8", "shape": [256], "data_offsets": [0, 256]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + data
    file.write_bytes(whole[:-100] if truncated else whole)


def main(words: list[str]) -> None:
    verb = verb_of(words)
    at = words.index(OUTPUTS[verb]) + 1
    output = Path(words[at])
    with (CONTROL / "calls").open("a") as calls:
        calls.write(f"{json.dumps([verb, *words])}\n")
    source = next((Path(option(words, name)) for name in SOURCES if name in words), None)
    read = "".join(
        hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(source.iterdir() if source else [])
        if not file.name.startswith(".") and file.is_file()
    )
    seed = json.dumps([words[:at], words[at + 1 :], read])
    output.mkdir(parents=True, exist_ok=True)
    print(f"{verb}: working")
    if asked(verb, "fail"):
        sys.exit("CUDA out of memory")
    if asked(verb, "full"):
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"weights")
    config = Path(os.environ["FAKE_CONFIG"]).read_text()
    (output / "config.json").write_text(config)
    if "config.json" in words:
        return
    hang(verb)
    ranks = int(option(words, "--tp_size", "1")) * int(option(words, "--pp_size", "1"))
    if source is not None and (source / "ranks").exists():
        ranks = int((source / "ranks").read_text())
    if verb in ("convert", "quantize"):
        (output / "ranks").write_text(str(ranks))
    if verb == "ptq":
        (output / "hf_quant_config.json").write_text("{}")
    for rank in range(0 if asked(verb, "missing") else ranks):
        if verb == "build":
            (output / f"rank{rank}.engine").write_text(f"{rank} {seed}")
        else:
            name = f"rank{rank}" if verb in ("convert", "quantize") else "model"
            file = output / f"{name}.safetensors"
            tensors(file, f"{rank} {seed}", truncated=asked(verb, "truncated"))
    print(f"{verb}: done")


if __name__ == "__main__":
    main(sys.argv[1:])
