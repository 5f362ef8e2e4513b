"""The counterparts of the flags of upstream's two clients, v0.5.0 to v0.19.0 and after."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from trtmesh.cli.app import app
from trtmesh.router.doors.triton.templates.catalogue import TEMPLATES

PAGE = Path(__file__).parents[3] / "docs" / "triton.md"

BOTH = """
    -v --verbose -u --url --model-name -S --streaming -n --num-return-sequences -b --beam-width --temperature
    --repetition-penalty --presence-penalty --frequency-penalty --request-id --end-id --pad-id --lora-path
    --lora-task-id --exclude-input-in-output --return-log-probs --return-context-logits
    --return-generation-logits --return-perf-metrics
"""
IDS_CLIENT = """
    --text --input-tokens-csv --draft-tokens-csv --output-tokens-csv -s --ssl -t --stream-timeout -r
    --root-certificates -p --private-key -x --certificate-chain -C --grpc-compression-algorithm -c
    --check-output --correctness-threshold --request-output-len --stop-after-ms --stop-via-request-cancel
    --tokenizer-dir --tokenizer-type --prompt-embedding-table-path --prompt-task-id --dtype --top-k --top-p
    --requested-outputs --prompt_table_extra_id --vocab_size --lookahead_config --return-num-input-tokens
    --return-num-output-tokens
"""
TEXT_CLIENT = """
    --expected-outputs --check-outputs -p --prompt -o --output-len --stop-words --bad-words
    --embedding-bias-words --embedding-bias-weights --overwrite-output-text --batch-inputs
    --guided-decoding-guide-type --guided-decoding-guide -i --protocol
"""
UPSTREAM = {*BOTH.split(), *IDS_CLIENT.split(), *TEXT_CLIENT.split()}
"""Releases before v0.8 wrote some with underscores."""


def rows() -> list[list[str]]:
    """Both cells of the rows of the table."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(
        "| Upstream | `trtmesh triton infer` |"
    )
    table = table.partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


COUNTERPARTS = [
    span for _, counterpart in rows() for span in spans(counterpart) if span.startswith("--")
]


def test_table_has_every_flag_of_upstream() -> None:
    assert {flag for flags, _ in rows() for flag in spans(flags)} == UPSTREAM


def test_every_flag_has_a_counterpart_or_the_reason_for_none() -> None:
    for flags, counterpart in rows():
        assert spans(counterpart) or counterpart.startswith("none: "), flags


@pytest.mark.parametrize("counterpart", COUNTERPARTS)
def test_counterpart_is_a_command_line(counterpart: str) -> None:
    words = shlex.split(counterpart)
    # Any: by version, typer has an own click or uses the installed one.
    commands: Any = typer.main.get_command(app)
    command = commands.commands["triton"].load().commands["infer"]
    given = command.make_context("infer", ["one", *words]).params["given"] or ()
    known = {each.name for template in TEMPLATES.values() for each in template.inputs}
    assert {each.partition("=")[0] for each in given} <= known
