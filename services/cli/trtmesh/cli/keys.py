"""`trtmesh keys`: the file of API keys of routers."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.errors import SettingsError, StartupError
from trtmesh.cli.option_groups import grouped, option
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.plain_help import CommandGroup
from trtmesh.cli.session import FAILED
from trtmesh.cli.tables import add_row, new_table, print_tables
from trtmesh.router.callers.key_file import (
    BadKeyFile,
    ListedKey,
    check_name,
    digest_of,
    new_key,
    read_keys,
)
from trtmesh.router.callers.limits import RateLimit

keys = CommandGroup(name="keys", help="The file of API keys of routers.", no_args_is_help=True)

SHORTEST_KEY = 20
"""Least characters of an existing key: the file has fast digests, so a short key could be guessed."""

NameArgument = Annotated[str, typer.Argument(help="Name of the caller, in logs and metrics.")]
FileOption = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="TRTMESH_ROUTER_API_KEYS_FILE",
        help="File of API keys. Running routers read it again when it changes.",
    ),
]


@dataclass(frozen=True, slots=True)
class LimitOptions:
    tokens_per_second: float | None = option("Rate of prompt and generated tokens.")
    burst_tokens: int | None = option("Tokens at once after a pause.")
    items_per_second: float | None = option("Rate of items: the prompts of requests.")
    burst_items: int | None = option("Items at once after a pause.")
    max_items: int | None = option("Most live items.")
    max_priority: int | None = option("Highest priority of a request.")

    def given(self) -> dict[str, str]:
        """Returns the set limits, in the form of the file."""
        return {name: str(value) for name, value in asdict(self).items() if value is not None}


@contextmanager
def _errors_told() -> Iterator[None]:
    try:
        yield
    except StartupError as error:
        say_error(str(error))
        raise typer.Exit(error.exit_status) from None


@keys.command()
@grouped
def add(
    name: NameArgument,
    file: FileOption,
    limits: LimitOptions,
    expires: Annotated[
        str, typer.Option(help="Date or time of its end, such as 2027-01-31T12:00:00Z.")
    ] = "",
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with an existing key, - for standard input; unset draws a key."),
    ] = None,
) -> None:
    """Add a key, and print it: the file has only its digest. Unset limits are those of `router.rate_limit`.

    A name may have several keys, such as a key and its successor; the further ones take over its limits.

    Exit status: 0 success, 2 wrong usage or an unusable file.
    """
    with _errors_told():
        key = new_key() if api_key_file is None else _existing(api_key_file)
        with _changing(file) as lines:
            own = next((k.limits for k in _parsed(file, lines) if k.name == name), {})
            added = str(ListedKey(name, digest_of(key), limits.given() or own))
            added += f" expires={expires}" if expires else ""
            _check(added, name)
            lines.append(added)
            _parsed(file, lines)
    if api_key_file is None:
        say(f"the key of {name}, shown once:")
        put(key)


@keys.command("limit")
@grouped
def set_limits(
    name: NameArgument,
    file: FileOption,
    limits: LimitOptions,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            help="Limit to take away, such as max_items: that of `router.rate_limit` holds; repeatable."
        ),
    ] = None,
) -> None:
    """Change limits of a name, of all its keys; the others stay, and so do the keys.

    Exit status: 0 success, 1 no such key, 2 wrong usage or an unusable file.
    """
    with _errors_told(), _changing(file) as lines:
        if unknown := set(unset or ()) - RateLimit.model_fields.keys():
            names = ", ".join(RateLimit.model_fields)
            raise SettingsError(f"--unset is {unknown.pop()!r} but must be one of {names}")
        own = [key for key in _parsed(file, lines) if key.name == name]
        for key in own:
            kept = {n: value for n, value in key.limits.items() if n not in (unset or ())}
            changed = str(replace(key, limits=kept | limits.given()))
            _check(changed, name)
            comment = lines[key.line - 1].partition("#")[2]
            lines[key.line - 1] = f"{changed}  #{comment}" if comment else changed
        _parsed(file, lines)
    if not own:
        say_error(f"{file} has no key of {name}; `trtmesh keys list` shows all")
        raise typer.Exit(FAILED)
    put(f"changed the limits of {len(own)} keys of {name}")


@keys.command("list")
def list_keys(
    file: FileOption,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the names, limits and ends of the keys.

    Exit status: 0 success, 2 wrong usage or an unusable file.
    """
    with _errors_told():
        listed = _parsed(file, _lines_of(file))
    now = datetime.now(UTC)
    if as_json:
        for key in listed:
            put(json.dumps(_as_fields(key, now)))
        return
    table = new_table("name", "digest", "limits", "expires")
    for key in listed:
        limits = " ".join(f"{limit}={value}" for limit, value in key.limits.items())
        add_row(table, key.name, key.short_digest, limits or "-", _end_of(key, now))
    print_tables(table)


@keys.command()
def remove(
    name: NameArgument,
    file: FileOption,
    digest: Annotated[
        str, typer.Option(help="Remove only the key whose digest begins so, as in `list`.")
    ] = "",
) -> None:
    """Remove the keys of a name. Running requests end as they would; new calls with the key are refused.

    Exit status: 0 success, 1 no such key, 2 wrong usage or an unusable file.
    """
    with _errors_told(), _changing(file) as lines:
        gone = {
            key.line
            for key in _parsed(file, lines)
            if key.name == name and key.digest.hex().startswith(digest.lower())
        }
        lines[:] = [line for number, line in enumerate(lines, 1) if number not in gone]
    if not gone:
        say_error(f"{file} has no such key of {name}; `trtmesh keys list` shows all")
        raise typer.Exit(FAILED)
    put(f"removed {len(gone)} keys of {name}")


def _existing(file: Path) -> str:
    """The key of a file. Raises SettingsError."""
    text = sys.stdin.read() if str(file) == "-" else None
    key = ApiKey.read(file, {}) if text is None else ApiKey.of(text, "standard input")
    assert key is not None
    word = key.metadata[1].removeprefix("Bearer ")
    if len(word) < SHORTEST_KEY:
        raise SettingsError(f"the key of {file} must have at least {SHORTEST_KEY} characters")
    return word


def _check(line: str, name: str) -> None:
    """Raises SettingsError for a name or a limit of the command line."""
    try:
        check_name(1, name)
        read_keys(line)
    except BadKeyFile as error:
        raise SettingsError(f"the key {str(error).removeprefix('line 1 ')}") from None


def _parsed(file: Path, lines: Sequence[str]) -> Sequence[ListedKey]:
    """Raises SettingsError."""
    try:
        return read_keys("\n".join(lines))
    except BadKeyFile as error:
        raise SettingsError(f"{file}: {error}") from None


def _lines_of(file: Path) -> list[str]:
    """Raises SettingsError."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"cannot read {file}: {problem}") from None


@contextmanager
def _changing(file: Path) -> Iterator[list[str]]:
    """Yields the lines of a file for changes, written at once, by a single command at a time."""
    target = file.resolve()
    try:
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SettingsError(f"cannot write {file}: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        before = _lines_of(file) if target.exists() else []
        after = [*before]
        yield after
        if after != before:
            _replace(target, after)
    finally:
        os.close(directory)


def _replace(file: Path, lines: Sequence[str]) -> None:
    """Replaces the file atomically. Raises SettingsError."""
    mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o600
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.touch(0o600)
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.chmod(mode)
        new.replace(file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise SettingsError(f"cannot write {file}: {error.strerror}") from None


def _end_of(key: ListedKey, now: datetime) -> str:
    if key.expires is None:
        return "-"
    return f"{key.expires:%Y-%m-%dT%H:%M:%SZ}{' (over)' if key.is_expired(now) else ''}"


def _as_fields(key: ListedKey, now: datetime) -> dict[str, object]:
    return {
        "name": key.name,
        "digest": key.digest.hex(),
        "limits": dict(key.limits),
        "expires": key.expires.isoformat() if key.expires else None,
        "expired": key.is_expired(now),
    }
