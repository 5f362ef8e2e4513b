"""The stream over a real socket: order, failures of single handles, ends."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from log_lines import LogLine
from tokenizer.serving import (
    Link,
    Server,
    cancel_encode,
    close_decode,
    decode,
    encode,
    linked,
    open_decode,
    served,
)
from tokenizer.tokenizers_zoo import CORPUS, byte_level_bpe, ids_of, save_model_dir
from tokenizers import Tokenizer, decoders
from trtmesh.chassis.forwarding import Receive
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.chassis.rpc import ServedContext
from trtmesh.tokenizer.chat.renderer import ChatRenderer
from trtmesh.tokenizer.decoding.states import DecodeSequence
from trtmesh.tokenizer.encoding import BatchEncoder, EncodeRequest, Outcome
from trtmesh.tokenizer.router_stream import RouterStream, StreamLimits
from trtmesh.v1 import tokenizer_pb2 as pb
from trtmesh.v1.chat_pb2 import Chat

FAMILIES = ["byte_level_bpe", "llama2_bpe", "unigram_byte_fallback", "word_piece"]


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture
async def server(model_dir: Path) -> AsyncIterator[Server]:
    async with served(model_dir) as server:
        yield server


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    async with linked(server.stub) as link:
        yield link


def reasons(decoded: pb.Decoded) -> dict[int, str]:
    return {failure.handle: failure.error.reason for failure in decoded.failures}


async def test_words_name_special_tokens_where_prompts_do_not(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    save_model_dir(tokenizer, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"split_special_tokens": True}
    file.write_text(json.dumps(config))
    (end,) = ids_of(tokenizer, "<|im_end|>")
    async with served(tmp_path) as server, linked(server.stub) as link:
        command = encode(1, "<|im_end|>", ["<|im_end|>"])
        command.encode.spelled_words.append("<|im_end|>")
        encoded = await link.encode(command)
    assert end not in encoded.token_ids
    assert [list(word.ids) for word in encoded.words] == [[end]]
    assert [[list(s.ids) for s in w.spellings] for w in encoded.spelled_words] == [[[end]]]


async def test_text_and_words_are_encoded(link: Link, tokenizer: Tokenizer) -> None:
    encoded = await link.encode(encode(7, CORPUS[0], ["stop", " bad word"]))
    assert encoded.handle == 7
    assert list(encoded.token_ids) == tokenizer.encode(CORPUS[0]).ids
    assert [list(word.ids) for word in encoded.words] == [
        tokenizer.encode("stop").ids,
        tokenizer.encode(" bad word").ids,
    ]
    encoded = await link.encode(encode(8, None, ["stop"]))
    assert not encoded.token_ids
    assert len(encoded.words) == 1


async def test_empty_commands_are_answered(link: Link) -> None:
    encoded = await link.encode(encode(0, None))
    assert (encoded.handle, list(encoded.token_ids), list(encoded.words)) == (0, [], [])
    assert not (await link.decode(decode({}))).handles


async def test_special_tokens_are_added_to_the_text_but_not_to_words(
    model_dirs: dict[str, Path],
) -> None:
    async with served(model_dirs["llama2_bpe"]) as server, linked(server.stub) as link:
        tokenizer = Tokenizer.from_file(str(model_dirs["llama2_bpe"] / "tokenizer.json"))
        plain = tokenizer.encode("hello", add_special_tokens=False).ids
        marked = await link.encode(encode(1, "hello", ["hello"], special=True))
        assert list(marked.token_ids) == [tokenizer.token_to_id("<s>"), *plain]
        assert list(marked.words[0].ids) == plain
        assert list((await link.encode(encode(1, "hello"))).token_ids) == plain


MEGABYTE = (CORPUS[0] * 20_000)[: 2**20]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A megabyte is encoded as soon as this is set, so none is done before the test wants it, however fast."""
    opened, encode = threading.Event(), BatchEncoder.encode

    def encode_gated(batches: BatchEncoder, requests: Sequence[EncodeRequest]) -> list[Outcome]:
        if any(request.size_bytes >= len(MEGABYTE) for request in requests):
            assert opened.wait(60)
        return encode(batches, requests)

    monkeypatch.setattr(BatchEncoder, "encode", encode_gated)
    yield opened
    opened.set()


async def test_short_texts_overtake_a_megabyte(gate: threading.Event, link: Link) -> None:
    await link.send(encode(0, MEGABYTE), *(encode(i, f"short {i}") for i in range(1, 51)))
    order = [(await link.next()).encoded.handle for _ in range(50)]
    assert sorted(order) == list(range(1, 51))
    gate.set()
    assert (await link.next()).encoded.handle == 0


async def test_many_concurrent_sequences(server: Server, link: Link, tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    ids = {
        handle: [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randrange(40))]
        for handle in range(100)
    }
    await link.send(*(open_decode(handle, skip_special_tokens=True) for handle in ids))
    await server.metric_becomes("open_decode_states", 100)
    texts = dict.fromkeys(ids, "")
    rest = {handle: list(reversed(tokens)) for handle, tokens in ids.items()}
    while rest:
        step = {
            h: [rest[h].pop() for _ in range(min(len(rest[h]), draw.randrange(3)))] for h in rest
        }
        finished = [handle for handle in step if not rest[handle]]
        decoded = await link.decode(decode(step, finished))
        assert list(decoded.handles) == list(step)
        for handle, text in zip(decoded.handles, decoded.texts, strict=True):
            texts[handle] += text
        rest = {handle: tokens for handle, tokens in rest.items() if tokens}
    assert texts == {handle: tokenizer.decode(tokens) for handle, tokens in ids.items()}
    await link.send(close_decode(*ids))
    await server.metric_becomes("open_decode_states", 0)
    assert server.metric("decoded_tokens_total") == sum(map(len, ids.values()))


@pytest.mark.parametrize("name", FAMILIES)
async def test_sequence_moves_after_any_token(model_dirs: dict[str, Path], name: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dirs[name] / "tokenizer.json"))
    ids = tokenizer.encode("Hello, 世界! naïve 😀 done STOP here").ids
    fields: dict[str, Any] = {"skip_special_tokens": True, "stop_texts": ["STOP", "stop", "never"]}
    async with served(model_dirs[name]) as server, linked(server.stub) as link:
        whole = await collect(link, 0, ids, [], **fields)
        assert whole.stop is not None
        for cut in range(len(ids)):
            before = await collect(link, 1, ids[:cut], [], finish=False, **fields)
            after = await collect(link, 2, ids[cut:], ids[:cut], **fields)
            if before.stop is None:
                assert before.text + after.text == whole.text
                assert after.stop is not None
                assert cut + after.stop == whole.stop
            else:
                assert (before.text, before.stop) == (whole.text, whole.stop)
                assert (after.text, after.stop) == ("", 0)


class Collected:
    """Text of a sequence, and how many tokens its stop text took."""

    def __init__(self) -> None:
        self.text = ""
        self.stop: int | None = None


async def collect(
    link: Link,
    handle: int,
    ids: list[int],
    delivered: list[int],
    *,
    finish: bool = True,
    **fields: Any,
) -> Collected:
    """Decodes token by token and closes the handle."""
    await link.send(open_decode(handle, delivered_token_ids=delivered, **fields))
    collected = Collected()
    for count, token_id in enumerate(ids, start=1):
        finished = [handle] if finish and count == len(ids) else []
        decoded = await link.decode(decode({handle: [token_id]}, finished))
        assert not decoded.failures
        collected.text += decoded.texts[0]
        for stop in decoded.stops:
            collected.stop = count - 1 + stop.token_count
    if not ids:
        decoded = await link.decode(decode({handle: []}))
        collected.stop = 0 if decoded.stops else None
    await link.send(close_decode(handle))
    return collected


async def test_stop_text_returns_its_index_and_token_count(
    link: Link, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("def add(a)").ids
    for include, text in ((False, "def"), (True, "def add")):
        await link.send(open_decode(1, stop_texts=["x", " add"], include_stop_text=include))
        decoded = await link.decode(decode({1: ids}))
        assert list(decoded.texts) == [text]
        (stop,) = decoded.stops
        assert (stop.handle, stop.stop_index) == (1, 1)
        assert " add" in tokenizer.decode(ids[: stop.token_count])
        assert " add" not in tokenizer.decode(ids[: stop.token_count - 1])
        after = await link.decode(decode({1: ids}, [1]))
        assert (list(after.texts), list(after.stops), list(after.failures)) == ([""], [], [])
        await link.send(close_decode(1))


def blamed(decoded: pb.Decoded) -> tuple[list[str], str]:
    """Fields and value of the first failure."""
    error = decoded.failures[0].error
    return list(error.fields), error.value


async def test_failure_concerns_only_its_handle(
    server: Server, link: Link, tokenizer: Tokenizer
) -> None:
    (hello,) = tokenizer.encode("H").ids
    await link.send(open_decode(1, stop_texts=[""]), open_decode(2))
    decoded = await link.decode(decode({1: [hello], 2: [hello]}))
    assert list(decoded.texts) == ["", "H"]
    assert reasons(decoded) == {1: "INVALID_FIELD"}
    assert list(decoded.failures[0].error.fields) == ["stop_texts"]
    decoded = await link.decode(decode({2: [hello], 1: [hello]}))
    assert list(decoded.handles) == [2, 1]
    assert list(decoded.texts) == ["H", ""]
    assert reasons(decoded) == {1: "INVALID_FIELD"}
    assert server.metric("failures_total", reason="INVALID_FIELD") == 1
    assert server.metric("open_decode_states") == 1
    await link.send(close_decode(1), open_decode(1))
    assert list((await link.decode(decode({1: [hello]}))).texts) == ["H"]


async def test_id_of_a_padded_vocabulary_has_no_text(link: Link, tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    (hello,) = tokenizer.encode("H").ids
    await link.send(open_decode(1, delivered_token_ids=[hello, 2**31]), open_decode(2))
    decoded = await link.decode(decode({1: [size], 2: [hello, size, hello]}))
    assert (list(decoded.texts), list(decoded.failures)) == (["", "HH"], [])


async def test_panic_of_the_library_fails_only_its_handle(
    tmp_path: Path, logged: Callable[[], list[LogLine]]
) -> None:
    """It is no Exception. This decoder panics at a lone space, in every tokenizer that tries."""
    panicking = byte_level_bpe()
    panicking.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    space, letter = ids_of(panicking, "Ġ", "a")
    async with served(save_model_dir(panicking, tmp_path)) as server, linked(server.stub) as link:
        await link.send(
            open_decode(1, request_id="r-1"),
            open_decode(2),
            open_decode(3, prompt_token_ids=[space]),
        )
        decoded = await link.decode(decode({1: [space], 2: [letter, letter], 3: [letter]}, [1, 2]))
        assert list(decoded.texts) == ["", "aa", ""]
        assert reasons(decoded) == {1: "INTERNAL", 3: "INTERNAL"}
    lines = [line for line in logged() if line.request_id == "r-1"]
    assert [line.message.partition(": slice")[0] for line in lines] == [
        "unexpected error in decoding",
        "decode handle 1 failed: INTERNAL: decoding failed: PanicException",
    ]


async def test_unexpected_error_fails_only_its_handle_and_is_logged(
    link: Link, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[LogLine]]
) -> None:
    push = DecodeSequence.push

    def fault(sequence: DecodeSequence, token_ids: list[int]) -> Any:
        if sequence.request_id == "r-1":
            raise ZeroDivisionError("by zero")
        return push(sequence, token_ids)

    monkeypatch.setattr(DecodeSequence, "push", fault)
    await link.send(open_decode(1, request_id="r-1"), open_decode(2, request_id="r-2"))
    assert reasons(await link.decode(decode({1: [5], 2: [5]}))) == {1: "INTERNAL"}
    assert logged() == [
        LogLine("r-1", "unexpected error in decoding"),
        LogLine(
            "r-1", "decode handle 1 failed: INTERNAL: decoding failed: ZeroDivisionError: by zero"
        ),
    ]


async def test_failed_open_fails_the_next_decode(link: Link) -> None:
    await link.send(open_decode(1, stop_texts=[""], delivered_token_ids=[1]))
    assert reasons(await link.decode(decode({1: []}))) == {1: "INVALID_FIELD"}


async def test_unknown_handle_fails(link: Link) -> None:
    decoded = await link.decode(decode({9: [5]}))
    assert reasons(decoded) == {9: "INVALID_REQUEST"}
    assert blamed(decoded) == (["handle"], "9")


async def test_handle_opened_twice_fails(server: Server, link: Link) -> None:
    await link.send(open_decode(1), open_decode(1))
    decoded = await link.decode(decode({1: [5]}))
    assert reasons(decoded) == {1: "INVALID_REQUEST"}
    assert blamed(decoded) == (["handle"], "1")
    assert server.metric("open_decode_states") == 0


async def test_handles_beyond_the_limit_fail(model_dir: Path) -> None:
    async with (
        served(model_dir, StreamLimits(max_decode_states=2)) as server,
        linked(server.stub) as link,
    ):
        await link.send(open_decode(1), open_decode(2), open_decode(3))
        decoded = await link.decode(decode({1: [5], 2: [5], 3: [5]}))
        assert reasons(decoded) == {3: "QUEUE_FULL"}
        error = decoded.failures[0].error
        assert (error.value, error.limit) == ("2", "at most 2")
        await link.send(close_decode(1, 3), open_decode(3))
        assert not (await link.decode(decode({3: [5]}))).failures


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        (
            pb.DecodeCommand(handles=[1, 2], token_counts=[1], token_ids=[5]),
            ["handles", "token_counts"],
        ),
        (pb.DecodeCommand(handles=[1, 2], token_counts=[1, 2], token_ids=[5]), ["token_counts"]),
        (pb.DecodeCommand(handles=[1, 1], token_counts=[1, 0], token_ids=[5]), ["handles"]),
        (
            pb.DecodeCommand(handles=[1], token_counts=[0], finished_handles=[2]),
            ["finished_handles"],
        ),
    ],
)
async def test_malformed_command_fails_its_handles(
    link: Link, tokenizer: Tokenizer, command: pb.DecodeCommand, fields: list[str]
) -> None:
    (hello,) = tokenizer.encode("H").ids
    await link.send(open_decode(1), open_decode(2), open_decode(3))
    decoded = await link.decode(pb.TokenizerCommand(decode=command))
    assert list(decoded.handles) == list(command.handles)
    assert len(decoded.texts) == len(decoded.handles)
    named = {*command.handles, *command.finished_handles}
    assert reasons(decoded) == dict.fromkeys(named, "INVALID_REQUEST")
    assert blamed(decoded)[0] == fields
    assert list((await link.decode(decode({3: [hello]}))).texts) == ["H"]


async def test_tokens_after_the_end_fail(link: Link) -> None:
    await link.send(open_decode(1))
    await link.decode(decode({1: [5]}, [1]))
    decoded = await link.decode(decode({1: [5]}))
    assert reasons(decoded) == {1: "INVALID_REQUEST"}
    assert blamed(decoded)[0] == ["token_ids"]


async def test_empty_stop_text_fails(link: Link) -> None:
    await link.send(open_decode(1, stop_texts=["a", ""]))
    assert reasons(await link.decode(decode({1: []}))) == {1: "INVALID_FIELD"}


async def test_oversized_text_is_refused(model_dir: Path) -> None:
    async with (
        served(model_dir, max_message_bytes=16 * 1024) as server,
        linked(server.stub) as link,
    ):
        encoded = await link.encode(encode(3, "é" * 513))
        assert encoded.handle == 3
        assert encoded.error.reason == "INVALID_FIELD"
        assert list(encoded.error.fields) == ["text"]
        assert encoded.error.value == "1026 bytes"
        assert not (await link.encode(encode(3, "é" * 512))).HasField("error")


async def test_encode_handle_in_use_fails_the_second_encode(link: Link) -> None:
    await link.send(encode(1, "a" * 100_000), encode(1, "b"))
    assert (await link.next()).encoded.error.reason == "INVALID_REQUEST"
    assert len((await link.next()).encoded.token_ids) > 0


async def test_unknown_field_is_refused_from_a_router_of_a_later_revision_alone(link: Link) -> None:
    later, equal = encode(1, "text"), encode(2, "b")
    later.encode.schema_revision = SCHEMA_REVISION + 1
    equal.encode.schema_revision = SCHEMA_REVISION
    for command in (later, equal):
        command.encode.MergeFromString(b"\xc2\x3e\x01x")
    await link.send(later, equal)
    error = (await link.next()).encoded.error
    assert error.reason == "NOT_UNDERSTOOD"
    assert "field 1000 of encode" in error.message
    assert len((await link.next()).encoded.token_ids) > 0


async def test_cancelled_encodes_free_their_handles_without_an_answer(
    gate: threading.Event, link: Link
) -> None:
    await link.send(*(encode(i, MEGABYTE) for i in range(1, 30)))
    await link.send(cancel_encode(*range(1, 30), 77))
    assert (await link.encode(encode(5, "b"))).handle == 5
    gate.set()
    await link.finish()


async def test_unknown_command_ends_the_stream(link: Link) -> None:
    await link.send(pb.TokenizerCommand())
    with pytest.raises(grpc.aio.AioRpcError, match="does not know command") as raised:
        await link.call.read()
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_defect_in_a_conversation_is_its_answer(
    link: Link, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[LogLine]]
) -> None:
    async def broken(_renderer: ChatRenderer, _chat: Chat) -> str:
        raise OSError("defect")

    monkeypatch.setattr(ChatRenderer, "render", broken)
    command = pb.TokenizerCommand(encode=pb.EncodeCommand(handle=1, chat=Chat(messages="[]")))
    encoded = await link.encode(command)
    assert (encoded.handle, encoded.error.reason) == (1, "INTERNAL")
    assert "OSError: defect" in encoded.error.message
    assert [line.message for line in logged()] == ["unexpected error in an encode"]
    assert (await link.encode(encode(2, CORPUS[0]))).token_ids


async def test_half_closed_stream_still_gets_its_answers(link: Link) -> None:
    await link.send(*(encode(i, "text " * i) for i in range(20)), open_decode(1), decode({1: [5]}))
    await link.call.done_writing()
    handles = set()
    for _ in range(21):
        event = await link.next()
        handles.add(event.encoded.handle if event.HasField("encoded") else "decoded")
    assert handles == {*range(20), "decoded"}
    await link.finish()


async def test_cancelled_stream_frees_its_handles(server: Server) -> None:
    async with linked(server.stub) as link:
        await link.send(*(open_decode(handle) for handle in range(50)), open_decode(0))
        await link.send(*(encode(i, CORPUS[0] * 1000) for i in range(20)))
        await server.metric_becomes("open_decode_states", 49)
    await server.metric_becomes("open_decode_states", 0)
    await server.service.drain()


async def test_handles_belong_to_their_stream(server: Server, tokenizer: Tokenizer) -> None:
    (first, second) = tokenizer.encode("😀", add_special_tokens=False).ids[:2]
    async with linked(server.stub) as one, linked(server.stub) as other:
        await one.send(open_decode(1))
        assert reasons(await other.decode(decode({1: [first]}))) == {1: "INVALID_REQUEST"}
        assert not (await one.decode(decode({1: [first, second]}))).failures


async def test_unread_events_pause_reading_commands(model_dir: Path) -> None:
    read = 0
    may_write = asyncio.Event()
    written: list[int] = []

    class Context:
        async def each(self, receive: Receive[pb.TokenizerServiceConnectRequest]) -> None:
            nonlocal read
            for handle in range(100):
                read += 1
                request = pb.TokenizerServiceConnectRequest(commands=[decode({handle: []})])
                if (rest := receive(request)) is not None:
                    await rest()
                await asyncio.sleep(0)

        def write_now(self, response: pb.TokenizerServiceConnectResponse) -> bool:
            return False

        async def write(self, response: pb.TokenizerServiceConnectResponse) -> None:
            await may_write.wait()
            written.extend(event.decoded.handles[0] for event in response.events)

    async with served(model_dir, StreamLimits(max_unsent_events=4)) as server:
        stream = RouterStream(server.service._ready())
        serving = asyncio.create_task(stream.serve(cast(ServedContext, Context())))
        for _ in range(500):
            await asyncio.sleep(0)
        # At most four are being written, four wait.
        assert read <= 8
        may_write.set()
        await serving
    assert written == list(range(100))


async def test_draining_finishes_open_work_and_refuses_new_work(
    server: Server, link: Link, tokenizer: Tokenizer
) -> None:
    (hello,) = tokenizer.encode("H").ids
    await link.send(open_decode(1))
    await server.metric_becomes("open_decode_states", 1)
    drain = asyncio.create_task(server.service.drain())
    await asyncio.sleep(0)
    assert (await link.encode(encode(1, "text"))).error.reason == "DRAINING"
    await link.send(open_decode(2))
    decoded = await link.decode(decode({1: [hello], 2: [hello]}))
    assert list(decoded.texts) == ["H", ""]
    assert reasons(decoded) == {2: "DRAINING"}
    assert not drain.done()
    await link.send(close_decode(1))
    await drain


async def test_get_tokenizer_describes_the_tokenizer(server: Server, tokenizer: Tokenizer) -> None:
    described = await server.stub.GetTokenizer(pb.GetTokenizerRequest())
    assert described.model == "byte_level_bpe"
    assert described.vocabulary_size == tokenizer.get_vocab_size()
    assert described.bos_id == tokenizer.token_to_id("<s>")
    assert described.kind == "BPE"
    assert len(described.special_ids) == 4
    assert described.fingerprint
    assert described.schema_revision >= 1
    assert described.chat_template.startswith("{%")
