"""Measures what receipts cost a router, by item and by token.

The receipts of text prompts by one worker, with a key and a file, in this process. CPU time, the least of the rounds:
what else runs on the machine only adds to it.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from _options import run_bench
from trtmesh.chassis.parsing import parse_config
from trtmesh.chassis.vocabulary import Prompt
from trtmesh.router.fleet.worker_capabilities import Fingerprints, WorkerCapabilities
from trtmesh.router.receipts import Receipts, ReceiptSettings
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb

TOKENS = (0, 128, 350, 4096)
ITEMS = 200
"""Of a round."""
PROMPT = "def load_json(path):"
WORKER: Any = SimpleNamespace(
    name="engine-0",
    capabilities=WorkerCapabilities(
        Fingerprints("m" * 32, "t" * 64),
        {"backend": "torch", "device": "1 of a CPU, AVX512", "batch_invariant": "True"},
        is_exact=True,
    ),
)


def microseconds_an_item(receipts: Receipts, tokens: int) -> float:
    """CPU time of the receipts of a round, by item."""
    message = pb.GenerationConfig()
    message.stopping.max_tokens = max(1, tokens)
    message.sampling.temperature = 0.8
    item = ItemRequest(0, Prompt(text=PROMPT), parse_config(message), message)
    run: Any = SimpleNamespace(
        token_ids=[token * 7919 % 150_000 for token in range(tokens)],
        reason=pb.FINISH_REASON_LENGTH,
        sequence_index=0,
        ending=None,
    )
    began = time.process_time()
    for number in range(ITEMS):
        receipt = receipts.begin(f"request-{number}", "demo", item, 2**60 + number)
        assert receipt
        receipt.took(WORKER, [run], [run], by_handoff=False)
        receipt.end([run], (5, 6, 7), None)
    return (time.process_time() - began) / ITEMS * 1e6


def digest_microseconds() -> float:
    """CPU time of a digest of 4 KiB: what the machine does meanwhile."""
    content, began = bytes(4096), time.process_time()
    for _ in range(10 * ITEMS):
        blake2b(content, digest_size=16).digest()
    return (time.process_time() - began) / ITEMS / 10 * 1e6


def figures(receipts: Receipts, rounds: int) -> dict[str, float]:
    found: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    digests = list[float]()
    for _ in range(rounds):
        for tokens, times in found.items():
            times.append(microseconds_an_item(receipts, tokens))
        digests.append(digest_microseconds())
    least = {tokens: min(times) for tokens, times in found.items()}
    many, most = TOKENS[-2:]
    return {
        **{f"us_per_item_of_{tokens}": round(least[tokens], 1) for tokens in TOKENS},
        "us_per_further_token": round((least[most] - least[many]) / (most - many), 3),
        "empty_items_in_digests_of_4_kib": round(least[0] / min(digests), 1),
    }


def main(*, rounds: int = 20) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        file, key = Path(folder) / "receipts.jsonl", Path(folder) / "key"
        key.write_text("sixteen bytes or more")
        receipts = Receipts(ReceiptSettings(file=file, key_file=key))
        return figures(receipts, rounds)


if __name__ == "__main__":
    run_bench(main)
