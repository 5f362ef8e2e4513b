"""Reads the receipts of a router's file, and checks who signed them."""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from google.protobuf.message import DecodeError
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.receipts import Key, ids_digest
from trtmesh.v1 import receipt_pb2 as receipt_pb
from trtmesh.v1 import router_pb2 as router_pb

MOST_LINE_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class FiledReceipt:
    """A line of a file of receipts."""

    place: str
    """File and line, for messages."""
    receipt: receipt_pb.Receipt
    item: router_pb.GenerateItem | None
    """What the client sent, where the router kept it."""
    token_ids: Sequence[Sequence[int]] | None = None
    """By sequence_index, where the router kept them."""
    forgery: str = ""
    """Why the signature does not vouch for the receipt, or ''."""


def read_receipts(file: Path, key: Key | None) -> Iterator[FiledReceipt]:
    """Opens a file, and reads it line by line up to its present end: it may be that of the audited router, which writes
    receipts of repeated items too. Half a line at the end is no receipt. Raises InvalidField, naming the line, and
    OSError."""
    lines = file.open("rb")
    facts = os.fstat(lines.fileno())
    return _read_until(facts.st_size if S_ISREG(facts.st_mode) else 2**63, lines, file, key)


def _read_until(end: int, lines: BinaryIO, file: Path, key: Key | None) -> Iterator[FiledReceipt]:
    with lines:
        for number in range(1, 2**63):
            line = lines.readline(min(end, MOST_LINE_BYTES))
            if not line:
                return
            end -= len(line)
            try:
                filed = _read(f"{file}:{number}", line, key)
            except InvalidField:
                if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                    return
                raise
            yield filed


def _read(place: str, line: bytes, key: Key | None) -> FiledReceipt:
    try:
        told = json.loads(line)
        signed = receipt_pb.SignedReceipt.FromString(b64decode(told["receipt"], validate=True))
        receipt = receipt_pb.Receipt.FromString(signed.receipt)
        item = None
        if "item" in told:
            item = router_pb.GenerateItem.FromString(b64decode(told["item"], validate=True))
        token_ids = told.get("token_ids")
        if token_ids is not None and not _are_those_of(token_ids, receipt):
            raise ValueError
    except (ValueError, KeyError, TypeError, OverflowError, DecodeError, RecursionError) as error:
        reason = f"is no receipt ({type(error).__name__}); name a file of router.receipts.file"
        raise InvalidField(reason, field=place) from None
    return FiledReceipt(place, receipt, item, token_ids, _forgery(signed, key))


def _are_those_of(token_ids: list[list[int]], receipt: receipt_pb.Receipt) -> bool:
    return [*map(ids_digest, token_ids)] == [each.ids_digest for each in receipt.sequences]


def _forgery(signed: receipt_pb.SignedReceipt, key: Key | None) -> str:
    if key is None:
        return ""
    if not signed.signature:
        return "nobody signed it"
    if signed.key_id != key.id:
        return f"another key signed it, {signed.key_id.hex()}, not {key.id.hex()}"
    return "" if key.signed(signed) else "it is not as it was signed"
