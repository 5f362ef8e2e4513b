"""Receipts: every item's tokens can be made again, and a difference is found."""

from __future__ import annotations

import asyncio
import json
import signal
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio
from cli.commands import trtmesh
from e2e.mesh import PATIENT, SIMULATED, Mesh, eventually, running_mesh
from google.protobuf import json_format
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.receipts import Key, digest, of_sequence, prompt_digest, serialized
from trtmesh.client import ItemFinished, Tokens
from trtmesh.tools.auditing.findings import AuditResult, Likeness
from trtmesh.tools.auditing.receipt_file import FiledReceipt, read_receipts
from trtmesh.tools.auditing.repetition import audited
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2 as receipt_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "a secret of the operator's own"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("receipts")
    (made / "key").write_text(SECRET)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(folder: Path) -> AsyncIterator[Mesh]:
    flags = (
        *("--receipts-file", str(folder / "receipts.jsonl"), "--receipts-requests", "true"),
        *("--receipts-key-file", str(folder / "key")),
        *PATIENT,
    )
    # Few tokens outlast a worker's death, and all are made again.
    slow = (*SIMULATED, "--simulated-timing-step-ms", "50", "--load-interval-seconds", "0.05")
    async with running_mesh(engines=3, engine_flags=slow, router_flags=flags) as mesh:
        yield mesh


async def filed(folder: Path, request_id: str, items: int) -> list[FiledReceipt]:
    """The receipts of a request, once all are written."""
    file, key = folder / "receipts.jsonl", Key(SECRET.encode())
    found: list[FiledReceipt] = []

    async def all_written() -> bool:
        found[:] = [
            each for each in read_receipts(file, key) if each.receipt.request_id == request_id
        ]
        return len(found) == items

    await eventually(all_written)
    return sorted(found, key=lambda each: each.receipt.batch_index)


async def audit(mesh: Mesh, receipts: Sequence[FiledReceipt]) -> list[AuditResult]:
    return [each async for each in audited(mesh.client, receipts, 4, inexact=False)]


async def test_tokens_are_made_again_after_deaths_and_stops(mesh: Mesh, folder: Path) -> None:
    reader = mesh.open(
        [f"prompt {n}" for n in range(5)],
        request_id="moved",
        # Far more than are computed until the worker dies.
        max_tokens=120,
        temperature=0.7,
        num_return_sequences=2,
    )

    await reader.until(lambda r: all(len(r.positions(index)) == 2 for index in range(5)))
    started = reader.items[0].started
    assert started
    addresses = {each.worker: each.address for each in (await mesh.status()).workers}
    (killed,) = [e for e in mesh.engines if e.address == addresses[started.worker]]
    killed.signal(signal.SIGKILL)
    await mesh.client.stop("moved", [4])
    items = await reader.result()
    receipts = await filed(folder, "moved", 5)
    for kept, item in zip(receipts, items, strict=True):
        told = kept.receipt
        assert [each.tokens for each in told.sequences] == [
            len(each.token_ids) for each in item.sequences
        ]
        assert told.sequences[1] == of_sequence(
            item.sequences[1].token_ids, told.sequences[1].reason
        )
    spans = [each.receipt.workers for each in receipts]
    assert max(map(len, spans)) > 1
    assert all(span.exact and span.model_digest for each in spans for span in each)
    assert receipts[4].receipt.sequences[0].reason == pb.FINISH_REASON_STOPPED
    assert [each.verdict for each in await audit(mesh, receipts)] == [Likeness.IDENTICAL] * 5


async def test_receipt_comes_with_the_answer_of_who_asks(mesh: Mesh, folder: Path) -> None:
    ends, ids = list[ItemFinished](), dict[int, list[int]]()
    async for event in mesh.client.generate(
        ["one", "two"], request_id="asked", max_tokens=9, receipt=True
    ):
        if isinstance(event, ItemFinished):
            ends.append(event)
        elif isinstance(event, Tokens):
            ids.setdefault(event.batch_index, []).extend(event.token_ids)
    written = [each.receipt for each in await filed(folder, "asked", 2)]
    given = []
    for end in ends:
        assert end.receipt is not None
        assert Key(SECRET.encode()).signed(end.receipt)
        given.append(receipt_pb.Receipt.FromString(end.receipt.receipt))
    assert sorted(given, key=lambda each: each.batch_index) == written
    assert all(
        each.sequences[0] == of_sequence(ids[each.batch_index], pb.FINISH_REASON_LENGTH)
        for each in written
    )
    (silent,) = await mesh.client.complete(["three"], max_tokens=2)
    assert silent.receipt is None


async def test_line_of_128_tokens_has_at_most_400_bytes(mesh: Mesh) -> None:
    (item,) = await mesh.client.complete(
        ["nine"], request_id=uuid4().hex, max_tokens=128, temperature=1.0, receipt=True
    )
    assert item.receipt is not None
    assert item.receipt.signature
    line = {"receipt": b64encode(item.receipt.SerializeToString()).decode()}
    assert len(json.dumps(line, separators=(",", ":"))) < 400


async def test_difference_is_found_and_placed(mesh: Mesh, folder: Path) -> None:
    (item,) = await mesh.client.complete([[4, 5]], request_id="other", max_tokens=60, seed=5)
    (kept,) = await filed(folder, "other", 1)
    tokens = [*item.token_ids]
    tokens[37] += 1
    changed = receipt_pb.Receipt()
    changed.CopyFrom(kept.receipt)
    changed.release = "0.0.1"
    changed.workers[0].settings_digest = b"of others"
    assert changed.prompt_digest == prompt_digest([4, 5])
    changed.prompt_digest = prompt_digest([1, 2])
    changed.sequences[0].CopyFrom(of_sequence(tokens, pb.FINISH_REASON_LENGTH))
    line = replace(kept, receipt=changed, token_ids=[tokens])
    (finding,) = await audit(mesh, [line])
    assert finding.verdict is Likeness.DIFFERENT
    assert finding.why == "the first other token is at offset 37"
    assert finding.changed == ("release", "prompt", "settings")
    (without_ids,) = await audit(mesh, [replace(line, token_ids=None)])
    assert without_ids.why == "the first other token is at offset 36 to 37"


async def test_what_cannot_be_compared_says_why(mesh: Mesh, folder: Path) -> None:
    await mesh.client.complete(["five"], request_id="no", max_tokens=5, seed=5)
    (kept,) = await filed(folder, "no", 1)
    assert kept.item is not None
    lines = (folder / "receipts.jsonl").read_text().splitlines()
    (line,) = [each for each in lines if kept.place.endswith(f":{lines.index(each) + 1}")]
    line_of_others = folder / "others.jsonl"
    line_of_others.write_text(f"{line}\nno receipt\n")
    with pytest.raises(InvalidField, match=r"others.jsonl:2 is no receipt"):
        [*read_receipts(line_of_others, None)]
    (foreign,) = (
        each
        for each in read_receipts(folder / "receipts.jsonl", Key(b"a key of somebody else"))
        if each.receipt.request_id == "no"
    )
    inexact, another = receipt_pb.Receipt(), type(kept.item)()
    inexact.CopyFrom(kept.receipt)
    inexact.workers[0].exact = False
    another.CopyFrom(kept.item)
    another.prompt.text = "six"
    findings = await audit(
        mesh,
        [
            foreign,
            replace(kept, item=None),
            replace(kept, item=another),
            replace(kept, receipt=inexact),
        ],
    )
    assert {each.verdict for each in findings} == {Likeness.NOT_COMPARED}
    for finding, why in zip(
        findings,
        (
            "another key signed it",
            "lacks its request",
            "not that of the receipt",
            "batch_invariant",
        ),
        strict=True,
    ):
        assert why in finding.why


async def test_item_that_no_worker_took_and_clients_that_leave(mesh: Mesh, folder: Path) -> None:
    reader = mesh.open(["seven"], request_id="left", max_tokens=100)
    await reader.tokens_here(3)
    await reader.cancel()
    (kept,) = await filed(folder, "left", 1)
    assert kept.receipt.sequences[0].reason == pb.FINISH_REASON_CANCELLED
    (finding,) = await audit(mesh, [kept])
    assert finding.verdict is Likeness.IDENTICAL
    (refused,) = await mesh.client.complete([[1] * 100_000], request_id="refused", max_tokens=5)
    assert refused.error is not None
    await mesh.client.complete(["eight"], request_id="later", max_tokens=1)
    # The file has the receipts in the order of the ends.
    await filed(folder, "later", 1)
    assert not [
        each
        for each in read_receipts(folder / "receipts.jsonl", None)
        if each.receipt.request_id == "refused"
    ]


async def test_beams_that_were_stopped_are_not_compared(mesh: Mesh, folder: Path) -> None:
    await mesh.client.complete(["eight"], request_id="beams", max_tokens=5)
    (kept,) = await filed(folder, "beams", 1)
    assert kept.item is not None
    kept.item.config.beam_search.beam_width = 3
    kept.receipt.item_digest = digest(serialized(kept.item))
    (unsupported,) = await audit(mesh, [kept])
    assert "not supported by any worker" in unsupported.why
    kept.receipt.sequences[0].reason = pb.FINISH_REASON_STOPPED
    (finding,) = await audit(mesh, [kept])
    assert finding.verdict is Likeness.NOT_COMPARED
    assert "beams were cut short" in finding.why


async def test_halves_have_no_receipt_and_say_so(mesh: Mesh) -> None:
    config = pb.GenerationConfig()
    config.handoff.phase = pb.GENERATION_PHASE_CONTEXT_ONLY
    with pytest.raises(InvalidField, match="receipt is not given for a half"):
        await mesh.client.complete(["nine"], config=config, receipt=True)


async def test_command_reads_a_live_file_and_requests_as_people_write_them(
    mesh: Mesh, folder: Path
) -> None:
    await mesh.client.complete(["ten"] * 2, request_id="ten", max_tokens=9, temperature=1.0)
    kept = await filed(folder, "ten", 2)
    lines = (folder / "receipts.jsonl").read_bytes().splitlines(keepends=True)
    chosen = [lines[int(each.place.rpartition(":")[2]) - 1] for each in kept]
    file, item = folder / "some.jsonl", folder / "item.json"

    async def command(*arguments: str | Path) -> tuple[int, str, str]:
        address = ("--router", mesh.client.addresses[0])
        given = ("audit", *map(str, arguments), *address)
        ended = await asyncio.to_thread(trtmesh, *given)
        # Lines are in the order of the ends.
        return (
            ended.returncode,
            "".join(sorted(ended.stdout.splitlines(keepends=True))),
            ended.stderr,
        )

    file.write_bytes(b"".join(chosen) + chosen[0][:100])
    code, out, _ = await command(file, "--key-file", folder / "key")
    assert (code, out) == (0, "ten[0]: identical\nten[1]: identical\n")
    # It writes receipts of repeated items into the file that is read.
    code, out, err = await command(folder / "receipts.jsonl", "--request-id", "ten")
    assert (code, out) == (0, "ten[0]: identical\nten[1]: identical\n"), err

    bare = [b'{"receipt":"%s"}\n' % receipt_of(each) for each in chosen]
    file.write_bytes(b"".join(bare))
    assert kept[0].item is not None
    written = json_format.MessageToDict(kept[0].item, preserving_proto_field_name=True)
    del written["config"]["sampling"]["seed"]
    written["prompt"]["add_special_tokens"] = True
    item.write_text(json.dumps(written))
    code, out, _ = await command(file, "--item", item)
    assert (code, out) == (0, "ten[0]: identical\nten[1]: identical\n")
    written["prompt"]["text"] = "another"
    item.write_text(json.dumps(written))
    code, out, _ = await command(file, "--item", item)
    assert code == 1
    assert out.count("not compared; the item is not that of the receipt") == 2

    file.write_bytes(chosen[0] + b"no receipt\n" + chosen[1])
    code, out, err = await command(file)
    assert (code, out) == (2, "ten[0]: identical\n")
    assert "some.jsonl:2 is no receipt" in err
    code, _, err = await command(file, "--key-file", folder / "none")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be read: No such file" in err


def receipt_of(line: bytes) -> bytes:
    receipt: str = json.loads(line)["receipt"]
    return receipt.encode()
