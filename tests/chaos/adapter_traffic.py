"""Random requests with and without adapters, and random changes of the adapters meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from chaos.adapter_history import History, Known, Span
from chaos.tiny_adapters import TinyAdapter, tiny_adapter
from e2e.mesh import Mesh, OrderCheck
from oracle import tiny_models
from trtmesh.chassis.adapter_content import number_of
from trtmesh.client import Accepted, GenerateItem, ItemResult, Prompt, TokenIds
from trtmesh.client.events import ItemFailed, ItemFinished, ItemStarted
from trtmesh.client.options import build_config
from trtmesh.client.results import Results
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

RANKS = (2, 16)
PROMPTS = tiny_models.prompts(4, seed=5)
"""Few, and the same for all adapters: an item with the KV of another adapter gets other tokens."""
CLIENTS = 24
"""Requests open at once."""
CHANGE_EVERY = 3
"""Requests between two changes of adapters."""
MOST_PINNED = 2
CANARY_SHARE = 0.5
SAMPLED = {"temperature": 0.9, "log_probs": True}


@dataclass(eq=False)
class Item:
    """One item of a request and its end."""

    known: Known | None
    """None for the base model."""
    config: pb.GenerationConfig
    prompt: list[int]
    brings: Span | None = None
    """The version that the item brings; no other will do."""
    is_cancelled: bool = False
    since: int = 0
    until: int = 0
    ended_before: int = 0
    """Items that had ended at its submission."""
    overtaken: int = 0
    """Items that ended between its submission and its end."""
    result: ItemResult = field(default_factory=lambda: ItemResult(0))
    told: set[str] = field(default_factory=set)
    """Versions in its placements."""

    @property
    def is_sampled(self) -> bool:
        return bool(self.config.output.log_probs)

    @property
    def spans(self) -> list[Span]:
        """The versions that the item may have used."""
        if self.known is None:
            return []
        if self.brings is not None:
            return [self.brings]
        spans = self.known.between(self.since, self.until)
        asked = self.config.lora.version
        if not asked:
            return spans
        # A version that is replaced meanwhile may be unknown.
        return [each if each.version == asked else Span(None, "", 0) for each in spans]

    @property
    def may_be_unknown(self) -> bool:
        """Whether ADAPTER_NOT_FOUND is right."""
        unregistered = self.known is not None and not self.known.is_registered
        return unregistered or any(each.adapter is None for each in self.spans)


class Traffic:
    """Adapters of all kinds under random requests; keeps every item for the checks."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh = mesh
        self.history = History()
        self.items: list[Item] = []
        self.changes: Counter[str] = Counter()
        self._seed = seed
        self._seeds = count(seed << 32)
        self._ended = 0
        self._bringing: set[Known] = set()
        self._changing: set[Known] = set()
        self._pinned: set[Known] = set()

    def new_adapter(self) -> TinyAdapter:
        seed = next(self._seeds)
        return tiny_adapter(seed, random.Random(seed).randint(*RANKS))

    def prefetched(self, name: str, adapter: TinyAdapter) -> None:
        """Workers have loaded an adapter from their directory."""
        known = self.history.know(Known(name, number_of(name), is_registered=False))
        self.history.begin(known, adapter, adapter.version)

    async def register(self, name: str, adapter: TinyAdapter, source: str = "") -> None:
        """An operator registers a new adapter, by upload or from a directory of the router."""
        known = self.history.know(Known(name, number_of(name)))
        if not source:
            await self._upload(known, adapter)
        else:
            self.history.begin(known, adapter, adapter.version)
            await self.mesh.admin.add_adapter(
                admin_pb.AddAdapterRequest(name=name, source=source, version=adapter.version)
            )
        self.history.end([known.spans[0]])

    def expect_brought(self, number: int) -> None:
        """Requests bring the weights of an adapter under this number."""
        self.history.know(Known(str(number), number, is_brought=True))

    async def run(self, requests: int) -> None:
        """Sends requests, with every adapter at least once, while adapters change."""
        draw = random.Random(self._seed)
        names = sorted(self.history.known)
        draw.shuffle(names)
        popular = [1 / (1 + rank) for rank in range(len(names))]
        asked = [*names, *draw.choices(names, popular, k=max(0, 2 * requests - len(names)))]
        draw.shuffle(asked)
        requested = enumerate(asked[at : at + 2] for at in range(0, len(asked), 2))
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(requested))

    async def _client(self, requested: Iterator[tuple[int, list[str]]]) -> None:
        for number, names in requested:
            # Of its own, so that the order of the clients changes no request.
            draw = random.Random(f"{self._seed} {number}")
            if number % CHANGE_EVERY == 0:
                await self._change(draw)
            items = [self._item(draw, self.history.known[name]) for name in names]
            if draw.random() < 0.3:
                items.append(self._item(draw, None))
            self.items += items
            cancelled = draw.random() < 0.05 and not any(item.brings for item in items)
            await self._send(items, draw.randint(1, 12) if cancelled else None)

    def _item(self, draw: random.Random, known: Known | None) -> Item:
        options: dict[str, Any] = {"max_tokens": draw.randint(4, 16), "ignore_end_id": True}
        match draw.choice(["greedy", "greedy", "several", "sampled", "samples", "long"]):
            case "several":
                options |= {"num_return_sequences": 2}
            case "sampled":
                options |= {**SAMPLED, "seed": draw.getrandbits(32)}
            case "samples":
                options |= {**SAMPLED, "seed": draw.getrandbits(32)}
                options |= {"num_return_sequences": draw.randint(2, 3)}
            case "long":
                options |= {"max_tokens": 48}
        item = Item(known, build_config(None, {**options, "text": False}), draw.choice(PROMPTS))
        if known is not None:
            self._name(draw, item, known)
        return item

    def _name(self, draw: random.Random, item: Item, known: Known) -> None:
        """Names the adapter in the item's config, or brings it."""
        form, lora = draw.random(), item.config.lora
        if known.is_brought:
            if known not in self._bringing and (known.current is None or form < 0.15):
                self._bring(item, known, again=draw.random() < 0.5)
            else:
                lora.id = known.number
            return
        if form < 0.6:
            lora.name = known.name
        else:
            lora.id = known.number
        if form > 0.8 and known.current:
            lora.version = known.current.version

    def _bring(self, item: Item, known: Known, *, again: bool) -> None:
        """Brings new weights, or the current ones again."""
        adapter = known.current.adapter if again and known.current else self.new_adapter()
        assert adapter is not None
        item.config.lora.CopyFrom(adapter.brought(known.number))
        item.brings = self.history.begin(known, adapter, adapter.arrays_version)
        self._bringing.add(known)

    async def _send(self, items: list[Item], most_tokens: int | None) -> None:
        """Sends a request and reads it, or cancels it after some tokens."""
        prompts = [
            GenerateItem(prompt=Prompt(token_ids=TokenIds(ids=item.prompt)), config=item.config)
            for item in items
        ]
        results, check, request_id, tokens = Results(len(items)), OrderCheck(), "", 0
        for item, result in zip(items, results.items, strict=True):
            item.since, item.ended_before, item.result = self.history.now(), self._ended, result
        async with aclosing(self.mesh.client.generate(prompts)) as events:
            async for event in events:
                check.see(event)
                results.add(event)
                match event:
                    case Accepted():
                        request_id = event.request_id
                        continue
                    case ItemStarted():
                        self._started(items[event.batch_index])
                    case ItemFinished() | ItemFailed():
                        self._finished(items[event.batch_index])
                tokens += 1
                if most_tokens is not None and tokens > most_tokens:
                    break
            else:
                check.finish(len(items))
        for item in items:
            if not item.overtaken:
                item.is_cancelled = True
                self._finished(item)
        await self._read_placements(request_id, items)

    def _started(self, item: Item) -> None:
        """The item has its version."""
        if item.until:
            return
        item.until = self.history.now()
        if item.known is not None and item.brings is not None:
            self._bringing.discard(item.known)
            older = [each for each in item.known.spans if each.until > item.until]
            self.history.end([each for each in older if each is not item.brings])

    def _finished(self, item: Item) -> None:
        self._started(item)
        self._ended += 1
        item.overtaken = self._ended - item.ended_before

    async def _read_placements(self, request_id: str, items: list[Item]) -> None:
        if not any(item.result.started for item in items):
            return
        for placement in (await self.mesh.admin.explain(request_id)).placements:
            items[placement.batch_index].told.add(placement.adapter_version)

    async def _change(self, draw: random.Random) -> None:
        """Changes a random adapter of operators."""
        changes: Mapping[str, Callable[[Known], Awaitable[bool]]] = {
            "replace": self._replace,
            "canary": self._canary,
            "promote": self._promote,
            "drop canary": self._drop_canary,
            "remove": self._remove,
            "add again": self._add_again,
            "pin": self._pin,
            "unpin": self._unpin,
        }
        named = [e for e in self.history.known.values() if e.is_registered and not e.is_brought]
        order = draw.sample(sorted(changes), len(changes))
        for name in order:
            for known in draw.sample(named, len(named)):
                if known not in self._changing and await self._try(changes[name], known):
                    self.changes[name] += 1
                    return

    async def _try(self, change: Callable[[Known], Awaitable[bool]], known: Known) -> bool:
        """Makes a change if it applies, alone on the adapter."""
        self._changing.add(known)
        try:
            return await change(known)
        finally:
            self._changing.discard(known)

    async def _replace(self, known: Known) -> bool:
        current = known.current
        if current is None:
            return False
        await self._upload(known, self.new_adapter())
        self.history.end([current])
        return True

    async def _add_again(self, known: Known) -> bool:
        if known.in_force:
            return False
        absence = known.spans[-1]
        await self._upload(known, self.new_adapter())
        self.history.end([absence])
        return True

    async def _canary(self, known: Known) -> bool:
        if known.current is None or known.canary is not None:
            return False
        await self._upload(known, self.new_adapter(), CANARY_SHARE)
        return True

    async def _promote(self, known: Known) -> bool:
        canary, current = known.canary, known.current
        if canary is None or current is None or canary.adapter is None:
            return False
        canary.share = 1.0
        await self._send_content(known, canary.adapter, None)
        self.history.end([current])
        return True

    async def _drop_canary(self, known: Known) -> bool:
        canary = known.canary
        if canary is None:
            return False
        await self.mesh.admin.remove_adapter(known.number, canary.version)
        self.history.end([canary])
        return True

    async def _remove(self, known: Known) -> bool:
        if known.current is None:
            return False
        ending = self.history.forget(known)
        await self.mesh.admin.remove_adapter(known.number)
        self._pinned.discard(known)
        self.history.end(ending)
        return True

    async def _pin(self, known: Known) -> bool:
        if known.current is None or len(self._pinned) >= MOST_PINNED:
            return False
        self._pinned.add(known)
        await self.mesh.admin.pin_adapter(known.number)
        return True

    async def _unpin(self, known: Known) -> bool:
        if known not in self._pinned:
            return False
        await self.mesh.admin.pin_adapter(known.number, pinned=False)
        self._pinned.discard(known)
        return True

    async def _upload(self, known: Known, adapter: TinyAdapter, share: float | None = None) -> None:
        self.history.begin(known, adapter, adapter.version, share or 1.0)
        await self._send_content(known, adapter, share)

    async def _send_content(self, known: Known, adapter: TinyAdapter, share: float | None) -> None:
        asked = admin_pb.AddAdapterRequest(
            name=known.name,
            version=adapter.version,
            canary_share=share,
            pinned=known in self._pinned,
        )
        await self.mesh.admin.upload_adapter(asked, adapter.content)
