"""Shell completion of names."""

from __future__ import annotations

from trtmesh.cli.completion import names_of_workers
from trtmesh.v1 import router_admin_pb2 as pb


def test_completion_proposes_unique_names_of_workers() -> None:
    known = [("alone", "h:1"), ("shared", "h:2"), ("shared", "h:3"), ("", "h:4"), ("", "h:5")]
    workers = [pb.Worker(worker=name, address=address) for name, address in known]
    assert names_of_workers(workers) == {"alone", "h:2", "h:3", "h:4", "h:5"}
    assert names_of_workers(workers[:2]) == {"alone", "shared"}
