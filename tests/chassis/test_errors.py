"""The error tree and its table."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from trtmesh.chassis import error_wire, errors
from trtmesh.chassis.errors import ERROR_TABLE, ErrorRow, TrtmeshError
from trtmesh.v1 import generation_pb2 as pb

BY_REASON = pytest.mark.parametrize("row", ERROR_TABLE, ids=lambda row: row.reason)


def tree(root: type[TrtmeshError]) -> Iterator[type[TrtmeshError]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from tree(kind)


def test_every_class_has_one_row() -> None:
    assert sorted(row.error.__name__ for row in ERROR_TABLE) == sorted(
        kind.__name__ for kind in tree(TrtmeshError)
    )


def test_reasons_are_unique_words() -> None:
    reasons = [row.reason for row in ERROR_TABLE]
    assert len(set(reasons)) == len(reasons)
    assert all(reason == reason.upper() and len(reason) <= 63 for reason in reasons)


def start_failures() -> list[type[errors.StartupError]]:
    """Those of the tree; whoever else was imported may have its own."""
    kinds = errors.StartupError.__subclasses__()
    return [kind for kind in kinds if kind.__module__ == errors.__name__]


def test_every_class_is_in_the_documented_tree() -> None:
    documented = errors.__doc__ or ""
    for kind in (*tree(TrtmeshError), *start_failures()):
        assert kind.__name__ in documented
        assert kind.__doc__


@BY_REASON
def test_an_error_survives_the_wire(row: ErrorRow) -> None:
    error = row.error("what and where", worker="w", retry_after_ms=5)
    back = error_wire.from_proto(
        pb.Error.FromString(error_wire.to_proto(error).SerializeToString())
    )
    assert type(back) is row.error
    assert (back.message, back.worker, back.retry_after_ms) == ("what and where", "w", 5)
    assert error_wire.to_proto(error).code == row.status.value[0]


@BY_REASON
def test_an_error_survives_a_status(row: ErrorRow) -> None:
    assert type(error_wire.from_status(row.status, row.reason, "x")) is row.error


@BY_REASON
def test_a_status_without_reason_gives_the_most_general_error(row: ErrorRow) -> None:
    error = error_wire.from_status(row.status, None, "x")
    assert error.row.status is row.status
    assert issubclass(row.error, type(error))


def test_unknown_words_and_codes_give_the_root() -> None:
    assert type(error_wire.from_proto(pb.Error(reason="NEW", message="m"))) is TrtmeshError
    assert type(error_wire.from_status(grpc.StatusCode.DATA_LOSS, "NEW", "m")) is TrtmeshError


def test_retry_after_is_unset_by_default() -> None:
    assert not error_wire.to_proto(errors.QueueFull("x")).HasField("retry_after_ms")
    assert error_wire.from_proto(error_wire.to_proto(errors.QueueFull("x"))).retry_after_ms is None


def test_a_subclass_elsewhere_takes_the_row_of_its_base() -> None:
    class Local(errors.QueueFull):
        pass

    assert Local("x").reason == "QUEUE_FULL"


def test_field_errors_name_field_value_and_limit() -> None:
    error = errors.InvalidField.of("sampling.top_p", 3.0, "in [0, 1]")
    assert error.message == "sampling.top_p is 3.0 but must be in [0, 1]"


def test_start_failures_have_statuses_of_their_own() -> None:
    statuses = [kind.exit_status for kind in start_failures()]
    assert sorted(statuses) == [2, 3, 4]
