"""`trtmesh audit`: makes the tokens of receipts again, and compares."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from google.protobuf import json_format
from trtmesh.chassis.errors import InvalidField, SettingsError
from trtmesh.chassis.receipts import Key, put_in_form
from trtmesh.cli.option_groups import grouped
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.session import FAILED, OK, USAGE, RouterOptions, run
from trtmesh.v1 import router_pb2 as router_pb

if TYPE_CHECKING:
    from trtmesh.tools.auditing.findings import AuditResult
    from trtmesh.tools.auditing.receipt_file import FiledReceipt


@grouped
def audit(
    files: Annotated[list[Path], typer.Argument(help="Files of router.receipts.file.")],
    connection: RouterOptions,
    *,
    request_id: Annotated[str, typer.Option(help="Only the items of this request.")] = "",
    item: Annotated[
        Path | None,
        typer.Option(help="The GenerateItem as JSON, where the file lacks the request."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="The key of router.receipts.key_file; others are refused.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, max=1024, help="Items repeated at once.")] = 16,
    inexact: Annotated[
        bool,
        typer.Option("--inexact", help="Compare also where workers do not promise equal tokens."),
    ] = False,
    upgrade: Annotated[
        bool,
        typer.Option("--upgrade", help="Print the differences and a summary, not each item."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Repeat the items of receipts in FILES, and compare their tokens.

    Exit status: 0 all are identical, 1 any is not or could not be compared, 2 wrong usage, 130 Ctrl-C.
    """
    try:
        key = None if key_file is None else Key.read(key_file, "--key-file")
        given = None if item is None else _item_of(item)
        receipts = _chosen(files, key, request_id, given)
        first = next(receipts, None)
    except (OSError, InvalidField, SettingsError) as error:
        say_error(str(error))
        raise typer.Exit(USAGE) from None
    if first is None:
        say_error("no receipt is meant; name another file or --request-id")
        raise typer.Exit(USAGE)
    every = chain([first], receipts)
    run(_audit(connection, every, at_once, inexact=inexact, shows_all=not upgrade, json=json))


def _item_of(file: Path) -> router_pb.GenerateItem:
    """Raises InvalidField and OSError."""
    try:
        return json_format.Parse(file.read_text(encoding="utf-8"), router_pb.GenerateItem())
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidField(f"is no GenerateItem: {error}", field="--item") from None


def _chosen(
    files: Sequence[Path],
    key: Key | None,
    request_id: str,
    given: router_pb.GenerateItem | None,
) -> Iterator[FiledReceipt]:
    from trtmesh.tools.auditing.receipt_file import read_receipts

    # All are opened before the first item is repeated, since a router may move its file meanwhile.
    for filed in chain.from_iterable([read_receipts(file, key) for file in files]):
        if request_id and filed.receipt.request_id != request_id:
            continue
        yield filed if given is None else replace(filed, item=_in_form(given, filed.receipt.seed))


def _in_form(given: router_pb.GenerateItem, seed: int) -> router_pb.GenerateItem:
    item = router_pb.GenerateItem()
    item.CopyFrom(given)
    put_in_form(item, seed)
    return item


async def _audit(
    connection: RouterOptions,
    receipts: Iterable[FiledReceipt],
    at_once: int,
    *,
    inexact: bool,
    shows_all: bool,
    json: bool,
) -> int:
    from trtmesh.tools.auditing.findings import Likeness
    from trtmesh.tools.auditing.repetition import audited

    unread: list[str] = []
    verdicts, changes = Counter[Likeness](), Counter[str]()
    async with connection.connected() as client:
        findings = audited(client, _readable(receipts, unread), at_once, inexact=inexact)
        async with aclosing(findings):
            async for finding in findings:
                verdicts[finding.verdict] += 1
                changes.update(finding.changed)
                if shows_all or finding.verdict is not Likeness.IDENTICAL:
                    put(_line(finding, json=json))
    identical = verdicts[Likeness.IDENTICAL]
    say(
        f"{identical} of {verdicts.total()} items identical, {verdicts[Likeness.DIFFERENT]} different,"
        f" {verdicts[Likeness.NOT_COMPARED]} not compared"
    )
    for name, count in changes.most_common():
        say(f"another {name} than at the time: {count} items")
    if unread:
        say_error(f"the rest was not read: {unread[0]}")
        return USAGE
    return OK if identical == verdicts.total() else FAILED


def _readable(receipts: Iterable[FiledReceipt], unread: list[str]) -> Iterator[FiledReceipt]:
    """Yields receipts up to a line that is none, and notes why."""
    try:
        yield from receipts
    except (OSError, InvalidField) as error:
        unread.append(str(error))


def _line(finding: AuditResult, *, json: bool) -> str:
    if json:
        told = asdict(finding)
        return json_module.dumps(told | {"verdict": finding.verdict.value})
    parts = [f"{finding.request_id}[{finding.batch_index}]: {finding.verdict.value}"]
    if finding.why:
        parts.append(finding.why)
    if finding.changed:
        parts.append(f"changed: {', '.join(finding.changed)}")
    return "; ".join(parts)
