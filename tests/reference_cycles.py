"""Reference cycles that a process leaves behind: services rarely collect garbage, so such objects, and all they hold,
would live for hours."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType

PLACE = "TESTED_GARBAGE"
"""Variable with the directory where processes that `fork_server.py` starts report cycles."""
LOOK_SECONDS = 1.0

RARE = frozenset({"SSLProtocol", "Worker"})
"""Types in cycles that are few and small: connections of uvloop's TLS, and workers that have left the fleet."""


def watch(place: str) -> None:
    """Looks for cycles in this process until it ends."""
    path = Path(place) / str(os.getpid())
    # Collections of the process keep what they find for the next look.
    gc.set_debug(gc.DEBUG_SAVEALL)
    threading.Thread(target=_look_again, args=(path,), daemon=True).start()


def _look_again(path: Path) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        gc.collect()
        cycles = [described(cycle) for cycle in cycles_of(gc.garbage) if _is_own(cycle)]
        if cycles:
            with path.open("a") as report:
                report.write("".join(f"{cycle}\n" for cycle in cycles))
        # Or they would be found again.
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)


def _is_own(cycle: Collection[object]) -> bool:
    if any(type(each).__name__ in RARE for each in cycle):
        return False
    return any(
        "/trtmesh/" in each.f_code.co_filename
        if isinstance(each, FrameType)
        else type(each).__module__.startswith("trtmesh")
        for each in cycle
    )


def described(cycle: Collection[object]) -> str:
    """The types in a cycle, and the functions of its frames."""
    return " | ".join(sorted({_name(each) for each in cycle}))


def _name(each: object) -> str:
    return each.f_code.co_qualname if isinstance(each, FrameType) else type(each).__qualname__


def cycles_of(garbage: Sequence[object]) -> Iterator[Sequence[object]]:
    """The strongly connected components of more than one object, by Tarjan's algorithm."""
    place = {id(each): at for at, each in enumerate(garbage)}
    following = [
        [place[id(other)] for other in gc.get_referents(each) if id(other) in place]
        for each in garbage
    ]
    for component in components(following):
        if len(component) > 1:
            yield [garbage[at] for at in component]


def components(following: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """The strongly connected components of a graph, given the nodes that follow each node."""
    order = dict[int, int]()
    lowest = dict[int, int]()
    open_nodes = dict[int, None]()
    for root in range(len(following)):
        path = [] if root in order else [(root, iter(following[root]))]
        while path:
            node, others = path[-1]
            if node not in order:
                order[node] = lowest[node] = len(order)
                open_nodes[node] = None
            for other in others:
                if other not in order:
                    path.append((other, iter(following[other])))
                    break
                if other in open_nodes:
                    lowest[node] = min(lowest[node], lowest[other])
            else:
                path.pop()
                if path:
                    parent = path[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
                if lowest[node] == order[node]:
                    component = list[int]()
                    while component[-1:] != [node]:
                        component.append(open_nodes.popitem()[0])
                    yield component
