"""Decoding beyond plain tokens: `speculation`, drafts of several kinds, and `guided`, grammars, each against none."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import _guided
import _speculation

PARTS: dict[str, Callable[[list[str]], dict[str, object]]] = {
    "speculation": _speculation.main,
    "guided": _guided.main,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    options, rest = parser.parse_known_args()
    print(json.dumps({options.part: PARTS[options.part](rest)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
