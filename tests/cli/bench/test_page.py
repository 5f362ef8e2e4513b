"""The page of a report: complete, well-formed, and nothing of a stranger's text is markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from cli.bench.runs import HEADER, answer
from cli.bench.test_reports import HOSTILE, report
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.tools.bench.figures import TOTALS, report_of
from trtmesh.tools.bench.measures import MEASURES
from trtmesh.tools.bench.record import Load, Run
from trtmesh.tools.bench.reports import plots
from trtmesh.tools.bench.reports.page import as_html, templates, timeline
from trtmesh.tools.bench.reports.plots import Band, Plot, Scale, Series, cumulative
from trtmesh.tools.bench.reports.tables import number
from trtmesh.tools.bench.slo import parse_slos

VOID = {"meta"}


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps text by the element that has it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def page() -> str:
    return as_html(report("ttft:100")).decode()


def test_every_figure_and_its_definition_are_on_the_page(page: str) -> None:
    cells = Reader(page).cells

    for run in report("ttft:100").runs:
        for measure in MEASURES:
            seen = run.distributions[measure.tag]
            assert {measure.name, measure.definition, number(seen.avg)} <= {*cells}
            assert {number(each) for each in (*seen.percentiles.values(),)} & {*cells}
        for total in TOTALS:
            if (value := total.of(run)) is not None:
                assert {total.name, total.definition, number(value)} <= {*cells}


def test_nothing_on_the_page_comes_from_elsewhere_or_runs(page: str) -> None:
    seen = Reader(page)

    assert {"script", "link", "img", "iframe", "object", "a"}.isdisjoint(seen.tags)
    names = {name for name, _ in seen.attributes}
    assert {"src", "href", "style"}.isdisjoint(names)
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", page)


def test_a_hostile_error_is_text(page: str) -> None:
    # Its control character by name.
    shown = "error: " + HOSTILE.replace("\x1b", "\\x1b")

    assert shown in Reader(page).cells
    assert "<script" not in page
    assert "\x1b" not in page


def test_hostile_names_are_text() -> None:
    header = replace(HEADER, target=HOSTILE, model=HOSTILE, workload=HOSTILE, command=HOSTILE)
    run = replace(Run(header, (answer(0, (1.0, 2.0)),)), header=header)

    page = as_html(report_of([run, run])).decode()

    assert "script" not in Reader(page).tags
    assert page.count("&lt;script&gt;") >= 4


def test_every_plot_is_an_image_with_a_name(page: str) -> None:
    images = re.findall(r"<svg.*?</svg>", page, re.DOTALL)

    # Of the sweep, of three distributions, and over the time of two runs.
    assert len(images) == 3 + 3 + 2 * 4
    for each in images:
        root = ET.fromstring(each)
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"]
        assert root.findall(".//path") or root.findall(".//circle")


def test_a_disruption_stands_in_the_time_of_its_run(page: str) -> None:
    assert page.count('class="band"') == 4
    assert "kill engine" in page


def test_a_server_that_fell_behind_is_said_to() -> None:
    answers = tuple(
        answer(n, (0.1 + n / 10 * 1.5,), planned_s=n / 10, ended_s=0.1 + n / 10 * 1.5)
        for n in range(400)
    )
    header = replace(HEADER, load=Load("constant", rate=10.0))

    behind = as_html(report_of([Run(header, answers)])).decode()
    closed = as_html(report_of([Run(HEADER, answers)])).decode()

    assert "fell behind" in behind
    assert "fell behind" not in closed


def test_a_run_of_failures_alone_has_a_page() -> None:
    (_, second) = report().runs
    failed = replace(second.run, answers=second.run.answers[-1:])

    page = as_html(report_of([failed], parse_slos(["ttft:1"]))).decode()

    assert "no values" in page
    assert "alert" in page
    Reader(page)


def test_tokens_over_time_add_up_to_those_received() -> None:
    (run, _) = report().runs
    (tokens,) = (plot for plot in timeline(run) if plot.title == "Tokens received")

    points = tokens.series[0].points
    total = sum(value * (after - before) for (before, value), (after, _) in pairwise(points))
    assert total == pytest.approx(200 * 8)


PLACES = st.lists(
    st.tuples(st.floats(allow_nan=True, width=32), st.floats(0, 1e9)), min_size=0, max_size=20
)


@cache
def drawing() -> Any:
    """The macros, which are compiled once."""
    return templates().get_template("plot.html").module


@given(PLACES, st.booleans(), st.booleans(), st.booleans(), st.text(max_size=20))
def test_any_points_and_texts_are_drawn_inside_the_image(
    points: Sequence[tuple[float, float]], line: bool, dots: bool, is_log: bool, text: str
) -> None:
    series = Series(text, points, line, dots, [text])

    plot = Plot(text, text, text, [series], [Band(1, 2, text)], is_log)
    image = drawing().svg(plot, plots).strip()

    if image.startswith("<p"):
        return
    root = ET.fromstring(image)
    for circle in root.findall(".//circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 560
        assert 0 <= float(circle.attrib["cy"]) <= 300
    for path in root.findall(".//path"):
        assert not re.search("nan|inf", path.attrib["d"])


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(4000, 5084, [4000, 4500, 5000]), (1, 1000, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])],
)
def test_a_logarithmic_axis_has_marks_however_narrow(
    low: float, high: float, marks: list[float]
) -> None:
    assert [*Scale(low, high, 0, 100, is_log=True).ticks()] == pytest.approx(marks)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=300))
def test_plots_of_values_conserve_them(values: list[float]) -> None:
    own = np.array(values)

    curve = cumulative(own)

    assert curve[0] == (min(values), 0.0)
    assert curve[-1] == (max(values), 100.0)
    assert list(curve) == sorted(curve)
