"""Parsing of a GenerateRequest."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from leaks import alive, without_collector
from trtmesh.chassis.errors import InvalidField, InvalidRequest, QueueFull
from trtmesh.chassis.parsing import MAX_PROMPT_TOKENS
from trtmesh.client.options import build_config, build_items
from trtmesh.router.values.handoff_state import digest_of, write_state
from trtmesh.router.values.request import (
    MAX_ITEMS,
    MAX_MODEL_CHARACTERS,
    MAX_REQUEST_TOKENS,
    ROUTER_FIELDS,
    fill_worker_config,
    parse_request,
    parse_stopped,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


def message(*prompts: Any, request_id: str = "r", **options: Any) -> router_pb.GenerateRequest:
    return router_pb.GenerateRequest(
        request_id=request_id, items=build_items(prompts), config=build_config(None, options)
    )


def test_names_come_from_the_request_then_the_metadata_then_chance() -> None:
    assert parse_request(message("x"), "other").request_id == "r"
    assert parse_request(message("x", request_id=""), "other").request_id == "other"
    drawn = {parse_request(message("x", request_id=""), "").request_id for _ in range(9)}
    assert len(drawn) == 9


@pytest.mark.parametrize("request_id", ["x" * 257, "a\nb", "a\x00"])
def test_unusable_names_are_refused(request_id: str) -> None:
    with pytest.raises(InvalidField) as refused:
        parse_request(message("x", request_id=request_id), "")
    assert refused.value.field == "request_id"
    assert refused.value.limit == "printable and have at most 256 characters"


def test_number_of_items_is_limited() -> None:
    most = ["x"] * MAX_ITEMS
    assert len(parse_request(message(*most), "").items) == MAX_ITEMS
    with pytest.raises(InvalidField) as refused:
        parse_request(message(*most, "x"), "")
    error = refused.value
    assert (error.field, error.value, error.limit) == ("items", "1025", "1 to 1024")


def test_item_config_replaces_the_shared_config() -> None:
    own = router_pb.GenerateItem(
        prompt=pb.Prompt(text="b"), config=build_config(None, {"temperature": 0.5})
    )
    first, second = parse_request(message("a", own, max_tokens=5), "").items
    assert (first.config.stopping.max_tokens, first.config.sampling.temperature) == (5, None)
    assert (second.config.stopping.max_tokens, second.config.sampling.temperature) == (None, 0.5)
    assert [first.batch_index, second.batch_index] == [0, 1]


def bad_item() -> router_pb.GenerateItem:
    config = build_config(None, {"top_p": 2.0})
    return router_pb.GenerateItem(prompt=pb.Prompt(text="b"), config=config)


def test_invalid_item_is_refused_alone() -> None:
    known = QueueFull("no room")
    asked = parse_request(message(bad_item(), "a", "b", "c"), "", {2: known})
    assert [item.batch_index for item in asked.items] == [1, 3]
    assert [each.batch_index for each in asked.refused] == [0, 2]
    assert asked.refused[0].error.field == "sampling.top_p"
    assert asked.refused[1].error is known
    assert asked.size == 4


def test_request_without_a_valid_item_is_refused_with_the_first_error() -> None:
    with pytest.raises(InvalidRequest, match=r"items\[0\]: sampling\.top_p is 2"):
        parse_request(message(bad_item(), bad_item()), "")


def test_refused_items_keep_no_message() -> None:
    """Each has its own parts of it, of up to 60 MiB, and services rarely collect garbage."""
    with without_collector():
        with suppress(InvalidRequest):
            parse_request(message(bad_item()), "")
        refused = parse_request(message(bad_item(), "a"), "").refused
        assert not alive(router_pb.GenerateRequest)
        assert refused


def test_every_field_of_the_router_exists_and_never_reaches_a_worker() -> None:
    for path in ROUTER_FIELDS:
        group, name = path.split(".")
        descriptor = pb.GenerationConfig.DESCRIPTOR.fields_by_name[group].message_type
        assert name in descriptor.fields_by_name
    options: dict[str, Any] = {
        "exclude_prompt": False,
        "skip_special_tokens": False,
        "stream": False,
        "text": False,
        "stop_texts": ["s"],
        "include_stop_text": True,
        "bad_texts": ["bad", "words"],
        "embedding_bias_texts": ["up", " "],
        "embedding_bias_token_ids": [[4]],
        "embedding_bias_weights": [3.0, 2.0, -1.0],
        "bad_token_ids": [[1]],
        "max_tokens": 4,
    }
    (item,) = parse_request(message("x", **options), "").items
    assert item.config.sampling.embedding_bias_texts == ("up", " ")
    assert item.config.stopping.bad_texts == ("bad", "words")
    assert item.worker_fields == {
        "stopping.max_tokens",
        "stopping.bad_texts",
        "stopping.bad_token_ids",
        "sampling.embedding_bias_texts",
        "sampling.embedding_bias_token_ids",
        "sampling.embedding_bias_weights",
    }
    config = pb.GenerationConfig()
    fill_worker_config(config, item, 5, [(2, 3), ()], [(7, 8), (9,)], drawn_seed=11)
    assert [list(ids.ids) for ids in config.stopping.bad_token_ids] == [[1], [7, 8], [9]]
    assert [list(ids.ids) for ids in config.sampling.embedding_bias_token_ids] == [[2, 3], [4]]
    assert list(config.sampling.embedding_bias_weights) == [3.0, -1.0]
    assert config.sampling.seed == 11
    assert config.stopping.max_tokens == 4
    left = {
        f"{group.name}.{f.name}"
        for group, value in config.ListFields()
        for f, _ in value.ListFields()
    }
    assert not left & ROUTER_FIELDS
    assert item.message.output.HasField("text"), "the client's own message is not changed"


def test_phase_of_a_first_half_needs_a_worker_for_it() -> None:
    handoff = pb.HandoffConfig(phase=pb.GENERATION_PHASE_CONTEXT_ONLY)
    (item,) = parse_request(message("x", handoff=handoff), "").items
    assert (item.is_context_only, item.state) == (True, None)
    assert item.worker_fields == {"handoff.phase"}


def test_state_of_a_second_half_is_read_and_never_reaches_a_worker() -> None:
    data = write_state(None, "engine-0", digest_of([1], None))
    handoff = pb.HandoffConfig(phase=pb.GENERATION_PHASE_GENERATION_ONLY, state=data)
    (item,) = parse_request(message("x", handoff=handoff), "").items
    assert not item.is_context_only
    assert item.state is not None
    assert item.worker_fields == frozenset()
    config = pb.GenerationConfig()
    fill_worker_config(config, item, 1, [], [], drawn_seed=1)
    assert config.handoff == pb.HandoffConfig()


def test_unreadable_state_refuses_its_item_alone() -> None:
    handoff = pb.HandoffConfig(phase=pb.GENERATION_PHASE_GENERATION_ONLY, state=b"x")
    config = pb.GenerationConfig(handoff=handoff)
    own = router_pb.GenerateItem(prompt=pb.Prompt(text="b"), config=config)
    asked = parse_request(message("a", own), "")
    assert [item.batch_index for item in asked.items] == [0]
    assert asked.refused[0].error.field == "handoff.state"


def test_token_ids_of_a_request_are_counted_before_they_are_copied() -> None:
    half = [1] * (MAX_REQUEST_TOKENS // 2)
    assert len(parse_request(message(half, half), "").items) == 2
    with pytest.raises(InvalidField, match="have 2097153 token ids together") as refused:
        parse_request(message(half, half, [1]), "")
    assert refused.value.limit == f"at most {MAX_REQUEST_TOKENS}"


def test_one_prompt_has_at_most_a_million_ids() -> None:
    with pytest.raises(InvalidRequest, match="has 1048577 entries but must have at most 1048576"):
        parse_request(message([1] * (MAX_PROMPT_TOKENS + 1)), "")


def test_model_names_are_limited() -> None:
    request = message("x")
    request.model = "m" * MAX_MODEL_CHARACTERS
    assert parse_request(request, "").model == request.model
    request.model += "m"
    with pytest.raises(InvalidField) as refused:
        parse_request(request, "")
    assert refused.value.field == "model"
    assert len(refused.value.message) < 1000


def test_stopped_items_are_counted_before_they_are_copied() -> None:
    stop = router_pb.StopRequest(request_id="r", batch_indexes=[0, 1, 1])
    assert parse_stopped(stop) == {0, 1}
    stop.batch_indexes.extend([1] * (MAX_ITEMS - 2))
    with pytest.raises(InvalidField, match="has 1025 entries but must have at most 1024"):
        parse_stopped(stop)
