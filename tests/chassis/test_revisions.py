"""Which revisions work together, and what is not understood."""

from __future__ import annotations

import pytest
from trtmesh.chassis import revisions
from trtmesh.chassis.errors import NotUnderstood, SchemaMismatch
from trtmesh.chassis.revisions import check_revision, refuse_unknown, unknown_numbers
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

LATER = b"\xc2\x3e\x01x"
"""Field 1000 of any message."""


@pytest.mark.parametrize("revision", [6, 7, 8])
def test_neighbours_work_together(revision: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revisions, "SCHEMA_REVISION", 7)
    check_revision("worker w", revision, "this router")


@pytest.mark.parametrize(
    ("revision", "remedy"),
    [
        (5, "upgrade worker w to a release of revision 6 first"),
        (9, "upgrade this router to a release of revision 8 first"),
        (0, "replace it"),
    ],
)
def test_others_are_refused_with_a_remedy(
    revision: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revisions, "SCHEMA_REVISION", 7)
    with pytest.raises(SchemaMismatch, match=remedy):
        check_revision("worker w", revision, "this router")


def test_known_message_is_accepted() -> None:
    command = epb.SubmitCommand(handle=1, token_ids=[1, 2])
    command.config.stopping.bad_token_ids.add(ids=[3])
    command.config.multimodal.model_inputs["x"].shape.append(1)
    refuse_unknown(command, "submit", "worker w")


@pytest.mark.parametrize("path", ["submit", "submit.config.sampling", "submit.config.stopping.bad_token_ids",
                                  "submit.config.multimodal.model_inputs"])  # fmt: skip
def test_later_field_is_named_wherever_it_is(path: str) -> None:
    command = epb.SubmitCommand(handle=1)
    part = {
        "submit": command,
        "submit.config.sampling": command.config.sampling,
        "submit.config.stopping.bad_token_ids": command.config.stopping.bad_token_ids.add(),
        "submit.config.multimodal.model_inputs": command.config.multimodal.model_inputs["x"],
    }[path]
    part.MergeFromString(LATER)
    with pytest.raises(NotUnderstood, match=f"worker w does not understand field 1000 of {path},"):
        refuse_unknown(command, "submit", "worker w")
    assert unknown_numbers(part) == [1000]


def test_later_command_is_told_by_its_number() -> None:
    assert unknown_numbers(epb.EngineCommand.FromString(LATER)) == [1000]
    assert unknown_numbers(pb.GenerationConfig()) == []
