"""Parts of items are made in turn between requests."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import NoReturn

from trtmesh.chassis.errors import BackendFailed
from trtmesh.engine.backends.torch.preparation import PartLease, Preparation


def test_request_with_many_items_delays_no_other() -> None:
    may_go_on, ended, made = threading.Event(), threading.Event(), list[str]()
    preparation = Preparation("parts", most=100)

    def add(request_id: str) -> None:
        def make(_lease: PartLease) -> None:
            assert may_go_on.wait(60)
            made.append(request_id)

        def done(_part: object) -> None:
            if len(made) == 12:
                ended.set()

        assert preparation.begin(request_id, "part", make, 1, 1, done)

    for _ in range(10):
        add("many")
    add("one")
    add("another")
    may_go_on.set()
    assert ended.wait(60)
    preparation.close()
    assert {"one", "another"} <= set(made[:4])


def test_a_panic_ends_its_item_alone() -> None:
    """A panic of a library in Rust is no Exception."""
    preparation = Preparation("parts", most=1)

    def panic(_lease: PartLease) -> NoReturn:
        raise BaseException("a panic")  # noqa: TRY002

    for make, expected in ((panic, BackendFailed), (lambda _: 5, int)):
        made = Future[object]()
        lease = preparation.begin("a", "part", make, 1, 1, made.set_result)
        assert lease
        assert isinstance(made.result(60), expected)
        lease.give_back()
    assert preparation.held == 0
    preparation.close()
