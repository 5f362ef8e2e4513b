"""The error tree and its table."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from trtmesh.chassis import error_wire, errors
from trtmesh.chassis.errors import ERROR_TABLE, MAX_FIELDS, ErrorRow, TrtmeshError
from trtmesh.chassis.quoting import MAX_QUOTED_CHARACTERS
from trtmesh.v1 import generation_pb2 as pb

BY_REASON = pytest.mark.parametrize("row", ERROR_TABLE, ids=lambda row: row.reason)


def tree(root: type[TrtmeshError]) -> Iterator[type[TrtmeshError]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from tree(kind)


def test_table_has_one_row_per_class() -> None:
    assert sorted(row.error.__name__ for row in ERROR_TABLE) == sorted(
        kind.__name__ for kind in tree(TrtmeshError)
    )


def test_a_told_error_forgets_all_its_frames() -> None:
    """Those of its causes, too, also where they are suppressed or the chain is a ring."""
    known = list[Exception]()

    def fail(depth: int) -> None:
        try:
            fail(depth - 1) if depth else int("x")
        except (ValueError, errors.InvalidField) as error:
            known.append(error)
            raise errors.InvalidField from (error if depth % 2 else None)

    with pytest.raises(errors.InvalidField) as told:
        fail(4)
    known.append(told.value)
    known[0].__cause__ = told.value
    assert all(each.__traceback__ for each in known)
    errors.forget_frames(told.value)
    assert not any(each.__traceback__ for each in known)
    assert len(known) == 6


def test_reasons_are_unique() -> None:
    reasons = [row.reason for row in ERROR_TABLE]
    assert len(set(reasons)) == len(reasons)
    assert all(reason == reason.upper() and len(reason) <= 63 for reason in reasons)


def start_failures() -> list[type[errors.StartupError]]:
    """Classes of this module; other modules may add theirs."""
    kinds = errors.StartupError.__subclasses__()
    return [kind for kind in kinds if kind.__module__ == errors.__name__]


def test_every_class_is_documented() -> None:
    for kind in (*tree(TrtmeshError), *start_failures()):
        assert kind.__dict__["__doc__"]


@BY_REASON
def test_message_keeps_the_error(row: ErrorRow) -> None:
    error = row.error(
        fields=("sampling.top_p", "sampling.top_k"),
        value="3",
        limit="at most 2",
        limit_field="beam_search.beam_width",
        batch_index=4,
        worker="w",
        retry_after_ms=5,
    )
    back = error_wire.from_proto(
        pb.Error.FromString(error_wire.to_proto(error).SerializeToString())
    )
    assert type(back) is row.error
    assert vars(back) == vars(error)
    assert error_wire.to_proto(error).code == row.status.value[0]
    assert error_wire.to_proto(error).message == error.message


@BY_REASON
def test_status_keeps_the_error(row: ErrorRow) -> None:
    error = row.error("has no end", field="prompt", batch_index=0, retry_after_ms=1)
    back = error_wire.from_status(row.status, error.message, error_wire.to_metadata(error))
    assert type(back) is row.error
    assert vars(back) == vars(error)


@BY_REASON
def test_status_of_a_large_error_keeps_reason_and_sentence(row: ErrorRow) -> None:
    error = row.error("is wrong", fields=("field" * 50,) * MAX_FIELDS, retry_after_ms=1)
    metadata = error_wire.to_metadata(error)
    assert error_wire.ERROR_METADATA_KEY not in dict(metadata)
    back = error_wire.from_status(row.status, error.message, metadata)
    assert (type(back), back.retry_after_ms) == (row.error, 1)
    assert back.message.startswith("field")
    assert back.message.endswith("is wrong")


def test_truncated_metadata_keeps_reason_and_sentence() -> None:
    metadata = (("trtmesh-error-bin", b"\xff"), ("trtmesh-error-reason", "QUEUE_FULL"))
    error = error_wire.from_status(grpc.StatusCode.UNAVAILABLE, "full", metadata)
    assert (error.reason, error.message) == ("QUEUE_FULL", "full")


@BY_REASON
def test_status_without_reason_becomes_the_most_general_error(row: ErrorRow) -> None:
    error = error_wire.from_status(row.status, "x", None)
    assert error.row.status is row.status
    assert issubclass(row.error, type(error))


def test_unknown_reason_and_code_become_the_root_class() -> None:
    assert type(error_wire.from_proto(pb.Error(reason="NEW", message="m"))) is TrtmeshError
    metadata = [("trtmesh-error-reason", "NEW")]
    assert type(error_wire.from_status(grpc.StatusCode.DATA_LOSS, "m", metadata)) is TrtmeshError


def test_retry_after_is_unset_by_default() -> None:
    assert not error_wire.to_proto(errors.QueueFull("x")).HasField("retry_after_ms")
    assert error_wire.from_proto(error_wire.to_proto(errors.QueueFull("x"))).retry_after_ms is None


def test_subclass_inherits_the_row_of_its_base() -> None:
    class Local(errors.QueueFull):
        pass

    assert Local("x").reason == "QUEUE_FULL"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            errors.InvalidField.of("sampling.top_p", 3.0, "in [0, 1]"),
            "sampling.top_p is 3.0 but must be in [0, 1]",
        ),
        (
            errors.InvalidField.of("min_tokens", 3, "at most 2", "max_tokens").of_item(7),
            "items[7]: min_tokens is 3 but must be at most 2 (max_tokens)",
        ),
        (errors.UnsupportedField("not supported", fields=("a.b", "c")), "a.b, c not supported"),
        (errors.NoWorker("no worker is ready"), "no worker is ready"),
    ],
)
def test_message_is_composed_of_the_parts(error: TrtmeshError, sentence: str) -> None:
    assert error.message == str(error) == sentence


def test_sentence_translates_field_names() -> None:
    error = errors.InvalidField.of("min_tokens", 3, "at most 2", "max_tokens")
    assert error.sentence(str.upper) == "MIN_TOKENS is 3 but must be at most 2 (MAX_TOKENS)"


def test_long_value_is_shortened() -> None:
    error = errors.InvalidField.of("text", "x" * 10_000, "shorter")
    assert len(error.value) == MAX_QUOTED_CHARACTERS + len("...")


def test_startup_errors_have_distinct_exit_statuses() -> None:
    statuses = [kind.exit_status for kind in start_failures()]
    assert sorted(statuses) == [2, 3, 4]
