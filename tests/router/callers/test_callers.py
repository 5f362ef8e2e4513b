"""Who calls, by headers and certificate; and the file that is read again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from router.scripted import eventually
from trtmesh.chassis.errors import RateLimited, SettingsError, Unauthenticated
from trtmesh.router.admission import RateLimiter
from trtmesh.router.callers.callers import ApiKeySettings, Callers
from trtmesh.router.callers.key_file import ListedKey, digest_of
from trtmesh.router.callers.limits import RateLimit
from trtmesh.router.metrics import RouterMetrics

ALICE, BOB = "alice-key", "bob-key"


def line_of(name: str, key: str, expires: datetime | None = None, **limits: str) -> str:
    return f"{ListedKey(name, digest_of(key), limits, expires)}\n"


def callers_of(
    file: Path | None, *, optional: bool = False, limits: RateLimit | None = None
) -> Callers:
    settings = ApiKeySettings(file=file, optional=optional)
    return Callers(settings, limits or RateLimit(), RouterMetrics())


GOOD = line_of("alice", ALICE, max_items="3") + line_of("bob", BOB)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(GOOD)
    return file


def write(file: Path, text: str | None, *, in_place: bool = True) -> None:
    """Changes the file as editors and as mounted secrets do; None removes it."""
    if text is None:
        file.unlink()
    elif in_place:
        file.write_text(text)
    else:
        other = file.with_name("new")
        other.write_text(text)
        other.rename(file)


def test_listed_key_names_the_caller_with_its_limits(file: Path) -> None:
    callers = callers_of(file, limits=RateLimit(max_items=9, burst_items=7))
    for headers in (
        {"x-api-key": ALICE},
        {"authorization": f"Bearer {ALICE}"},
        {"authorization": f"bearer  {ALICE} "},
        {"x-api-key": ALICE, "authorization": "Bearer of-a-proxy"},
    ):
        caller = callers.identify(headers.items())
        assert caller.name == "alice"
        assert (caller.limits.max_items, caller.limits.burst_items) == (3, 7)
    assert callers.identify({"x-api-key": BOB}.items()).limits.max_items == 9


@pytest.mark.parametrize("optional", [False, True])
def test_wrong_key_is_refused_without_an_echo(file: Path, optional: bool) -> None:
    callers = callers_of(file, optional=optional)
    for wrong in (f"{ALICE}x", ALICE[:-1], ALICE.upper(), "é\udcff"):
        with pytest.raises(Unauthenticated) as refused:
            callers.identify({"x-api-key": wrong}.items(), certificate="alice")
        assert wrong not in str(refused.value)


def test_call_without_a_key_is_refused_unless_keys_are_optional(file: Path) -> None:
    for nothing in ({}, {"authorization": "Basic abc"}, {"x-api-key": ""}):
        with pytest.raises(Unauthenticated, match="no API key; send it as `authorization: Bearer"):
            callers_of(file).identify(nothing.items(), certificate="alice")
        assert callers_of(file, optional=True).identify(nothing.items()).name == "anonymous"


def test_certificate_names_the_caller_without_a_key(file: Path) -> None:
    callers = callers_of(file, optional=True)
    assert callers.identify((), certificate="alice").name == "certificate:alice"
    assert callers.identify({"x-api-key": BOB}.items(), certificate="alice").name == "bob"


def test_unlisted_keys_tell_callers_apart() -> None:
    callers = callers_of(None)
    one, two = (callers.identify({"x-api-key": key}.items()) for key in (ALICE, BOB))
    assert one == callers.identify({"authorization": f"Bearer {ALICE}"}.items()) != two
    assert one.name.startswith("unlisted:")
    assert ALICE not in one.name
    assert callers.identify(()).name == "anonymous"


def test_unlisted_keys_share_one_account() -> None:
    """Otherwise a new key for each call would escape every limit."""
    limits = RateLimit(items_per_second=1.0, burst_items=3)
    callers, limiter = callers_of(None, limits=limits), RateLimiter()
    for key in (ALICE, BOB, ""):
        caller = callers.identify((("x-api-key", key),))
        account = limiter.account_of(caller, 0.0)
        account.check_rates(1, 0.0)
        account.open(1, 0.0)
    stranger = limiter.account_of(callers.identify((("x-api-key", "drawn"),)), 0.0)
    with pytest.raises(RateLimited, match="anonymous used up its 1 items a second"):
        stranger.check_rates(1, 0.0)
    # Nobody draws a certificate.
    known = (("x-api-key", "drawn"),), "gateway"
    limiter.account_of(callers.identify(*known), 0.0).check_rates(1, 0.0)
    assert callers.identify(*known).name.startswith("unlisted:")
    assert limiter.account_of(callers.identify(*known), 0.0) is limiter.account_of(
        callers.identify((), "gateway"), 0.0
    )


@pytest.mark.parametrize(
    "shown",
    [
        (("x-api-key", ALICE), ("X-API-Key", BOB)),
        (("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")),
    ],
)
def test_several_keys_are_refused(file: Path, shown: tuple[tuple[str, str], ...]) -> None:
    """Whoever stands in between may have looked at the other."""
    for callers in (callers_of(file), callers_of(file, optional=True), callers_of(None)):
        for headers in (shown, shown[::-1]):
            with pytest.raises(Unauthenticated, match="the call has several API keys; send one"):
                callers.identify(headers)
    assert callers_of(file).identify((shown[0], shown[0])).name == "alice"


def test_expired_key_is_refused(tmp_path: Path) -> None:
    file, now = tmp_path / "keys", datetime.now(UTC)
    file.write_text(
        line_of("alice", ALICE, now - timedelta(seconds=1))
        + line_of("bob", BOB, now + timedelta(hours=1))
    )
    callers = callers_of(file)
    assert callers.identify({"x-api-key": BOB}.items()).name == "bob"
    with pytest.raises(Unauthenticated, match=r"the API key of the call expired at \d{4}-"):
        callers.identify({"x-api-key": ALICE}.items())


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (ALICE, "line 1 must have"), (b"\xff", "byte 0 is not UTF-8")],
)
def test_unusable_file_ends_the_start(
    tmp_path: Path, content: str | bytes | None, problem: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError, match=problem) as refused:
        callers_of(file)
    assert refused.value.setting == "router.api_keys.file"
    assert ALICE not in str(refused.value)


def test_optional_keys_need_a_file() -> None:
    with pytest.raises(SettingsError, match="has no effect without router"):
        callers_of(None, optional=True)


@asynccontextmanager
async def watching(callers: Callers) -> AsyncIterator[None]:
    task = asyncio.create_task(callers.watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def known(callers: Callers, key: str) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            callers.identify({"x-api-key": key}.items())
        except Unauthenticated:
            return False
        return True

    return ask


@pytest.mark.parametrize("in_place", [False, True])
async def test_changed_file_is_read_again(file: Path, in_place: bool) -> None:
    callers = callers_of(file)
    async with watching(callers):
        new = line_of("bob", BOB) + line_of("carol", "carol-key", max_items="2")
        write(file, new, in_place=in_place)
        await eventually(known(callers, "carol-key"))
        assert not known(callers, ALICE)()
        assert known(callers, BOB)()
        assert callers.identify({"x-api-key": "carol-key"}.items()).limits.max_items == 2


async def test_bad_file_keeps_the_former_keys_and_is_told_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    callers = callers_of(file)
    async with watching(callers):
        write(file, f"{GOOD}{ALICE}\n")
        await eventually(lambda: callers.problem)
        assert callers.problem.startswith("line 3 must have `sha256:`")
        assert known(callers, ALICE)()
        write(file, None)
        await eventually(lambda: callers.problem == "No such file or directory")
        assert known(callers, ALICE)()
        write(file, GOOD.splitlines()[1])
        await eventually(lambda: not callers.problem)
        assert not known(callers, ALICE)()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all("the former API keys stay in use" in error.getMessage() for error in errors)
    assert "has 1 API keys: 0 added, 1 removed" in caplog.text
    assert ALICE not in caplog.text


async def test_file_that_is_being_written_is_not_read(file: Path) -> None:
    """Half a file would revoke the keys of its other half."""
    callers = callers_of(file)
    alice, bob = GOOD.splitlines(keepends=True)
    async with watching(callers):
        for number in range(40):
            write(file, f"{alice}# {number}\n")
            await asyncio.sleep(0.05)
            assert known(callers, BOB)(), "a file was read between two writes"
        write(file, f"{bob}# the end\n")
        await eventually(lambda: not known(callers, ALICE)())
        assert known(callers, BOB)()
