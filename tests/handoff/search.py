"""An exhaustive breadth-first search of a model's worlds."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from handoff.lane import FAULT, LOSS, TIMER, Violation
from handoff.model import Edge, Model, World


@dataclass
class Graph:
    """All reachable worlds, and the steps between them."""

    model: Model
    worlds: list[World] = field(default_factory=list)
    came_from: list[tuple[int, str]] = field(default_factory=list)
    sources: array[int] = field(default_factory=lambda: array("l"))
    targets: array[int] = field(default_factory=lambda: array("l"))
    """Steps without a fault."""
    timers: array[int] = field(default_factory=lambda: array("b"))
    edges: int = 0

    def trace(self, number: int) -> list[str]:
        """The steps to a world."""
        labels = []
        while number:
            number, label = self.came_from[number]
            labels.append(label)
        return labels[::-1]

    def stuck(self, *, timers: bool) -> int | None:
        """The first world from which no end can be reached without a further fault."""
        before: list[list[int]] = [[] for _ in self.worlds]
        for source, target, timer in zip(self.sources, self.targets, self.timers, strict=True):
            if timers or not timer:
                before[target].append(source)
        ends = [number for number, world in enumerate(self.worlds) if self.model.is_over(world)]
        reached = _closure(ends, before)
        return next((number for number, can in enumerate(reached) if not can), None)


def _closure(starts: Iterable[int], following: list[list[int]]) -> bytearray:
    reached, waiting = bytearray(len(following)), list(starts)
    for number in waiting:
        reached[number] = True
    while waiting:
        for number in following[waiting.pop()]:
            if not reached[number]:
                reached[number] = True
                waiting.append(number)
    return reached


class Found(Exception):
    """A violation, with the steps to it."""

    def __init__(self, problem: str, trace: list[str]) -> None:
        super().__init__("\n".join([problem, *trace]))
        self.problem = problem


@contextmanager
def without_collections() -> Iterator[None]:
    """Worlds are no garbage: the collector would look at all of them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@without_collections()
def explore(model: Model, *, most: int = 5_000_000) -> Graph:
    """Visits every reachable world; raises Found for a violation."""
    start = model.start()
    graph = Graph(model, [start], [(0, "")])
    numbers = {start: 0}
    for number, world in enumerate(graph.worlds):
        last = ""
        try:
            for edge in model.edges(world):
                last = edge.label
                _visit(graph, numbers, number, edge)
        except Violation as violation:
            raise Found(str(violation), [*graph.trace(number), f"after {last}"]) from violation
        if len(graph.worlds) > most:
            raise AssertionError(f"more than {most} worlds")
    return graph


def _visit(graph: Graph, numbers: dict[World, int], source: int, edge: Edge) -> None:
    graph.edges += 1
    target = numbers.get(edge.world)
    if target is None:
        graph.model.check(edge.world)
        target = numbers[edge.world] = len(graph.worlds)
        graph.worlds.append(edge.world)
        graph.came_from.append((source, edge.label))
    if edge.kind not in (FAULT, LOSS):
        graph.sources.append(source)
        graph.targets.append(target)
        graph.timers.append(edge.kind == TIMER)


def prove(model: Model, *, by_timers: bool) -> Graph:
    """Explores and checks that an end stays reachable, with the help of timers or without."""
    graph = explore(model)
    stuck = graph.stuck(timers=by_timers)
    if stuck is not None:
        raise Found("no end is reachable", [*graph.trace(stuck), str(describe(graph, stuck))])
    return graph


def describe(graph: Graph, number: int) -> tuple[object, ...]:
    world = graph.worlds[number]
    return (world, *(graph.model.lane(lane) for lane in world.lanes))
