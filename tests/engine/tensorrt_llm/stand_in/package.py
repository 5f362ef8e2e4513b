"""Writes a package `tensorrt_llm` that stands in for a release of TensorRT-LLM, from the signatures of that release.

A process with the directory on its PYTHONPATH imports it as the library. Names, keywords and defaults are those of the
release, and wrong use fails as there; `machine.py` reproduces its behaviour without a model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

HERE = Path(__file__).parent
RELEASES = ("1.2.1", "1.3.0rc29")
PARTS = ("strict.py", "machine.py", "results.py", "llm.py")

LOADER = """\
from tensorrt_llm._stand_in.strict import publish

publish(__name__, globals())
"""


def write_package(directory: Path, release: str) -> Path:
    """Returns the directory to import from."""
    package = directory / "tensorrt_llm"
    own = package / "_stand_in"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("")
    for name in PARTS:
        shutil.copy(HERE / name, own / name)
    signatures = HERE / f"signatures_{release}.json"
    shutil.copy(signatures, own / "signatures.json")
    for module in sorted(_modules(json.loads(signatures.read_text(encoding="utf-8")))):
        place = directory.joinpath(*module.split("."))
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text(LOADER)
    return directory


def _modules(signatures: dict[str, dict[str, dict[str, str]]]) -> set[str]:
    """Every module with a class of the release, and the packages around it."""
    modules = set[str]()
    for described in signatures["classes"].values():
        exports = [each.split()[0] for each in described.get("export", "").split(", ") if each]
        for name in (described["module"], *(each.rpartition(".")[0] for each in exports)):
            parts = name.split(".")
            modules |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    if "TrtLlmArgs" in signatures["classes"]:
        modules.add("tensorrt_llm._tensorrt_engine")
    return modules
