"""Revisions of trtmesh.v1 between services: neighbours work together, others are refused when they connect.

docs/upgrading.md has the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import (  # type: ignore[import-not-found]  # the stubs lack it
    UnknownFieldSet,
)
from trtmesh.chassis.errors import NotUnderstood, SchemaMismatch

SCHEMA_REVISION = 1
"""Revision of trtmesh.v1. A release with a change that the previous release does not understand increments it once."""

FURTHEST = 1
"""Most revisions between two services."""


def check_revision(peer: str, revision: int, own: str) -> None:
    """Refuses a peer whose revision is no neighbour of ours. Raises SchemaMismatch."""
    if revision < 1:
        raise SchemaMismatch(
            f"{peer} names no schema revision, so it is of no release; replace it by one of revision"
            f" {SCHEMA_REVISION}"
        )
    if abs(revision - SCHEMA_REVISION) > FURTHEST:
        older = peer if revision < SCHEMA_REVISION else own
        between = max(revision, SCHEMA_REVISION) - FURTHEST
        raise SchemaMismatch(
            f"{peer} speaks schema revision {revision} and {own} {SCHEMA_REVISION}, but only neighbours work"
            f" together; upgrade {older} to a release of revision {between} first"
        )


def refuse_unknown(message: Message, path: str, who: str) -> None:
    """Refuses a message with fields unknown here, which would go unnoticed. Raises NotUnderstood.

    For messages of a later revision than SCHEMA_REVISION: an equal one is right without its unknown fields.
    """
    if (unknown := next(_unknown(message, path), None)) is not None:
        raise NotUnderstood(
            f"{who} does not understand {unknown}, of a later release; upgrade it, or send the item to another"
        )


def unknown_numbers(message: Message) -> list[int]:
    """The numbers of a message's own fields that this release does not know."""
    return [field.field_number for field in UnknownFieldSet(message)]


def _unknown(message: Message, path: str) -> Iterator[str]:
    for number in unknown_numbers(message):
        yield f"field {number} of {path}"
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in _parts(field, value):
                yield from _unknown(part, f"{path}.{field.name}")


def _parts(field: FieldDescriptor, value: Any) -> Iterable[Message]:
    if field.message_type.GetOptions().map_entry:
        held = field.message_type.fields_by_name["value"].message_type
        return value.values() if held is not None else ()
    return value if field.is_repeated else (value,)
