"""Values for the placeholders of templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.commands import trtmesh
from cli.triton_import.importing import convert
from compat.repository import FILLED, five_models
from e2e.mesh import DEMO
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.triton_import.filling import fill, parse_values, placeholders


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("a:1,b:two words", {"a": "1", "b": "two words"}),
        ("a:", {"a": ""}),
        (r"gpu_device_ids:0\,1;2\,3", {"gpu_device_ids": "0,1;2,3"}),
        # Split at commas, then at colons: each removes a level of escapes.
        (r"path:c\\:/x", {"path": "c:/x"}),
    ],
)
def test_values_are_parsed_as_by_upstream(argument: str, values: dict[str, str]) -> None:
    assert parse_values([argument]) == values


@pytest.mark.parametrize("argument", ["", "a", "a:b:c", "a:1,", r"path:c\:/x"])
def test_wrong_values_are_refused(argument: str) -> None:
    with pytest.raises(SettingsError, match="must be KEY:VALUE"):
        parse_values([argument])


def test_values_of_several_options_are_joined() -> None:
    assert parse_values(["a:1", "b:2,a:1"]) == {"a": "1", "b": "2"}
    with pytest.raises(SettingsError, match="two values: '1' and '2'"):
        parse_values(["a:1", "a:2"])


def test_placeholders_without_a_value_stay() -> None:
    text = "${a} $b ${c} ${max_queue_size}"
    assert fill(text, {"a": "1", "b": "2"}) == "1 2 ${c} 0"
    assert placeholders("${a} $b # ${c}") == {"a", "b", "c"}


def unfilled(directory: Path) -> Path:
    """The templates as they come."""
    return five_models(directory, {key: f"${{{key}}}" for key in FILLED})


VALUES = (
    "triton_backend:tensorrtllm,triton_max_batch_size:8,decoupled_mode:True,max_beam_width:2,"
    "batching_strategy:inflight_fused_batching,engine_dir:/engines/llama,gpu_device_ids:1\\,2"
)


def test_filled_templates_are_imported(tmp_path: Path) -> None:
    conversion = convert(
        unfilled(tmp_path / "models"), values=parse_values([f"{VALUES},tokenizer_dir:{DEMO}"])
    )
    models = conversion.sections["router"]["triton"]["models"]
    assert (models["ensemble"]["max_batch_size"], models["ensemble"]["decoupled"]) == (8, True)
    assert models["tensorrt_llm"]["max_beam_width"] == 2
    assert conversion.sections["mesh"]["devices"] == {"demo": ["cuda:1"]}
    assert "lora_prefetch_dir" in conversion.unfilled
    assert not {"engine_dir", "max_queue_size", "tokenizer_dir"} & set(conversion.unfilled)


def test_key_of_no_template_is_refused_with_the_key_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'max_beam_with'.*did you mean max_beam_width\?"):
        convert(unfilled(tmp_path / "models"), values={"max_beam_with": "2"})


def test_command_fills_and_names_the_rest(tmp_path: Path) -> None:
    directory = str(unfilled(tmp_path / "models"))
    file = tmp_path / "mesh.yaml"
    given = ("--fill", VALUES, "--fill", f"tokenizer_dir:{DEMO}", "--output", str(file))
    result = trtmesh("import-triton", directory, *given)
    assert result.returncode == 0, result.stderr
    as_json = trtmesh("import-triton", directory, *given, "--force", "--json")
    unfilled_keys = json.loads(as_json.stdout.splitlines()[-1])["unfilled"]
    assert "lora_prefetch_dir" in unfilled_keys
    assert "engine_dir" not in unfilled_keys
    # Those that matter are filled.
    rest = f"  to fill in with --fill KEY:VALUE,...: {len(unfilled_keys)} whose defaults serve"
    assert rest in result.stdout.splitlines()
    assert trtmesh("import-triton", directory, "--fill", "engine").returncode == 2
