"""Settings of all services: each is described and refuses in its own words, and the pages are current."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from trtmesh.chassis.config_file import LISTS, PATHS
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.settings import ServiceSettings, iterate_leaves, load_settings
from trtmesh.cli.mesh_settings import MeshSettings
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tokenizer.settings import TokenizerSettings

ROOT = Path(__file__).parents[1]
SERVICES: tuple[type[ServiceSettings], ...] = (
    RouterSettings,
    EngineSettings,
    TokenizerSettings,
    MeshSettings,
)


def flag(name: str) -> str:
    return "--" + name.replace(".", "-").replace("_", "-")


def refusal(cls: type[ServiceSettings], *argv: str) -> str | None:
    try:
        load_settings(cls, argv, {})
    except SettingsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("cls", SERVICES)
def test_every_setting_is_described(cls: type[ServiceSettings]) -> None:
    bare = [".".join(path) for path, info in iterate_leaves(cls) if not info.description]
    assert bare == []


@pytest.mark.parametrize("cls", SERVICES)
def test_no_two_settings_have_one_spelling(cls: type[ServiceSettings]) -> None:
    spelt = [flag(".".join(path)) for path, _ in iterate_leaves(cls)]
    assert len(spelt) == len(set(spelt))


@pytest.mark.parametrize("name", ["settings", "metrics", "limits", "build"])
def test_pages_are_current(name: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), (
        f"run `python docs/{name}.py`"
    )


def test_a_router_must_drain_for_longer_than_it_serves_while_draining() -> None:
    with pytest.raises(
        SettingsError, match="min_drain_seconds is 30 but must be below grace_seconds"
    ):
        load_settings(RouterSettings, ["--engines", "a:1", "--min-drain-seconds", "30"])


def test_paths_of_a_file_begin_at_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative ones, in settings of one path, in lists, and in files of addresses; wherever the process runs."""
    folder = tmp_path / "settings"
    folder.mkdir()
    (folder / "mesh.yaml").write_text(
        "mesh: {model: [models/demo, /b], log_dir: ../logs}\n"
        "router: {engines: ['file:engines', 'e:1'], tokenizers: 'file:/etc/t, t:1', adapters: {roots: 'x, /y'},"
        " tls: {certificate: tls.crt}}\n"
        "engine: {model_dir: m}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = ("--config", "settings/mesh.yaml")
    mesh = load_settings(MeshSettings, config, {})
    assert mesh.model == (str(folder / "models/demo"), "/b")
    assert mesh.log_dir == folder / "../logs"
    router = load_settings(RouterSettings, config, {})
    assert router.engines == (f"file:{folder}/engines", "e:1")
    assert router.tokenizers == ("file:/etc/t", "t:1")
    assert router.adapters.roots == (str(folder / "x"), "/y")
    assert router.tls.certificate == folder / "tls.crt"
    assert load_settings(EngineSettings, config, {}).model_dir == folder / "m"
    by_flag = load_settings(MeshSettings, (*config, "--model", "here"), {})
    assert by_flag.model == ("here",)


def test_the_list_of_paths_is_whole() -> None:
    leaves = {
        ".".join((cls.section, *path)): repr(info.annotation)
        for cls in SERVICES
        for path, info in iterate_leaves(cls)
    }
    assert {name for name, kind in leaves.items() if "Path" in kind} == PATHS - LISTS
    assert leaves.keys() >= LISTS
    listed = {name for name, kind in leaves.items() if name.endswith(("_dirs", "roots", "models"))}
    assert listed - LISTS == {"router.triton.models", "router.models"}


def test_messages_have_no_words_of_pydantic() -> None:
    """A value that is wrong in kind, and one that is wrong in size, for every setting."""
    for cls in SERVICES:
        flags = [flag(".".join(path)) for path, _ in iterate_leaves(cls)]
        for value in ("\0", "-1e300", "{"):
            all_wrong = refusal(cls, *(f"{each}={value}" for each in flags)) or ""
            # One that is not refused beside the others may be so alone.
            unnamed = [each for each in flags if f"flag {each} " not in all_wrong]
            alone = [refusal(cls, f"{each}={value}") or "" for each in unnamed]
            for told in (all_wrong, *alone):
                assert "nput should" not in told, told
                assert "alue error" not in told, told
                assert "pathlib" not in told, told
