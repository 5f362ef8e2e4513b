"""Receipts: of each item, what was asked, who computed it and the digest of what came.

An item's tokens are a function of its request, its seed, the model and the adapter, so whoever has the request can make
them again: `trtmesh audit` does, and compares.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
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
from trtmesh.router.line_file import LineFile
from trtmesh.router.placement import Capability
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


class Receipts:
    """Makes the receipts of this router."""

    def __init__(self, settings: ReceiptSettings) -> None:
        """Raises SettingsError for an unusable file."""
        self.file = None
        if settings.file is not None:
            self.file = LineFile(settings.file, "router.receipts.file", "receipts")
        self._keeps_requests = settings.requests
        self._key = settings.key_file and Key.read(settings.key_file, "router.receipts.key_file")
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
        content = receipt.SerializeToString()
        signed = receipt_pb.SignedReceipt(receipt=content)
        if self._key:
            signed.signature, signed.key_id = self._key.sign(content), self._key.id
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
        line: dict[str, object] = {"receipt": b64encode(signed.SerializeToString()).decode()}
        if self._keeps_requests and len(item) <= MOST_REQUEST_BYTES:
            line["item"] = b64encode(item).decode()
            line["token_ids"] = [run.token_ids for run in runs]
        self.file.put(orjson.dumps(line).decode())


class ItemReceipt:
    """The receipt of a live item."""

    def __init__(
        self, receipts: Receipts, request_id: str, model: str, item: ItemRequest, seed: int
    ) -> None:
        self._receipts = receipts
        self._item = item
        draws = item.batch_index if item.draw_index is None else item.draw_index
        self._receipt = receipt_pb.Receipt(
            request_id=request_id,
            batch_index=item.batch_index,
            draw_index=draws,
            seed=seed,
            model=model,
        )
        self._signed: receipt_pb.SignedReceipt | None = None

    def took(self, worker: Worker, runs: Sequence[SequenceRun]) -> None:
        """Notes a worker that goes on with the item."""
        capabilities = worker.capabilities
        identity = capabilities.identity
        spans = self._receipt.workers
        if len(spans) == MOST_SPANS:
            del spans[0]
        spans.add(
            worker=worker.name,
            from_tokens=[len(run.token_ids) for run in runs],
            model_digest=digest(identity.model_fingerprint.encode()),
            settings_digest=digest(capabilities.settings_fingerprint.encode()),
            exact=Capability.EXACT_RESUMPTION in capabilities.optional,
        )
        self._receipt.tokenizer_digest = digest(identity.tokenizer_fingerprint.encode())

    def end(
        self, runs: Sequence[SequenceRun], prompt_ids: Sequence[int], adapter: Adapter | None
    ) -> receipt_pb.SignedReceipt | None:
        """Returns the receipt of an item that is over, and writes it, both once. None if no worker took the item."""
        receipt = self._receipt
        if self._signed is not None or not receipt.workers:
            return self._signed
        item = serialized(self._sent(adapter))
        receipt.item_digest, receipt.prompt_digest = digest(item), prompt_digest(prompt_ids)
        receipt.ended_unix_ms = int(time.time() * 1000)
        if adapter is not None:
            receipt.adapter_digest = digest(adapter.version.encode())
        if self._item.message.HasField("guided_decoding"):
            guide = self._item.message.guided_decoding
            receipt.guide_digest = digest(guide.SerializeToString(deterministic=True))
        receipt.sequences.extend(of_sequence(run.token_ids, run.reason) for run in runs)
        self._signed = self._receipts.signed(receipt)
        self._receipts.write(self._signed, item, runs)
        return self._signed

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
        put_in_form(sent, self._receipt.seed)
        if item.chat is not None:
            sent.chat.CopyFrom(item.chat)
        elif item.prompt.text is not None:
            sent.prompt.text = item.prompt.text
        else:
            sent.prompt.token_ids.ids.extend(item.prompt.token_ids or ())
        if not item.prompt.add_special_tokens and item.chat is None:
            sent.prompt.add_special_tokens = False
        return sent
