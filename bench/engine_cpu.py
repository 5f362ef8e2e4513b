"""Compares the torch engine on a CPU with its peers in one run: decoding, prefix reuse, overhead.

Prints `ratios` by peer, model and batch: tokens a second of trtmesh through its Backend over the peer's, for the same
prompts and token counts, counting only steps in which every sequence decodes; the median of repetitions in which all
engines take turns. Peers are transformers' `generate` with a static batch
(`generate`; `generate_1024` at prompts of 1,024 tokens), transformers' continuous batching (`continuous`) and
llama.cpp (`llama_cpp`, where llama_cpp and gguf can be imported: the extra `bench-peers`). In float32 the tokens of
trtmesh must equal those of `generate`, or the run fails. The part `invariant` compares `batch_invariant` on and off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _engines import Prompts, Remote
from _models import SHAPES, build, llama_cpp_is_there, write_gguf
from _options import tell
from _turns import Values, in_turn

PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 1024
PARTS = ("decode", "long", "prefix", "overhead", "invariant")
PEERS = ("generate", "continuous", "llama_cpp")

Figures = dict[str, Any]


def prompts(count: int, tokens: int, vocabulary_size: int, seed: int = 1) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocabulary_size, (count, tokens), generator=generator).tolist()


class Bench:
    """The selected parts, their results so far, and their models."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self._folder = folder
        self.ratios: dict[str, dict[str, dict[str, float]]] = {}
        self.rates: dict[str, dict[str, dict[str, float]]] = {}
        self.others: Figures = {}
        self._remotes: dict[str, Remote] = {}

    def model_dir(self, model: str) -> Path:
        directory = self._folder / model
        return directory if directory.exists() else build(directory, model)

    def gguf(self, model: str, dtype: str) -> Path:
        file = self._folder / f"{model}-{dtype}.gguf"
        return file if file.exists() else write_gguf(file, self.model_dir(model), dtype)

    def remote(self, name: str, kind: str, *arguments: Any, **named: Any) -> Remote:
        """The process `name` with an engine of the class `kind` loaded."""
        if name not in self._remotes:
            self._remotes[name] = Remote()
        self._remotes[name].open(kind, *arguments, **named)
        return self._remotes[name]

    def trtmesh(
        self,
        model: str,
        dtype: str,
        batch: int,
        tokens: int,
        *,
        prefix_reuse: bool = False,
        **settings: Any,
    ) -> Remote:
        return self.remote(
            "trtmesh", "Trtmesh", self.model_dir(model), dtype, self.arguments.threads,
            kv_cache={"prefix_reuse": prefix_reuse, "tokens": batch * (tokens + 16)}, **settings,
        )  # fmt: skip

    def end(self) -> None:
        for remote in self._remotes.values():
            remote.end()

    def decode(self, model: str, dtype: str, batch: int) -> None:
        """One cell of the table at prompts of 64 tokens."""
        folder, threads, peers = self.model_dir(model), self.arguments.threads, self.arguments.peers
        tokens = PROMPT_TOKENS + self.arguments.tokens
        engines = {"trtmesh": self.trtmesh(model, dtype, batch, tokens)}
        for name, kind in (("generate", "Generate"), ("continuous", "ContinuousBatching")):
            if name in peers:
                engines[name] = self.remote(name, kind, folder, dtype, threads)
        if "llama_cpp" in peers:
            file = self.gguf(model, dtype)
            engines["llama_cpp"] = self.remote(
                "llama_cpp", "LlamaCpp", file, threads, batch, tokens
            )
        self._compare(engines, model, dtype, batch, PROMPT_TOKENS)

    def long(self, model: str, dtype: str, batch: int) -> None:
        """One cell at prompts of 1,024 tokens, against the static batch alone."""
        folder, threads = self.model_dir(model), self.arguments.threads
        tokens = LONG_PROMPT_TOKENS + self.arguments.tokens
        # Large steps start the last sequence before the first has ended.
        batching = {"max_step_tokens": 4 * LONG_PROMPT_TOKENS}
        engines = {
            "trtmesh_1024": self.trtmesh(model, dtype, batch, tokens, batching=batching),
            "generate_1024": self.remote("generate", "Generate", folder, dtype, threads),
        }
        self._compare(engines, model, dtype, batch, LONG_PROMPT_TOKENS)

    def prefix(self, model: str, dtype: str) -> None:
        """Time to the first token with the first 1,024 tokens of the prompt cached, over the cold time."""
        size = SHAPES[model]["vocab_size"]
        engine = self.trtmesh(model, dtype, 8, 2 * LONG_PROMPT_TOKENS, prefix_reuse=True)
        engine.decode(prompts(1, PROMPT_TOKENS, size), 4)
        shares = []
        for run in range(self.arguments.runs):
            (prefix,) = prompts(1, LONG_PROMPT_TOKENS, size, seed=run + 2)
            tails = prompts(2, 16, size, seed=run + 100)
            cold, warm = (engine.decode([prefix + tail], 1).first_token_seconds for tail in tails)
            shares.append(warm / cold)
        engine.close()
        found = self.others.setdefault("prefix_ttft_warm_over_cold", {})
        found[f"{model} {dtype}"] = round(statistics.median(shares), 3)

    def overhead(self, model: str, dtype: str, batch: int) -> None:
        """Share of a decoding step outside the model's forward: scheduling, building the batch, choosing tokens."""
        count = self.arguments.tokens
        given = prompts(batch, PROMPT_TOKENS, SHAPES[model]["vocab_size"])
        engine = self.trtmesh(model, dtype, batch, PROMPT_TOKENS + count)
        engine.decode(given, 4)
        share = engine.call("overhead", given, count)
        engine.close()
        found = self.others.setdefault("overhead_share", {}).setdefault(f"{model} {dtype}", {})
        found[str(batch)] = round(share, 4)

    def invariant(self, model: str, dtype: str, batch: int) -> None:
        """Decoding with `batch_invariant` against decoding without it."""
        tokens = PROMPT_TOKENS + self.arguments.tokens
        engines = {
            "batch_invariant": self.remote(
                "batch_invariant", "Trtmesh", self.model_dir(model), dtype, self.arguments.threads,
                kv_cache={"prefix_reuse": False, "tokens": batch * (tokens + 16)},
                batch_invariant=True,
            ),
            "trtmesh": self.trtmesh(model, dtype, batch, tokens),
        }  # fmt: skip
        self._compare(engines, model, dtype, batch, PROMPT_TOKENS)

    def _compare(
        self, engines: dict[str, Remote], model: str, dtype: str, batch: int, prompt_tokens: int
    ) -> None:
        """Lets the engines decode in turn, ours first, after an uncounted warm-up round."""
        given = prompts(batch, prompt_tokens, SHAPES[model]["vocab_size"])
        own, key, tokens = next(iter(engines)), f"{model} {dtype}", dict[str, list[list[int]]]()

        def turn(name: str) -> Values:
            decoded = engines[name].decode(given, self.arguments.tokens)
            tokens[name] = decoded.tokens
            return {"rate": decoded.steady_rate}

        turns = {name: partial(turn, name) for name in engines}
        found = asyncio.run(in_turn(turns, self.arguments.runs))
        static = tokens.get("generate") or tokens.get("generate_1024")
        if static and dtype == "float32" and tokens[own] != static:
            raise SystemExit(f"{key}, batch {batch}: the tokens are not those of generate")
        for name, engine in engines.items():
            engine.close()
            rates = self.rates.setdefault(name, {}).setdefault(key, {})
            rates[str(batch)] = found[name].medians(3)["rate"]
            if name != own:
                ratio = found[own].over(found[name])["rate"]
                self.ratios.setdefault(name, {}).setdefault(key, {})[str(batch)] = ratio
                tell(f"{key} batch {batch} over {name}", ratio)


def run(bench: Bench) -> None:
    arguments = bench.arguments
    for model in arguments.models:
        for dtype in arguments.dtypes:
            if "decode" in arguments.parts:
                for batch in arguments.batches:
                    bench.decode(model, dtype, batch)
            if "long" in arguments.parts:
                bench.long(model, dtype, 32)
            if "prefix" in arguments.parts:
                bench.prefix(model, dtype)
            if "overhead" in arguments.parts:
                bench.overhead(model, dtype, 32)
            if "invariant" in arguments.parts:
                for batch in arguments.batches:
                    bench.invariant(model, dtype, batch)


def main(arguments: argparse.Namespace) -> None:
    if "llama_cpp" in arguments.peers and not llama_cpp_is_there():
        print("llama.cpp is left out: llama_cpp or gguf cannot be imported (extra `bench-peers`)",
              file=sys.stderr)  # fmt: skip
        arguments.peers = [peer for peer in arguments.peers if peer != "llama_cpp"]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, arguments.folder or Path(folder))
        try:
            run(bench)
        finally:
            bench.end()
    print(
        json.dumps(
            {
                "ratios": bench.ratios,
                "tokens_per_second": bench.rates,
                **bench.others,
                "threads": arguments.threads,
                "torch": torch.__version__,
            }
        )
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["10M", "100M"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each sequence")
    parser.add_argument("--runs", type=int, default=3, help="counted repetitions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keeps the models for other runs")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
