"""Layers of settings, and messages that name field, source and value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import Field
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.settings import (
    CommaList,
    ServiceSettings,
    Settings,
    iterate_leaves,
    load_settings,
)


class Cache(Settings):
    blocks: Annotated[int, Field(ge=1)] = 10
    """Blocks, 100 % of them."""


class Example(ServiceSettings):
    section: ClassVar[str] = "engine"

    name: str
    peers: CommaList = ()
    cache: Cache = Cache()


def load(*argv: str, file: Path | None = None, **environ: str) -> Example:
    config = ["--config", str(file)] if file else []
    return load_settings(Example, ["--name", "n", *config, *argv], environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.yaml"
    path.write_text("engine: {cache: {blocks: 2}, port: 5, peers: [a, b]}\nrouter: {anything: 1}\n")
    return path


def test_each_layer_covers_the_one_below(file: Path) -> None:
    assert load().cache.blocks == 10
    assert load(file=file).cache.blocks == 2
    env = {"TRTMESH_ENGINE_CACHE_BLOCKS": "3"}
    assert load(file=file, **env).cache.blocks == 3
    assert load("--cache-blocks", "4", file=file, **env).cache.blocks == 4
    assert load("--cache-blocks", "4", file=file, **env).port == 5


def test_setting_is_spelt_as_it_was_given(file: Path) -> None:
    name, env = "engine.cache.blocks", {"TRTMESH_ENGINE_CACHE_BLOCKS": "3"}
    assert load().spelling(name) == name
    assert load(file=file).spelling(name) == f"{file}: {name}"
    assert load(file=file, **env).spelling(name) == "TRTMESH_ENGINE_CACHE_BLOCKS"
    assert load("--cache-blocks", "4", file=file, **env).spelling(name) == "--cache-blocks"


def test_flags_from_a_parent_have_the_dotted_name(file: Path) -> None:
    flags = ("--stop-on-stdin-eof", "true", "--cache-blocks", "4")
    assert load(*flags, file=file).spelling("engine.cache.blocks") == "engine.cache.blocks"
    assert load(*flags, file=file).spelling("engine.port") == f"{file}: engine.port"


def test_file_may_be_named_by_the_environment(file: Path) -> None:
    assert load(TRTMESH_CONFIG=str(file)).port == 5


def test_lists_come_with_commas_or_as_lists(file: Path) -> None:
    assert load("--peers", "a, b,").peers == ("a", "b")
    assert load(file=file).peers == ("a", "b")


def test_variables_of_others_are_left_alone(file: Path) -> None:
    environ = {"TRTMESH_ROUTER": "a:1", "TRTMESH_IMAGE": "x", "TRTMESH_TOKENIZER_ANYTHING": "5"}
    assert load_settings(Example, ["--name", "n"], environ) == load()


def test_settings_are_frozen_and_closed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().port = 7
    with pytest.raises(ValueError, match="Extra inputs"):
        Cache.model_validate({"block": 1})


def test_every_leaf_has_a_path() -> None:
    paths = [path for path, _ in iterate_leaves(Example)]
    assert ("cache", "blocks") in paths
    assert ("host",) in paths


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (
            ["--port", "70000"],
            {},
            "flag --port is '70000' but must be at most 65535",
        ),
        (
            [],
            {"TRTMESH_ENGINE_CACHE_BLOCKS": "0"},
            ("environment variable TRTMESH_ENGINE_CACHE_BLOCKS is '0' but must be at least 1"),
        ),
        (
            [],
            {"TRTMESH_ENGINE_PROT": "5"},
            (
                "environment variable TRTMESH_ENGINE_PROT='5' is no setting of the engine;"
                " did you mean TRTMESH_ENGINE_PORT?"
            ),
        ),
        (
            [],
            {"TRTMESH_ENGIN_PORT": "5"},
            (
                "environment variable TRTMESH_ENGIN_PORT names no service;"
                " did you mean TRTMESH_ENGINE_...?"
            ),
        ),
        (
            ["--prot", "5"],
            {},
            "unrecognized arguments: --prot 5; `python -m trtmesh.engine --help` lists the flags",
        ),
        (
            ["--config", "/nowhere/mesh.yaml"],
            {},
            "cannot read the configuration file /nowhere/mesh.yaml: No such file or directory",
        ),
    ],
)
def test_messages_of_flags_and_environment(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(Example, ["--name", "n", *argv], environ)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "engine: {cache: {blocks: 0}}",
            "file {file}: engine.cache.blocks is 0 but must be at least 1",
        ),
        (
            "engine: {cache: {block: 1}}",
            "engine.cache.block = 1 is no setting; did you mean cache.b",
        ),
        ("engine: {cache: 5}", "engine.cache = 5 is no setting"),
        (
            "engin: {}",
            "an unknown section 'engin'; did you mean engine?; sections are engine, mesh",
        ),
        ("engine: [1]", "section 'engine' of {file} must be a mapping, not [1]"),
        ("- 1", "the configuration file {file} must be a mapping of sections"),
        ("engine: {cache: {blocks: 1, blocks: 2}}", "'blocks' stands here twice"),
        ("a: [", "the configuration file {file} is not YAML"),
    ],
)
def test_messages_of_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        load(file=path)
    assert message.format(file=path) in str(caught.value)


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("")
    assert load(file=path) == load()


def test_missing_setting_is_named_in_every_way() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(Example, [], {})
    assert "engine.name is missing" in str(caught.value)
    assert "--name or TRTMESH_ENGINE_NAME" in str(caught.value)


def test_several_errors_are_reported_together() -> None:
    with pytest.raises(SettingsError, match=r"--port.*; .*--cache-blocks"):
        load("--port", "x", "--cache-blocks", "y")


def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--cache-blocks" in text
    assert "100 % of them" in text
    assert "(default 10)" in text


def test_help_lists_the_allowed_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "(one of debug, info, warning, error; default info)" in text
