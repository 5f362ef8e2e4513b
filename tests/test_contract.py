"""The wire contract and its documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from trtmesh.chassis import error_wire, errors
from trtmesh.chassis.bearer import BEARER_METADATA_KEY
from trtmesh.chassis.errors import ERROR_TABLE, TrtmeshError
from trtmesh.client.events import FinishReason
from trtmesh.v1 import (
    chat_pb2,
    engine_pb2,
    generation_pb2,
    kv_transfer_pb2,
    receipt_pb2,
    router_admin_pb2,
    router_pb2,
    tokenizer_pb2,
)

PROTOS = Path(__file__).parents[1] / "protos" / "trtmesh" / "v1"
PAGE = (PROTOS / "README.md").read_text(encoding="utf-8")
MODULES = (
    chat_pb2,
    engine_pb2,
    generation_pb2,
    kv_transfer_pb2,
    receipt_pb2,
    router_admin_pb2,
    router_pb2,
    tokenizer_pb2,
)
MESSAGES: dict[str, Descriptor] = {
    name: message
    for module in MODULES
    for name, message in module.DESCRIPTOR.message_types_by_name.items()
}

TENSORS = PAGE.split("## Triton tensors\n", 1)[1]


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.split(f"# {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table, f"no table below {heading!r}"
    rows = [line.strip("|").split("|") for line in table.group().splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def resolve(path: str) -> FieldDescriptor | None:
    """The field of a path `Message.field.field`, or None."""
    first, *names = path.split(".")
    message: Descriptor | None = MESSAGES.get(first)
    field: FieldDescriptor | None = None
    for name in names:
        field = message.fields_by_name.get(name) if message else None
        message = field.message_type if field else None
    return field


def test_tensor_tables_are_rendered_from_code() -> None:
    script = PROTOS.parents[1] / "triton_tensors.py"
    result = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert result.returncode == 0, "run .venv/bin/python protos/triton_tensors.py"


def test_tensors_map_to_existing_fields_or_refusals() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|.*\|$", TENSORS, re.MULTILINE)
    assert len(rows) > 300
    assert {tensor for tensor, target in rows if target.startswith("without effect: ")} == {
        "pad_id"
    }
    for tensor, target in rows:
        if not target.startswith(("refused: ", "without effect: ")):
            paths = re.findall(r"`([^`]+)`", target)
            assert paths, f"{tensor} goes nowhere"
            assert [path for path in paths if resolve(path) is None] == [], tensor


def test_field_lookup_rejects_an_unknown_path() -> None:
    assert resolve("GenerationConfig.sampling.top_k") is not None
    assert resolve("GenerationConfig.sampling.top_kk") is None
    assert resolve("GenerationConfig.sampling.top_k.more") is None
    assert resolve("Nothing.at_all") is None


def test_contract_page_lists_every_proto() -> None:
    named = [row[0].strip("`") for row in rows_below("trtmesh.v1")]
    assert sorted(named) == sorted(path.name for path in PROTOS.glob("*.proto"))


def test_contract_page_has_the_error_table() -> None:
    documented = [tuple(row[:3]) for row in rows_below("Errors")]
    assert documented == [
        (f"`{row.reason}`", row.status.name, str(row.http.value)) for row in ERROR_TABLE
    ]


def test_error_table_has_one_row_for_each_class() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, TrtmeshError)
    }
    assert {row.error for row in ERROR_TABLE} == classes
    assert len({row.reason for row in ERROR_TABLE}) == len(ERROR_TABLE)


def test_contract_page_names_the_metadata_keys() -> None:
    keys = {row[0].strip("`") for row in rows_below("Metadata")}
    assert keys == {
        "x-request-id",
        BEARER_METADATA_KEY,
        error_wire.REASON_METADATA_KEY,
        error_wire.RETRY_METADATA_KEY,
        error_wire.ERROR_METADATA_KEY,
    }


def test_client_has_every_finish_reason() -> None:
    prefix = "FINISH_REASON_"
    names = [
        name.removeprefix(prefix).lower()
        for name in generation_pb2.FinishReason.DESCRIPTOR.values_by_name
    ]
    assert [*names[1:], "unknown"] == list(FinishReason)
