"""Collect a freely licensed Python corpus from what is installed, and describe it.

Writes `train.jsonl` and `heldout.jsonl` (one `{"source", "stage", "path", "kind", "text"}` object
a line, `kind` being `code` or `docs`) and `MANIFEST.json`.  Sources are the standard library of
the running interpreter, optionally CPython's documentation (`--cpython-docs`), and every
distribution under the `--site` folders whose metadata declares an allowed licence.  Stage 1 is
what the first site adds, stage 2 what the others do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

from filters import LineIndex, clean, declared_licence, kind_of, path_allowed, text_allowed

HELDOUT_ONE_IN = 100
MAX_SOURCE_BYTES = 6_000_000  # for installed distributions, so that no one project dominates


@dataclass
class Source:
    """One project's files; `sha256` runs over the kept texts (UTF-8) in `visiting_order`."""

    name: str
    version: str
    licence: str
    stage: int = 1
    max_bytes: int = 1 << 62
    files: int = 0
    heldout_files: int = 0
    bytes: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def record(self) -> dict[str, object]:
        return {
            "name": self.name,
            "version": self.version,
            "licence": self.licence,
            "stage": self.stage,
            "files": self.files,
            "heldout_files": self.heldout_files,
            "bytes": self.bytes,
            "sha256": self.digest.hexdigest(),
        }


def is_heldout(text: str) -> bool:
    """Splits by file content, so that a file never changes sides between runs."""
    return digest_of(text) % HELDOUT_ONE_IN == 0


def digest_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def visiting_order(files: Iterable[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """A fixed pseudo-random order, so that a byte limit samples the whole project evenly."""
    return sorted(files, key=lambda item: digest_of(item[0]))


def tree(root: Path) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*"):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path


def distribution_files(dist: Distribution) -> Iterator[tuple[str, Path]]:
    for entry in dist.files or []:
        path = Path(str(dist.locate_file(entry)))
        if ".." not in entry.parts and path.is_file():
            yield entry.as_posix(), path


def sources(
    sites: list[Path], docs: Path | None
) -> Iterator[tuple[Source, Iterator[tuple[str, Path]]]]:
    """Yields each source with its candidate files as (relative path, location)."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    yield Source("cpython-stdlib", platform.python_version(), "PSF-2.0"), tree(stdlib)
    if docs is not None:
        yield Source("cpython-docs", platform.python_version()[:4], "PSF-2.0"), tree(docs)
    names: set[str] = set()
    for stage, site in enumerate(sites, start=1):
        dists = sorted(distributions(path=[str(site)]), key=lambda d: d.metadata["Name"].lower())
        for dist in dists:
            name = dist.metadata["Name"].lower()
            licence = declared_licence(dist.metadata)
            if licence is not None and name not in names:
                names.add(name)
                source = Source(name, dist.version, licence, min(stage, 2), MAX_SOURCE_BYTES)
                yield source, distribution_files(dist)


def documents(
    source: Source, files: Iterable[tuple[str, Path]], seen: LineIndex
) -> Iterator[dict[str, str | int]]:
    """Yields the kept documents of one source and counts them into it."""
    for name, path in visiting_order(files):
        if source.bytes >= source.max_bytes:
            break
        kind = kind_of(name)
        if kind is None or not path_allowed(name) or path.stat().st_size > 1_000_000:
            continue
        try:
            text = clean(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if not text_allowed(text, kind) or seen.is_duplicate(text):
            continue
        source.files += 1
        source.bytes += len(text.encode())
        source.digest.update(text.encode())
        yield {
            "source": source.name,
            "stage": source.stage,
            "path": name,
            "kind": kind,
            "text": text,
        }


def write_manifest(path: Path, facts: dict[str, object], records: list[dict[str, object]]) -> None:
    """Writes one source a line, for readable differences."""
    head = json.dumps(facts, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(record)}" for record in records)
    path.write_text(f'{head},\n "sources": [\n{lines}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, required=True, nargs="+", help="site-packages folders")
    parser.add_argument("--cpython-docs", type=Path, help="the documentation's _sources folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two splits")
    parser.add_argument("--manifest", type=Path, default=Path(__file__).with_name("MANIFEST.json"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    seen = LineIndex()
    records: list[dict[str, object]] = []
    totals = {"code": 0, "docs": 0}
    split_bytes = {"train": 0, "heldout": 0}
    with (
        (args.out / "train.jsonl").open("w") as train,
        (args.out / "heldout.jsonl").open("w") as held,
    ):
        for source, files in sources(args.site, args.cpython_docs):
            for document in documents(source, files, seen):
                size = len(document["text"].encode())
                heldout = is_heldout(document["text"])
                source.heldout_files += heldout
                totals[document["kind"]] += size
                split_bytes["heldout" if heldout else "train"] += size
                (held if heldout else train).write(json.dumps(document) + "\n")
            if source.files:
                records.append(source.record())

    rule = f"sha256(text) mod {HELDOUT_ONE_IN} == 0, by file"
    sizes = {**totals, **split_bytes}
    write_manifest(args.manifest, {"heldout_rule": rule, "bytes": sizes}, records)
    print(json.dumps(sizes), len(records), "sources")


if __name__ == "__main__":
    main()
