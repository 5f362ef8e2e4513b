"""Expected outputs: their files, and what counts as equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from trtmesh.tools.triton.expected import Expected, match_of, write_outputs
from trtmesh.tools.triton.results import Output


@pytest.mark.parametrize(
    ("prompt", "expected", "output", "match"),
    [
        ([1], [5, 6], [5, 6], 1),
        ([1], [1, 5, 6], [5, 6], 1),
        ([1], [5, 6], [1, 5, 6], 1),
        ([5], [5, 6], [5, 6], 1),
        ([1], [5, 6, 7, 8], [5, 6, 0, 8], 0.75),
        ([1], [5, 6], [5, 6, 7, 8], 0.5),
        ([1], [], [], 1),
        ([1], ["a"], "a", 0),
        ("a", "bc", "abc", 1),
        ("a", "bc", "bd", 0.5),
        ("a", [5], [5], 1),
    ],
)
def test_match(prompt: Output, expected: Output, output: Output, match: float) -> None:
    assert match_of(prompt, expected, output) == pytest.approx(match)


def test_least_match_decides() -> None:
    for least, differences in ((0.75, 0), (0.76, 1)):
        expected = Expected([[1, 2, 3, 4]], least)
        assert len(expected.differences([[9]], [[1, 2, 3, 5]])) == differences


def test_expected_output_of_a_prompt_counts_for_its_sequences() -> None:
    expected = Expected(["a", "b"], 1)
    assert expected.differences(["p", "q"], ["a", "a", "b", "b"]) == []
    (difference,) = expected.differences(["p", "q"], ["a", "b", "b", "b"])
    assert difference.startswith("output 1 ")


def test_numbers_of_outputs_must_agree() -> None:
    for count in (1, 3):
        assert Expected(["a"] * count, 1).differences(["p", "q"], ["a"] * 2)
    assert Expected(["a"], 1).differences(["p"], [])


@pytest.mark.parametrize(
    ("name", "outputs"),
    [("a.csv", [[1, 2], [3]]), ("a.json", ["a\n", "é"]), ("a.json", [[1, 2], [3]])],
)
def test_saved_outputs_are_the_expected_ones(
    tmp_path: Path, name: str, outputs: list[Output]
) -> None:
    write_outputs(tmp_path / name, outputs)
    assert Expected.read(tmp_path / name, 1).outputs == outputs


def test_texts_are_not_saved_as_csv(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="json"):
        write_outputs(tmp_path / "a.csv", ["a"])


@pytest.mark.parametrize(("name", "content"), [("a.txt", "a"), ("a.json", "{}"), ("a.json", "[1]")])
def test_other_files_are_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(typer.BadParameter, match=name):
        Expected.read(tmp_path / name, 1)
