"""Digests, marks and signatures of receipts: routers write them, and `trtmesh audit` checks them."""

from __future__ import annotations

import hmac
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256
from pathlib import Path

from trtmesh.chassis.errors import SettingsError
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2 as receipt_pb
from trtmesh.v1 import router_pb2 as router_pb

DIGEST_BYTES = 16
MOST_MARKS = 48
"""Marks of a sequence, a byte each: a signed receipt of a sequence then has some 300 bytes."""
LEAST_KEY_BYTES, MOST_KEY_BYTES = 16, 4096
MODULUS = 251
"""Of marks: two ids have the same in one case of 251."""


def digest(content: bytes) -> bytes:
    """Names a content; nothing has an empty digest."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest() if content else b""


def put_in_form(item: router_pb.GenerateItem, seed: int) -> None:
    """Gives an item the form in which receipts know it: with its seed, and without what says nothing."""
    config = item.config
    config.sampling.seed = seed
    if config.HasField("output"):
        config.output.ClearField("receipt")
        if not config.output.ByteSize():
            config.ClearField("output")
    if item.prompt.add_special_tokens:
        item.prompt.ClearField("add_special_tokens")


def serialized(item: router_pb.GenerateItem) -> bytes:
    """The bytes of an item in its form, of which receipts have the digest."""
    return item.SerializeToString(deterministic=True)


def of_sequence(
    token_ids: Sequence[int], reason: pb.FinishReason.ValueType
) -> receipt_pb.SequenceReceipt:
    every = max(1, -(-len(token_ids) // MOST_MARKS))
    return receipt_pb.SequenceReceipt(
        tokens=len(token_ids),
        reason=reason,
        ids_digest=ids_digest(token_ids),
        marks=marks(token_ids, every),
        tokens_per_mark=every,
    )


def marks(token_ids: Sequence[int], every: int) -> bytes:
    """A byte for each `every` ids: their sum, modulo a prime. A rest has none."""
    if every == 1:
        return bytes([token % MODULUS for token in token_ids])
    # Groups of so many ids, made without a slice for each.
    groups = zip(*[iter(token_ids)] * every, strict=False)
    return bytes([total % MODULUS for total in map(sum, groups)])


def ids_digest(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return digest(ids.tobytes())


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Tells prompts of one item apart, no more."""
    return ids_digest(token_ids)[:8]


def first_difference(kept: receipt_pb.SequenceReceipt, token_ids: Sequence[int]) -> range | None:
    """The offsets, as many as lie between two marks, of which one has the first token that differs from those of a
    receipt; None if all are equal."""
    every = max(1, kept.tokens_per_mark)
    if ids_digest(token_ids) == kept.ids_digest:
        return None
    found = marks(token_ids, every)
    for number, (mark, other) in enumerate(zip(kept.marks, found, strict=False)):
        if mark != other:
            return range(number * every, (number + 1) * every)
    shared = min(len(found), len(kept.marks)) * every
    return range(shared, max(shared + 1, min(shared + every, max(kept.tokens, len(token_ids)))))


class Key:
    """Signs receipts, and recognises its own."""

    def __init__(self, content: bytes) -> None:
        # Keyed once: to look the algorithm up by its name takes as long as to sign.
        self._signing = hmac.new(content, digestmod="sha256")
        self.id = sha256(content).digest()[:4]

    @classmethod
    def read(cls, file: Path, setting: str) -> Key:
        """Reads a key without the white space around it. Raises SettingsError."""
        try:
            with file.open("rb") as stream:
                content = stream.read(MOST_KEY_BYTES + 1).strip()
        except OSError as error:
            raise SettingsError(
                f"is {str(file)!r}, which cannot be read: {error.strerror}", setting=setting
            ) from error
        if not LEAST_KEY_BYTES <= len(content) <= MOST_KEY_BYTES:
            raise SettingsError(
                f"names a key of {len(content)} bytes but must name one of {LEAST_KEY_BYTES} to {MOST_KEY_BYTES}",
                setting=setting,
            )
        return cls(content)

    def sign(self, receipt: bytes) -> bytes:
        signing = self._signing.copy()
        signing.update(receipt)
        return signing.digest()

    def signed(self, signed: receipt_pb.SignedReceipt) -> bool:
        """Whether this key signed the receipt as it is."""
        return hmac.compare_digest(self.sign(signed.receipt), signed.signature)
