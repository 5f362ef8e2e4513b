"""Receipts: of each item, what was asked, who computed it and the digest of what came.

An item's tokens are a function of its request, its seed, the model and the adapter, so whoever has the request can make
them again: `trtmesh audit` does, and compares.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Self

import orjson
from pydantic import model_validator
from trtmesh.chassis.receipts import (
    Key,
    digest,
    of_sequence,
    prompt_digest,
    put_in_form,
    serialized,
)
from trtmesh.chassis.settings import Settings
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.fleet.worker_capabilities import WorkerCapabilities
from trtmesh.router.line_file import LineFile
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.request import ItemRequest, versioned_config
from trtmesh.v1 import receipt_pb2 as receipt_pb
from trtmesh.v1 import router_pb2 as router_pb

MOST_SPANS = 64
"""Most workers that a receipt names, the latest ones: an item may move again and again."""
MOST_REQUEST_BYTES = 2**23
"""Largest request that the file keeps. An item with tables of tens of MiB would stall running streams, and push all
other lines out of the queue."""


class ReceiptSettings(Settings):
    """Receipts of items, for `trtmesh audit`."""

    file: Path | None = None
    """File for a receipt per item that began, whether its client asks for one or not; unset writes none. Each router
    needs its own, as of `record.file`, and it is bounded likewise."""
    requests: bool = False
    """Whether the file has the request of each item too, with its prompt, and its tokens: `trtmesh audit` repeats only
    such an item by itself. Requests of more than 8 MiB are not kept."""
    key_file: Path | None = None
    """File with the secret by which receipts are signed, and `trtmesh audit` sees that nobody changed them: 16 bytes or
    more."""

    @model_validator(mode="after")
    def _requests_have_a_file(self) -> Self:
        if self.requests and self.file is None:
            raise ValueError("requests is set, but no file to write them to; set file")
        return self


RECEIPTS = "receipts"
"""The content of the file, in metrics."""


@dataclass(slots=True)
class Taker:
    """A worker that went on with some sequences of an item, or all."""

    worker: Worker
    capabilities: WorkerCapabilities
    """Those of then: a worker may come back as another."""
    from_tokens: Mapping[int, int]
    """Tokens that each of these sequences had."""
    all_tokens: Sequence[int]
    """Tokens that each sequence of the item had."""
    by_handoff: bool = False

    def tell(self, receipt: receipt_pb.Receipt) -> None:
        """Adds itself to the workers of a receipt."""
        able = self.capabilities
        computation = tuple(able.computation.items())
        model, settings = _digests(able.identity.model_fingerprint, computation)
        receipt.workers.add(
            worker=self.worker.name,
            from_tokens=self.all_tokens,
            model_digest=model,
            settings_digest=settings,
            exact=able.is_exact,
            by_handoff=self.by_handoff,
        )


@lru_cache(maxsize=1024)
def _digests(
    model_fingerprint: str, computation: tuple[tuple[str, str], ...]
) -> tuple[bytes, bytes]:
    """The digests of a worker's model and settings: equal for all of its items, so made once."""
    return digest(model_fingerprint.encode()), digest(repr(sorted(computation)).encode())


@lru_cache(maxsize=1024)
def _tokenizer_digest(fingerprint: str) -> bytes:
    return digest(fingerprint.encode())


class Receipts:
    def __init__(self, settings: ReceiptSettings) -> None:
        """Raises SettingsError for an unusable file."""
        self.file = None
        if settings.file is not None:
            # Prompts are nobody else's.
            mode = 0o600 if settings.requests else 0o666
            self.file = LineFile(settings.file, "router.receipts.file", RECEIPTS, mode=mode)
        self._keeps_requests = settings.requests
        self._key: Key | None = None
        if settings.key_file is not None:
            self._key = Key.read(settings.key_file, "router.receipts.key_file")
        self._release = version("trtmesh")

    def begin(
        self, request_id: str, model: str, item: ItemRequest, seed: int
    ) -> ItemReceipt | None:
        """The receipt of a new item, for the file or the client; None for a half of an item."""
        if item.is_context_only or item.state is not None:
            return None
        return ItemReceipt(self, request_id, model, item, seed)

    def signed(self, receipt: receipt_pb.Receipt) -> receipt_pb.SignedReceipt:
        receipt.release = self._release
        content, key = receipt.SerializeToString(), self._key
        if key is None:
            return receipt_pb.SignedReceipt(receipt=content)
        return receipt_pb.SignedReceipt(receipt=content, signature=key.sign(content), key_id=key.id)

    def repeated(
        self,
        receipt: receipt_pb.Receipt,
        worker: Worker,
        runs: Sequence[SequenceRun],
    ) -> receipt_pb.SignedReceipt:
        """The receipt of the same item on another worker, from its start; written like others, without the request."""
        again = receipt_pb.Receipt()
        again.CopyFrom(receipt)
        again.ended_unix_ms = int(time.time() * 1000)
        for field in ("workers", "sequences", "cached_prompt_tokens"):
            again.ClearField(field)
        Taker(worker, worker.capabilities, {}, [0] * len(runs)).tell(again)
        again.sequences.extend(of_sequence(run.token_ids, run.reason) for run in runs)
        signed = self.signed(again)
        if self.file:
            self.file.put(_line(signed))
        return signed

    def write(
        self,
        signed: receipt_pb.SignedReceipt,
        item: bytes,
        runs: Sequence[SequenceRun],
    ) -> None:
        """Puts the receipt into the file, if there is one; `item` is serialized."""
        if not self.file:
            return
        request: dict[str, object] = {}
        if self._keeps_requests and len(item) <= MOST_REQUEST_BYTES:
            request["item"] = b64encode(item).decode()
            request["token_ids"] = [run.token_ids for run in runs]
        self.file.put(_line(signed, **request))


def _line(signed: receipt_pb.SignedReceipt, **request: object) -> str:
    return orjson.dumps({"receipt": encoded(signed), **request}).decode()


def encoded(signed: receipt_pb.SignedReceipt) -> str:
    """A receipt as files and logs have it."""
    return b64encode(signed.SerializeToString()).decode()


class ItemReceipt:
    def __init__(
        self, receipts: Receipts, request_id: str, model: str, item: ItemRequest, seed: int
    ) -> None:
        self._receipts = receipts
        self._request_id, self._model = request_id, model
        self._item = item
        self._seed = seed
        self.content = receipt_pb.Receipt()
        """What it says, complete after `end`."""
        self.signed: receipt_pb.SignedReceipt | None = None
        """Set at the end."""
        self.prompt_tokens = 0
        self.takers: list[Taker] = []
        """Who made which tokens of each sequence, as `workers` of the receipt."""

    def took(
        self,
        worker: Worker,
        runs: Sequence[SequenceRun],
        taken: Sequence[SequenceRun],
        *,
        by_handoff: bool,
    ) -> None:
        """Notes a worker that goes on with the item: with the `taken` sequences of all `runs`."""
        if len(self.takers) == MOST_SPANS:
            del self.takers[0]
        begun = {run.sequence_index: len(run.token_ids) for run in taken}
        tokens = [len(run.token_ids) for run in runs]
        self.takers.append(Taker(worker, worker.capabilities, begun, tokens, by_handoff))

    def end(
        self, runs: Sequence[SequenceRun], prompt_ids: Sequence[int], adapter: Adapter | None
    ) -> receipt_pb.SignedReceipt | None:
        """Returns the receipt of an item that is over, and writes it, both once. None if no worker took the item."""
        if self.signed is not None or not self.takers:
            return self.signed
        item, sent = self._item, serialized(self._sent(adapter))
        self.prompt_tokens = len(prompt_ids)
        endings = [run.ending for run in runs if run.ending is not None]
        receipt = self.content = receipt_pb.Receipt(
            request_id=self._request_id,
            batch_index=item.batch_index,
            draw_index=item.batch_index if item.draw_index is None else item.draw_index,
            seed=self._seed,
            model=self._model,
            item_digest=digest(sent),
            prompt_digest=prompt_digest(prompt_ids),
            ended_unix_ms=int(time.time() * 1000),
            cached_prompt_tokens=max((e.cached_prompt_tokens for e in endings), default=0),
            tokenizer_digest=_tokenizer_digest(
                self.takers[-1].capabilities.identity.tokenizer_fingerprint
            ),
        )
        if adapter is not None:
            receipt.adapter_digest = digest(adapter.version.encode())
        if item.message.HasField("guided_decoding"):
            guide = item.message.guided_decoding
            receipt.guide_digest = digest(guide.SerializeToString(deterministic=True))
        for taker in self.takers:
            taker.tell(receipt)
        for run in runs:
            receipt.sequences.append(of_sequence(run.token_ids, run.reason))
        self.signed = self._receipts.signed(receipt)
        self._receipts.write(self.signed, sent, runs)
        return self.signed

    @property
    def is_asked(self) -> bool:
        """Whether the client asks for it."""
        return self._item.config.output.receipt

    def _sent(self, adapter: Adapter | None) -> router_pb.GenerateItem:
        """The item as a client may send it again: with its seed, and with the version of its adapter for weights."""
        item = self._item
        sent = router_pb.GenerateItem()
        sent.config.CopyFrom(
            item.message if adapter is None else versioned_config(item.message, adapter)
        )
        put_in_form(sent, self._seed)
        if item.chat is not None:
            sent.chat.CopyFrom(item.chat)
        elif item.prompt.text is not None:
            sent.prompt.text = item.prompt.text
        else:
            sent.prompt.token_ids.ids.extend(item.prompt.token_ids or ())
        if not item.prompt.add_special_tokens and item.chat is None:
            sent.prompt.add_special_tokens = False
        return sent
