"""The mesh's own API, by its SDK: batches, token ids, offsets, and several routers that continue each other's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.client import Client, GenerateItem, ItemFailed, ItemFinished, ItemStarted, Tokens
from trtmesh.client.options import build_config, build_items
from trtmesh.tools.bench.reception import Reception
from trtmesh.tools.bench.record import Plan, Prompt
from trtmesh.tools.bench.targets.target import Connecting


@dataclass(frozen=True, slots=True)
class NativeTarget:
    """A router of a mesh, or several."""

    client: Client
    model: str
    release: str = ""

    async def answer(self, plan: Plan, reception: Reception) -> None:
        items = [_item(prompt) for prompt in plan.prompts]
        reception.sent()
        events = self.client.generate(items, request_id=reception.request_id, model=self.model)
        async with aclosing(events):
            async for event in events:
                at = event.batch_index
                match event:
                    case Tokens():
                        reception.chunk(
                            at,
                            event.text,
                            ids=event.token_ids,
                            offset=event.token_offset,
                            sequence_index=event.sequence_index,
                        )
                    case ItemStarted():
                        reception.placed(at, event.worker, event.prompt_tokens)
                    case ItemFinished():
                        used = event.usage
                        reception.usage(at, used.prompt_tokens, used.generated_tokens)
                        reception.finish(at, event.reason)
                    case ItemFailed():
                        reception.fail(at, event.error)
                    case _:
                        pass


@asynccontextmanager
async def native_target(connecting: Connecting) -> AsyncIterator[NativeTarget]:
    key, tls = connecting.api_key, connecting.tls
    async with Client(connecting.url.addresses, api_key=key, tls=tls) as client:
        yield NativeTarget(client, connecting.model)


def _item(prompt: Prompt) -> GenerateItem:
    (item,) = build_items([prompt.ids or prompt.whole_text])
    try:
        item.config.CopyFrom(build_config(None, _options(prompt)))
    except TypeError as error:
        raise InvalidRequest(str(error)) from error
    return item


def _options(prompt: Prompt) -> Mapping[str, Any]:
    options: dict[str, Any] = {"max_tokens": prompt.max_tokens}
    if prompt.ignore_end_id:
        options["ignore_end_id"] = True
    if prompt.seed is not None:
        options["seed"] = prompt.seed
    if prompt.adapter:
        options["adapter"] = int(prompt.adapter) if prompt.adapter.isdecimal() else prompt.adapter
    if prompt.json_schema is not None:
        options["guided_decoding"] = json.loads(prompt.json_schema)
    return options
