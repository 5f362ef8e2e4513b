from __future__ import annotations

import socket

import pytest
from trtmesh.chassis.errors import SettingsError, TrtmeshError, Unavailable
from trtmesh.tools.bench.targets import opening
from trtmesh.tools.bench.targets.http import parsed
from trtmesh.tools.bench.targets.kserve import TokenCounts
from trtmesh.tools.bench.targets.target import Connecting, Url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("grpc://a:1,b:2", Url("grpc", ("a:1", "b:2"))),
        ("grpcs://a", Url("grpc", ("a:8001",), is_secure=True)),
        ("triton://[::1]", Url("triton", ("[::1]:8001",))),
        ("triton+unarys://a:1", Url("triton+unary", ("a:1",), is_secure=True)),
        ("triton+http://a", Url("triton+http", ("a:8000",))),
        ("openais://a:1/v1/completions", Url("openai", ("a:1",), "/v1/completions", is_secure=True)),
    ],
)  # fmt: skip
def test_url_says_where_and_how(text: str, url: Url) -> None:
    assert Url.parse(text) == url
    assert Url.parse(str(url)) == url


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("127.0.0.1:8001", "must be grpc://"),
        ("http://a", "must be grpc://"),
        ("grpc://", "names no host"),
        ("openai://key@a", "give keys by --api-key-file"),
        ("triton://a,b", "takes one address"),
        ("triton://a/ensemble", "name a model by --model"),
    ],
)
def test_other_urls_are_refused(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Url.parse(text)


def test_key_of_a_url_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as refused:
        Url.parse("openai://sesame@a")
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize("protocol", ["triton", "triton+http", "openai"])
async def test_a_silent_server_is_given_up(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = Url.parse(f"{protocol}://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unavailable, match=r"does not say what it serves within 0\.1 s"):
            async with opening.opened(Connecting(url), 1):
                pass


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [([1, 2, 3], 3), ([1, 1, 1], 3), ([4, 4, 2], 10), ([7], 7), ([], None)],
)
def test_counts_of_responses_add_up_unless_they_grow(counts: list[int], tokens: int | None) -> None:
    found = TokenCounts()
    for count in counts:
        found.add({"num_input_tokens": 5, "num_output_tokens": count}, has_content=True)
    # The last response often repeats the count.
    found.add({"num_output_tokens": counts[-1] if counts else 0}, has_content=False)
    assert found.output() == tokens


@pytest.mark.parametrize("event", [b"{", b"[1]", b'{"error": {"message": "no luck"}}'])
def test_event_that_is_no_answer_is_an_error(event: bytes) -> None:
    with pytest.raises(TrtmeshError, match=r"no JSON|no object|no luck"):
        parsed(event)
