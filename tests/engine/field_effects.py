"""How the tests of a backend see each supported field change the result of an item, and every other field refused.

A backend has a table of cases by field; a supported field without an entry fails its test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.backend_lab import Lab, config_of, lab
from engine.config_fields import LEAVES, config_with
from engine_streams import router_stream, serving, submit
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import AdapterNotFound, TrtmeshError
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import AdapterLoad, Backend
from trtmesh.v1 import generation_pb2 as pb

PROMPT = [9, 40, 41, 42, 9, 43, 44, 45, 46]
BLOCK = 4

Options = dict[str, Any]
See = Callable[[Lab, Options], Awaitable[object]]


async def everything(on: Lab, options: Options) -> object:
    """All deliveries for one item."""
    return [outcome.summary() for outcome in await on.run(PROMPT, config_of(options))]


async def reused(on: Lab, options: Options) -> object:
    """Reused prompt tokens, after the same prompt ran without the field."""
    await on.run(PROMPT, config_of({"max_tokens": 1}))
    (outcome,) = await on.run(PROMPT, config_of(options))
    assert outcome.end is not None
    return outcome.end.cached_prompt_tokens


async def survives(on: Lab, options: Options) -> object:
    """Cached tokens of an item after other items needed the room."""
    (outcome,) = await on.run(PROMPT, config_of(options))
    # Durations of these tests are shorter.
    await asyncio.sleep(0.01)
    for number in range(6):
        await on.run([100 + number] * 20, config_of({"max_tokens": 1}))
    again = [*PROMPT, *outcome.token_ids]
    (outcome,) = await on.run(again, config_of({"max_tokens": 1}))
    assert outcome.end is not None
    return outcome.end.cached_prompt_tokens


async def order(on: Lab, options: Options) -> object:
    """The order in which items end, computed one at a time."""
    with on.gate.held():
        keys = on.submit(PROMPT, config_of({"max_tokens": 4, "ignore_end_id": True}))
        keys += on.submit(PROMPT, config_of({"max_tokens": 2}))
        keys += on.submit(PROMPT, config_of(options))
    await on.ended(keys)
    return on.order


async def accepted(on: Lab, options: Options) -> object:
    """The result of an id beyond the vocabulary."""
    try:
        outcomes = await on.run([*PROMPT, 321], config_of(options))
    except TrtmeshError as error:
        return error.reason
    return [outcome.token_ids for outcome in outcomes]


def adapted(contents: Sequence[AdapterContent]) -> See:
    """The result of an item, or the problem of its refusal, with three adapters in memory."""
    identities = [Adapter(7, "", "a"), Adapter(8, "", "a"), Adapter(7, "", "b")]

    async def see(on: Lab, options: Options) -> object:
        loads = zip(identities, contents, strict=True)
        await on.load([AdapterLoad(identity, content) for identity, content in loads])
        try:
            return await everything(on, options)
        except AdapterNotFound as error:
            return error.problem

    return see


@dataclass(frozen=True)
class Case:
    """The config without and with a field, the effect to observe, and the backend."""

    before: Options
    added: Options
    see: See = everything
    settings: Mapping[str, Any] = field(default_factory=dict)


ONE_AT_A_TIME = {"max_batch_size": 1}
ONE = {"max_tokens": 1}
NEW = {"max_tokens": 12, "ignore_end_id": True}
DRAWN = {**NEW, "temperature": 3.0, "seed": 5}


def cache(base: pb.KvCacheConfig | None = None, **values: Any) -> Options:
    config = pb.KvCacheConfig(**values)
    config.MergeFrom(base or pb.KvCacheConfig())
    return {"kv_cache": config}


def adapter(**values: Any) -> Options:
    return {"adapter": pb.LoraConfig(**values)}


def adapter_cases(new: Options, see: See, settings: Mapping[str, Any]) -> dict[str, Case]:
    """Tokens depend on number and version; the name is for people, who read it in a refusal."""
    known = {**new, **adapter(id=7, version="a")}
    unknown = {**new, **adapter(id=9, version="a")}
    return {
        "lora.id": Case(known, adapter(id=8, version="a"), see, settings),
        "lora.version": Case(known, adapter(id=7, version="b"), see, settings),
        "lora.name": Case(unknown, adapter(id=9, version="a", name="prose"), see, settings),
    }


def with_and_without(path: str, case: Case) -> tuple[Options, Options]:
    """The case's options without the field, and with it."""
    after = {**case.before, **case.added}
    fields = [config_of(options).fields_set for options in (case.before, after)]
    assert path in fields[1]
    assert fields[0] ^ fields[1] <= {path}, "more than the field differs"
    return case.before, after


async def check(path: str, case: Case, start: Callable[..., Backend]) -> None:
    seen = []
    for options in with_and_without(path, case):
        async with lab(start(**case.settings)) as on:
            seen.append(await case.see(on, options))
    assert seen[0] != seen[1], f"{path} changes nothing"


async def refuses(backend: Backend, supported: frozenset[str]) -> None:
    """The service refuses every unsupported field by name."""
    # The service itself takes the phase of a handoff.
    unknown = [path for path in LEAVES if path not in supported | {"handoff.phase"}]
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        handle = 0
        for path in unknown:
            config, _ = config_with(path)
            sequences = max(1, config.sampling.num_return_sequences, config.beam_search.beam_width)
            await stream.send(submit(handle, None, config=config))
            handles = range(handle, handle + sequences)
            for received in (await stream.ends(handles)).values():
                assert received.end is not None
                assert received.end.error.reason == "UNSUPPORTED_FIELD", path
                assert path in received.end.error.message
            handle += sequences
