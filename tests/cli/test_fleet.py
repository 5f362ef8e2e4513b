from __future__ import annotations

import json

from cli.commands import Stack, trtmesh


def test_table_names_every_process(stack: Stack, admin: str) -> None:
    result = trtmesh("status", "--admin", admin, env={"COLUMNS": "200"})
    assert result.returncode == 0, result.stderr
    for child in (child for child in stack.children if child["name"] != "router-1"):
        assert (child["admin_address"] or child["address"]) in result.stdout
    assert "engine-0" in result.stdout
    assert "engine-1" in result.stdout
    assert result.stdout.count("ready") == 3


def test_json_is_the_routers_answer(admin: str) -> None:
    answer = json.loads(trtmesh("status", "--admin", admin, "--json").stdout)
    workers = {worker["worker"]: worker for worker in answer["workers"]}
    assert set(workers) == {"engine-0", "engine-1"}
    assert {worker["state"] for worker in workers.values()} == {"WORKER_STATE_READY"}
    assert [tokenizer["address"] for tokenizer in answer["tokenizers"]] == ["local"]
    assert answer["live_requests"] == 0


def test_no_router_is_status_1() -> None:
    result = trtmesh("status", "--admin", "127.0.0.1:1")
    assert result.returncode == 1
    assert "127.0.0.1:1" in result.stderr
