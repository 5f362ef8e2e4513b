"""The release of a repository, by the tensors that it declares."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.triton_import.importing import convert, finding
from compat.releases import MODELS, RELEASES, releases_of, tensors
from compat.repository import five_models, of_release, replace
from trtmesh.tools.triton_import import Conversion, Outcome


def release_of(conversion: Conversion) -> str | None:
    found: str | None = conversion.sections["router"]["triton"].get("release")
    return found


def declarations(release: str) -> list[object]:
    return [
        tensors(model, kind, release) for model in MODELS for kind in ("inputs", "outputs")
    ]  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_is_recognised_and_served(tmp_path: Path, release: str) -> None:
    conversion = convert(of_release(tmp_path / "models", release))
    found = release_of(conversion)
    assert found is not None
    # Releases with equal tensors count as the newest of them.
    assert RELEASES.index(found) >= RELEASES.index(release)
    assert declarations(found) == declarations(release)
    assert conversion.unserved == {}
    assert set(conversion.served) == {m for m in MODELS if release in releases_of(m)}
    refused = [f for f in conversion.findings if f.outcome is Outcome.UNSUPPORTED]
    # Preprocessing has no vision encoder's outputs.
    assert not [f for f in refused if "another type" in f.text or "no such input" in f.text]


def test_adapted_templates_are_recognised(tmp_path: Path) -> None:
    directory = of_release(tmp_path / "models", "v0.12.0")
    with (directory / "tensorrt_llm" / "config.pbtxt").open("a") as file:
        file.write('\ninput { name: "own" data_type: TYPE_INT32 dims: 1 optional: true }')
    replace(
        directory,
        "ensemble",
        '"max_tokens" data_type: TYPE_INT32',
        '"max_tokens" data_type: TYPE_INT64',
    )
    conversion = convert(directory)
    assert release_of(conversion) == "v0.12.0"
    outcome, text = finding(conversion, "all models", "tensors")
    assert (outcome, text) == (
        Outcome.CARRIED,
        "router.triton.release: v0.12.0 (2 declarations differ)",
    )


def test_release_of_rewritten_templates_stays_unset(tmp_path: Path) -> None:
    """The samples declare a few of the tensors."""
    assert release_of(convert(five_models(tmp_path / "models"))) is None


def test_first_python_model_is_imported_as_gpt(tmp_path: Path) -> None:
    directory = of_release(tmp_path / "models", "v0.5.0")
    (directory / "tensorrt_llm" / "config.pbtxt").write_text(
        """name: "tensorrt_llm" backend: "python" max_batch_size: 1024
        input { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }
        input { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] }
        input { name: "request_output_len" data_type: TYPE_UINT32 dims: [ -1 ] }
        input { name: "output_log_probs" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
        output { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
        output { name: "log_probs" data_type: TYPE_FP32 dims: [ -1, -1 ] }
        parameters { key: "engine_dir" value { string_value: "/engines/gpt" } }"""
    )
    conversion = convert(directory)
    models = conversion.sections["router"]["triton"]["models"]
    assert models["tensorrt_llm"]["template"] == "gpt"
    assert models["ensemble"]["decoupled"] is False
    assert conversion.unserved == {}
