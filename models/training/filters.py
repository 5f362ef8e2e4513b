"""Which licences, paths and texts may enter the corpus."""

from __future__ import annotations

import re
from email.message import Message
from typing import Any

ALLOWED = {"MIT", "BSD", "APACHE", "PSF"}
PERMISSIVE = ALLOWED | {"ISC", "0BSD", "CC0", "ZLIB", "UNLICENSE"}

_FAMILIES = [
    ("0BSD", r"0BSD"),
    ("MIT", r"\bMIT\b"),
    ("BSD", r"\bBSD\b|Modified BSD|\b3-clause\b"),
    ("APACHE", r"\bapache\b|\bASL ?2"),
    ("PSF", r"\bPSF\b|Python Software Foundation"),
    ("ISC", r"\bISC\b"),
    ("CC0", r"\bCC0\b"),
    ("ZLIB", r"\bzlib\b"),
    ("UNLICENSE", r"unlicense"),
]
_FORBIDDEN = re.compile(
    r"GPL|General Public|MPL|Mozilla|EPL|Eclipse|CDDL|proprietary|CC-BY|Commercial|LicenseRef",
    re.IGNORECASE,
)
_COPYLEFT_TEXT = re.compile(r"\b[AL]?GPL|General Public Licen[sc]e|Mozilla Public|\bMPL\b")
_GENERATED = re.compile(
    r"(auto-?(matically )?|machine[- ])generated|generated (by|from|with)|do not edit",
    re.IGNORECASE,
)
_SKIPPED_PARTS = re.compile(
    r"^(_?vendor(ed|_packages)?|_?third_?party|externals?|extern|_?bundled|node_modules|site-packages"
    r"|locales?|_locale_data|pydoc_data|idle_test|lib2to3|encodings|config-.*|includes|whatsnew"
    r"|__pycache__|tests?|testing_data|.*_tests?|test_.*|__tests__|licenses?|snippets|unicode_versions)$",
    re.IGNORECASE,
)
_SKIPPED_NAMES = re.compile(
    r"(_pb2(_grpc)?|\.min|_generated|_builtins|conftest|_?tests?)\.[a-z]+$|^test_"
    r"|^(licen[sc]e|copying|notice|authors|entry_points|top_level|record|sources|requires|changes"
    r"|changelog|news|requirements|robots|contributors|thanks|credits)",
    re.IGNORECASE,
)
_STRING_LINE = re.compile(r"^\s*[\[({]*\s*[bru]?['\"].*['\"]\s*(:.*)?[\])}]*,?$")


def _families(text: str) -> set[str]:
    return {name for name, pattern in _FAMILIES if re.search(pattern, text, re.IGNORECASE)}


def declared_licence(metadata: Any) -> str | None:
    """The licence a distribution declares, or None unless every term of it is allowed."""
    assert isinstance(metadata, Message)
    expression = metadata.get("License-Expression")
    classifiers = [c for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    names = [c.rsplit(" :: ", 1)[-1] for c in classifiers if c != "License :: OSI Approved"]
    free_text = (metadata.get("License") or "").strip().splitlines()[:1]
    declared = [expression] if expression else names or [t for t in free_text if len(t) < 80]
    if not declared or any(_FORBIDDEN.search(term) for term in declared):
        return None
    terms = [t for d in declared for t in re.split(r"\s+(?:AND|OR|WITH)\s+", d)]
    found = [_families(term) for term in terms]
    if not all(found) or not all(f <= PERMISSIVE for f in found):
        return None
    return "; ".join(declared) if set().union(*found) & ALLOWED else None


def kind_of(path: str) -> str | None:
    suffix = path.rsplit(".", 1)[-1].lower()
    return {"py": "code", "rst": "docs", "md": "docs", "txt": "docs"}.get(suffix)


def path_allowed(path: str) -> bool:
    *folders, name = path.split("/")
    return not any(_SKIPPED_PARTS.match(f) for f in folders) and not _SKIPPED_NAMES.search(name)


def clean(text: str) -> str:
    """Drops a leading licence comment and trailing blanks; newlines become one character."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff\n")
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if re.search(r"copyright|licen[sc]e", "\n".join(lines[:end]), re.IGNORECASE):
        lines = lines[end:]
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def text_allowed(text: str, kind: str) -> bool:
    """Rejects tables, generated files, foreign alphabets and other licences' texts."""
    lines = [line for line in text.split("\n") if line.strip()]
    dense = "".join(text.split())
    if len(text) < 200 or len(lines) < 5 or max(map(len, lines)) > 1000:
        return False
    if _COPYLEFT_TEXT.search(text[:4000]) or _GENERATED.search(text[:600]):
        return False
    if sum(c.isdigit() for c in dense) > 0.15 * len(dense) or (
        not text.isascii() and (sum(not c.isascii() for c in dense) > 0.02 * len(dense))
    ):
        return False
    if kind == "code" and sum(bool(_STRING_LINE.match(line)) for line in lines) > 0.4 * len(lines):
        return False
    return len(text) / len(lines) < 120 or kind == "docs"


class LineIndex:
    """Finds near-duplicates: files most of whose longer lines were seen in earlier files."""

    def __init__(self, threshold: float = 0.6, shortest_line: int = 20) -> None:
        self._seen: set[int] = set()
        self._threshold = threshold
        self._shortest_line = shortest_line

    def is_duplicate(self, text: str) -> bool:
        stripped = (line.strip() for line in text.split("\n"))
        hashes = {hash(line) for line in stripped if len(line) >= self._shortest_line}
        if not hashes or len(hashes & self._seen) > self._threshold * len(hashes):
            return True
        self._seen |= hashes
        return False
