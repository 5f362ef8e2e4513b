from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml
from trtmesh.chassis.adapter_content import FILE_NAMES
from trtmesh.chassis.cores import physical_cores
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.chassis.settings import load_settings, split_commas
from trtmesh.cli.mesh_settings import MeshSettings, config_file_of, load_mesh_settings
from trtmesh.cli.plan import Plan, ServiceSettingsGiven, demo_model
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.links.local import LOCAL
from trtmesh.tokenizer.settings import TokenizerSettings
from trtmesh.v1 import generation_pb2 as pb

REPOSITORY = Path(__file__).parents[2]
WITHOUT_ADAPTERS = REPOSITORY / "models" / "demo-draft"
GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "GPU-00000000-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-f3b23c1c-9b4d-5d0a-8c4b-1a2b3c4d5e6f"


def flags_of(arguments: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_default_model_is_the_demo_model() -> None:
    assert demo_model() == REPOSITORY / "models" / "demo"
    (tokenizer,) = Plan(MeshSettings(tokenizers=1), None).tokenizers()
    assert flags_of(tokenizer.arguments)["--model-dir"] == str(demo_model())


def test_routers_have_their_tokenizers_inside(tmp_path: Path) -> None:
    plan = Plan(MeshSettings(routers=2, max_message_bytes=2**27), None)
    assert plan.tokenizers() == []
    for router in plan.routers([], ["e:1"]):
        assert flags_of(router.arguments)["--tokenizers"] == LOCAL
        own = load_settings(TokenizerSettings, [], router.environment)
        assert (own.model_dir, own.max_message_bytes) == (demo_model(), 2**27)
    (beside,) = Plan(MeshSettings(tokenizers=1), None).routers(["t:1"], ["e:1"])
    assert beside.environment == {}
    file = tmp_path / "mesh.yaml"
    file.write_text("tokenizer: {model_dir: a}\nengine: {model_dir: b}\n")
    (named,) = Plan(MeshSettings(), str(file)).routers([], ["e:1"])
    assert named.environment == {}


def test_one_process_is_a_router_with_the_rest_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = MeshSettings(one_process=True, backend="torch", devices={"demo": ("cpu",)})
    plan = Plan(settings, None)
    assert (plan.tokenizers(), plan.engines()) == ([], [])
    (router,) = plan.routers([], [])
    assert (router.name, router.service) == ("router-0", "router")
    command = router.command(router.ports)
    assert command[1:3] == ["-m", "trtmesh.cli.one_process"]
    assert flags_of(tuple(command[3:]))["--engines"] == ""
    engine = load_settings(EngineSettings, [], router.environment)
    assert (engine.worker, engine.backend, engine.model_dir) == ("engine-0", "torch", demo_model())
    assert str(engine.torch.device) == "cpu"
    assert engine.torch.adapters.host_bytes > 1 << 20
    assert router.environment["OMP_NUM_THREADS"] == "1"
    assert load_settings(TokenizerSettings, [], router.environment).model_dir == demo_model()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((each, "2") for each in ("routers", "engines", "tokenizers", "prefill", "decode")),
        ("engines_at", "vllm://10.0.0.7:50051"),
        ("backend", "tensorrt_llm"),
        ("model", f"{demo_model()},{WITHOUT_ADAPTERS}"),
        ("devices", '{"demo": ["cpu", "cpu"]}'),
        ("devices", '{"demo": ["cuda:0,cuda:1"]}'),
    ],
)
def test_part_without_a_place_in_one_process_is_refused(name: str, value: str) -> None:
    settings = load_mesh_settings({"one_process": "true", name: value})
    with pytest.raises(SettingsError, match="has no place in one process") as refused:
        Plan(settings, None)
    assert refused.value.setting == f"mesh.{name}"


def test_one_process_has_one_engine_whatever_the_command_would_start() -> None:
    settings = load_mesh_settings({"one_process": "true"}, {"engines": "2", "log_level": "error"})
    assert (settings.engines, settings.log_level) == (1, "error")


def test_several_models_have_tokenizers_of_their_own(tmp_path: Path) -> None:
    settings = MeshSettings(model=(str(demo_model()), str(WITHOUT_ADAPTERS)))
    models = [flags_of(each.arguments)["--model-dir"] for each in Plan(settings, None).tokenizers()]
    assert models == [str(demo_model()), str(WITHOUT_ADAPTERS)]
    one_inside = MeshSettings(model=settings.model, tokenizers=0)
    with pytest.raises(SettingsError, match=r"is 0, but .* serves one model, and the stack has 2"):
        Plan(one_inside, None)


def test_every_process_ends_with_its_supervisor() -> None:
    plan = Plan(MeshSettings(engines=2, tokenizers=2, routers=2), None)
    processes = [*plan.tokenizers(), *plan.engines(), *plan.routers(["t:1"], ["e:1"])]
    assert [process.name for process in processes] == [
        "tokenizer-0", "tokenizer-1", "engine-0", "engine-1", "router-0", "router-1",
    ]  # fmt: skip
    assert {flags_of(p.arguments)["--stop-on-stdin-eof"] for p in processes} == {"true"}


def test_command_line_runs_the_service_with_this_python() -> None:
    (router,) = Plan(MeshSettings(), None).routers(["t:1", "t:2"], ["e:1"])
    python, dash_m, module, *flags = router.command(router.ports)
    assert (python, dash_m, module) == (sys.executable, "-m", "trtmesh.router")
    assert flags_of(tuple(flags)) == {
        "--host": "127.0.0.1",
        "--stop-on-stdin-eof": "true",
        "--grace-seconds": "30.0",
        "--adapters-roots": str(REPOSITORY / "models" / "demo-adapters"),
        "--tokenizers": "t:1,t:2",
        "--engines": "e:1",
        "--port": "8001",
        "--http-port": "8000",
        "--metrics-port": "8002",
        "--admin-port": "8003",
    }


def test_unset_settings_are_left_to_the_services() -> None:
    (engine,) = Plan(MeshSettings(), None).engines()
    assert not {"--backend", "--log-level"} & set(engine.arguments)
    settings = MeshSettings(backend="simulated", log_level="debug", metrics_port=9000)
    (engine,) = Plan(settings, None).engines()
    flags = flags_of(engine.arguments)
    assert (flags["--backend"], flags["--log-level"]) == ("simulated", "debug")
    assert engine.ports == {"port": 0, "metrics_port": 0}
    (router,) = Plan(settings, None).routers([], [])
    assert router.ports["metrics_port"] == 9000


def test_ports_may_be_taken_away() -> None:
    settings = MeshSettings.model_validate(
        {"http_port": "none", "metrics_port": "none", "routers": 2}
    )
    for router in Plan(settings, None).routers([], []):
        assert (router.ports["http_port"], router.ports["metrics_port"]) == (None, None)
        flags = flags_of(tuple(router.command(router.ports)[3:]))
        assert (flags["--http-port"], flags["--metrics-port"]) == ("none", "none")
    (engine,) = Plan(settings, None).engines()
    assert engine.ports["metrics_port"] is None


def test_several_models_are_named_to_the_router_and_told_apart(tmp_path: Path) -> None:
    one, two, again = tmp_path / "one", tmp_path / "two", tmp_path / "other" / "one"
    for each in (one, two, again):
        each.mkdir(parents=True)
    (router,) = Plan(MeshSettings(model=(str(two), str(one))), None).routers([], [])
    assert flags_of(router.arguments)["--models"] == "two,one"
    (router,) = Plan(MeshSettings(model=(str(two),)), None).routers([], [])
    assert "--models" not in router.arguments
    with pytest.raises(SettingsError, match="has two directories called 'one'"):
        Plan(MeshSettings(model=(str(one), str(again))), None)
    named = tmp_path / "mesh.yaml"
    named.write_text("engine: {model: same}")
    with pytest.raises(SettingsError, match="would name all 2 models"):
        Plan(MeshSettings(model=(str(one), str(two))), str(named))


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # A file without blocks.
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(2**40)
    cores = physical_cores()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    for engines in (1, 64):
        plan = Plan(MeshSettings(model=(str(tmp_path),), engines=engines), None)
        threads = {"OMP_NUM_THREADS": str(max(1, cores // engines))}
        assert [each.environment for each in plan.engines()] == [threads] * engines
    (small,) = Plan(MeshSettings(), None).engines()
    assert small.environment == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (told,) = Plan(MeshSettings(), None).engines()
    assert told.environment == {"OMP_NUM_THREADS": "7"}


def test_each_model_has_an_engine_on_each_of_its_devices(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    devices = {"one": ("cuda:0", "cuda:2"), "two": ("cpu",)}
    settings = MeshSettings(model=(str(one), str(two)), devices=devices)
    flags = [flags_of(engine.arguments) for engine in Plan(settings, None).engines()]
    assert [(each["--model-dir"], each["--torch-device"]) for each in flags] == [
        (str(one), "cuda:0"), (str(one), "cuda:2"), (str(two), "cpu"),
    ]  # fmt: skip
    partly = MeshSettings(model=(str(one), str(two)), devices={"two": ("cuda:1",)}, engines=2)
    flags = [flags_of(engine.arguments) for engine in Plan(partly, None).engines()]
    assert [each.get("--torch-device") for each in flags] == [None, None, "cuda:1"]
    with pytest.raises(SettingsError, match=r"mesh\.devices names 'three'.* one, two"):
        Plan(settings.model_copy(update={"devices": {"three": ("cpu",)}}), None)
    with pytest.raises(SettingsError, match=r"mesh\.engines has no effect"):
        Plan(MeshSettings(model=(str(one),), devices={"one": ("cpu",)}, engines=2), None)


def roles_of(settings: MeshSettings) -> list[str | None]:
    return [flags_of(engine.arguments).get("--role") for engine in Plan(settings, None).engines()]


def test_engines_of_roles_come_before_mixed_ones() -> None:
    both = MeshSettings(prefill=1, decode=2)
    assert roles_of(both) == ["prefill", "decode", "decode"]
    assert roles_of(MeshSettings(prefill=1)) == ["prefill", None]
    assert roles_of(MeshSettings(prefill=1, decode=1, engines=2)) == [
        "prefill",
        "decode",
        None,
        None,
    ]
    names = [engine.name for engine in Plan(both, None).engines()]
    assert names == ["engine-0", "engine-1", "engine-2"]


def test_each_model_has_the_roles(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    settings = MeshSettings(model=(str(tmp_path / "one"), str(tmp_path)), prefill=1, decode=1)
    assert roles_of(settings) == ["prefill", "decode"] * 2


def test_devices_take_roles_in_order(tmp_path: Path) -> None:
    model = tmp_path / "one"
    model.mkdir()
    devices = {"one": ("cuda:0", "cuda:1", "cuda:2")}
    settings = MeshSettings(model=(str(model),), devices=devices, prefill=1, decode=1)
    flags = [flags_of(engine.arguments) for engine in Plan(settings, None).engines()]
    assert [(each.get("--role"), each["--torch-device"]) for each in flags] == [
        ("prefill", "cuda:0"), ("decode", "cuda:1"), (None, "cuda:2"),
    ]  # fmt: skip
    with pytest.raises(SettingsError) as refused:
        Plan(settings.model_copy(update={"decode": 3}), None)
    assert refused.value.setting == "mesh.devices"


def test_role_is_set_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTMESH_ENGINE_ROLE", "decode")
    assert roles_of(MeshSettings()) == [None]
    with pytest.raises(SettingsError, match="TRTMESH_ENGINE_ROLE"):
        Plan(MeshSettings(prefill=1), None)


def test_tensorrt_llm_engines_see_the_gpus_of_their_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "one"
    model.mkdir()
    groups = ("cuda:0,cuda:1", "cuda:2, cuda:3")
    settings = MeshSettings(model=(str(model),), backend="tensorrt_llm", devices={"one": groups})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engines = Plan(settings, None).engines()
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in engines] == ["0,1", "2,3"]
    assert all("--torch-device" not in each.arguments for each in engines)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,6,7")
    engines = Plan(settings, None).engines()
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in engines] == ["GPU-a,GPU-b", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SettingsError, match="names cuda:2, but CUDA_VISIBLE_DEVICES has 2 GPUs"):
        Plan(settings, None).engines()
    for wrong in ("cpu", "cuda", "cuda:0,cuda:0", f"{GPU},{GPU}"):
        given = settings.model_copy(update={"devices": {"one": (wrong,)}})
        with pytest.raises(SettingsError, match="must name different GPUs"):
            Plan(given, None)
    simulated = settings.model_copy(update={"backend": "simulated"})
    with pytest.raises(SettingsError, match="the backend simulated runs on one device"):
        Plan(simulated, None)


def test_torch_engines_get_all_devices_of_their_entry(tmp_path: Path) -> None:
    model = tmp_path / "one"
    model.mkdir()
    groups = ("cuda:0,cuda:1", "cuda:2")
    settings = MeshSettings(model=(str(model),), backend="torch", devices={"one": groups})
    engines = Plan(settings, None).engines()
    flags = [each.arguments[each.arguments.index("--torch-device") + 1] for each in engines]
    assert flags == [*groups]


def test_engines_run_on_gpus_by_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "one"
    model.mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = MeshSettings(model=(str(model),), backend="torch", devices={"one": (GPU, MIG)})
    flags = [flags_of(engine.arguments) for engine in Plan(settings, None).engines()]
    assert [each["--torch-device"] for each in flags] == [GPU, MIG]
    spread = MeshSettings(
        model=(str(model),), backend="tensorrt_llm", devices={"one": (f"{GPU},{OTHER}", "cuda:1")}
    )
    assert visible_of(spread) == [f"{GPU},{OTHER}", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{OTHER},{GPU}")
    assert visible_of(spread) == [f"{GPU},{OTHER}", GPU]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{OTHER},{MIG}")
    with pytest.raises(SettingsError, match=f"names {GPU}, but CUDA_VISIBLE_DEVICES has 2 GPUs"):
        Plan(spread, None).engines()


def visible_of(settings: MeshSettings) -> list[str]:
    return [each.environment["CUDA_VISIBLE_DEVICES"] for each in Plan(settings, None).engines()]


@pytest.mark.parametrize("backend", ["torch", "tensorrt_llm"])
@pytest.mark.parametrize("entry", ["0,1", "gpu0", "GPU-8932f937", "cuda:0,"])
def test_an_entry_that_is_no_name_of_a_device_is_refused(
    tmp_path: Path, backend: Literal["torch", "tensorrt_llm"], entry: str
) -> None:
    model = tmp_path / "one"
    model.mkdir()
    settings = MeshSettings(model=(str(model),), backend=backend, devices={"one": (entry,)})
    with pytest.raises(
        SettingsError, match=f"has '{entry}' for one, which must be auto"
    ) as refused:
        Plan(settings, None)
    assert refused.value.setting == "mesh.devices"


def test_devices_are_json_in_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    given = '{"one": "cuda:0,cuda:1", "two": ["cpu"]}'
    expected = {"one": ("cuda:0", "cuda:1"), "two": ("cpu",)}
    assert load_mesh_settings({"devices": given}).devices == expected
    monkeypatch.setenv("TRTMESH_MESH_DEVICES", given)
    assert load_mesh_settings({}).devices == expected
    with pytest.raises(SettingsError, match="devices"):
        load_mesh_settings({"devices": "cuda:0"})


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="nowhere"):
        Plan(MeshSettings(model=(str(tmp_path / "nowhere"),)), None)


def test_file_reaches_every_process_and_may_name_the_models(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(
        "mesh: {engines: 2, tokenizers: 1}\ntokenizer: {model_dir: a}\nengine: {model_dir: b}\n"
    )
    settings = load_mesh_settings({"config": str(file)})
    plan = Plan(settings, str(file))
    for process in (*plan.tokenizers(), *plan.engines()):
        assert flags_of(process.arguments)["--config"] == str(file)
        assert "--model-dir" not in process.arguments
    assert len(plan.engines()) == 2


def test_environment_may_name_the_models_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("tokenizer: {model_dir: a}\n")
    monkeypatch.setenv("TRTMESH_CONFIG", str(file))
    with pytest.raises(SettingsError, match=r"tokenizer\.model_dir is set but engine\.model_dir"):
        Plan(MeshSettings(), config_file_of({}))
    monkeypatch.setenv("TRTMESH_ENGINE_MODEL_DIR", "b")
    plan = Plan(MeshSettings(tokenizers=1), config_file_of({}))
    for process in (*plan.tokenizers(), *plan.engines()):
        assert "--model-dir" not in process.arguments


@pytest.mark.parametrize(
    ("content", "variable", "complaint"),
    [
        ("router: {port: 1}", "", r"router\.port of the configuration file .* set mesh\.port"),
        (
            "router: {http: {port: none}}",
            "",
            r"router\.http\.port of the configuration file .* set mesh\.http_port",
        ),
        ("engine: {worker: w}", "", r"engine\.worker of the configuration file .* leave it out"),
        ("", "TRTMESH_TOKENIZER_GRACE_SECONDS", "TOKENIZER_GRACE_SECONDS .* mesh.grace_seconds"),
    ],
)
def test_overruled_setting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, variable: str, complaint: str
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(content)
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=complaint):
        Plan(MeshSettings(), str(file))


@pytest.mark.parametrize("service", ["tokenizer", "engine", "router"])
def test_settings_given_by_the_stack_are_refused_elsewhere(service: str) -> None:
    """Except settings given only if the section `mesh` sets them, or beside those given elsewhere."""
    plan = Plan(MeshSettings(model=(str(WITHOUT_ADAPTERS),), tokenizers=1), None)
    processes = {
        "tokenizer": plan.tokenizers(),
        "engine": plan.engines(),
        "router": plan.routers(["t:1"], ["e:1"]),
    }
    (process,) = processes[service]
    _, _, _, *flags = process.command(process.ports)
    given = {flag.removeprefix("--").replace("-", "_") for flag in flags[::2]} - {"model_dir"}
    for name in given:
        variable = f"TRTMESH_{service}_{name}".upper()
        with pytest.raises(SettingsError, match=variable):
            ServiceSettingsGiven({}, {variable: "1"}).refuse_overruled()


def test_defaults_of_a_command_have_the_lowest_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("mesh: {engines: 4}\n")
    monkeypatch.setenv("TRTMESH_MESH_TOKENIZERS", "3")
    defaults = {"engines": "2", "tokenizers": "2", "routers": "2", "log_level": "warning"}
    settings = load_mesh_settings({"config": str(file), "routers": "5"}, defaults)
    assert (settings.engines, settings.tokenizers, settings.routers) == (4, 3, 5)
    assert settings.log_level == "warning"


def test_flags_win_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("mesh: {engines: 2, tokenizers: 2, routers: 2}\n")
    monkeypatch.setenv("TRTMESH_MESH_TOKENIZERS", "3")
    monkeypatch.setenv("TRTMESH_MESH_ENGINES", "3")
    settings = load_mesh_settings({"config": str(file), "engines": "4"})
    assert (settings.engines, settings.tokenizers, settings.routers) == (4, 3, 2)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("mesh: {engins: 2}", r"mesh\.engins = 2 is no setting; did you mean engines\?"),
        ("mash: {}", "unknown section 'mash'; did you mean mesh"),
        ("mesh: {engines: 0}", r"mesh\.engines is 0"),
    ],
)
def test_mistake_in_the_file_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=complaint):
        load_mesh_settings({"config": str(file)})


ADAPTERS_ON = "--torch-adapters-host-bytes"


def adapters_in(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        for file in FILE_NAMES[pb.ADAPTER_FORMAT_PEFT]:
            (folder / name / file).touch()
    return folder


def test_demo_model_has_its_adapters_and_engines_room_for_them() -> None:
    for settings in (MeshSettings(), MeshSettings(model=(str(demo_model()),))):
        plan = Plan(settings, None)
        assert [path.name for path in plan.adapters] == ["docstrings", "unit-tests"]
        (engine,) = plan.engines()
        assert int(flags_of(engine.arguments)[ADAPTERS_ON]) > 1 << 20


def test_other_models_have_adapters_by_the_setting(tmp_path: Path) -> None:
    none = Plan(MeshSettings(model=(str(WITHOUT_ADAPTERS),)), None)
    assert none.adapters == ()
    assert ADAPTERS_ON not in none.engines()[0].arguments
    folder = adapters_in(tmp_path, "b", "a")
    plan = Plan(MeshSettings(model=(str(WITHOUT_ADAPTERS),), adapters=folder), None)
    assert plan.adapters == [folder / "a", folder / "b"]
    assert plan.first_model == WITHOUT_ADAPTERS.name
    assert ADAPTERS_ON in plan.engines()[0].arguments


def test_given_memory_of_engines_decides_about_the_demo_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRTMESH_ENGINE_TORCH_ADAPTERS_HOST_BYTES", "0")
    plan = Plan(MeshSettings(), None)
    assert plan.adapters == ()
    assert ADAPTERS_ON not in plan.engines()[0].arguments


@pytest.mark.parametrize("content", ["/a, /b", ["/a", "/b"]])
def test_given_roots_of_adapters_stay(content: object, tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(yaml.safe_dump({"router": {"adapters": {"roots": content}}}))
    (router,) = Plan(MeshSettings(), str(file)).routers([], [])
    roots = split_commas(flags_of(router.arguments)["--adapters-roots"])
    assert roots == (str(REPOSITORY / "models" / "demo-adapters"), "/a", "/b")


def test_unreadable_directory_of_adapters_is_refused_by_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        Plan(MeshSettings(adapters=tmp_path / "none"), None)
    assert refused.value.setting == "mesh.adapters"


def test_stack_of_engines_elsewhere_starts_none() -> None:
    plan = Plan(MeshSettings(engines_at=("vllm://10.0.0.7:50051", "10.0.0.8:9000")), None)
    assert plan.engines() == []
    assert plan.adapters == ()
    (router,) = plan.routers(["t:1"], [])
    flags = flags_of(router.arguments)
    assert flags["--engines"] == "vllm://10.0.0.7:50051,10.0.0.8:9000"
    assert flags["--foreign-model-dirs"] == str(demo_model())


def test_engines_elsewhere_stand_beside_own_ones() -> None:
    settings = MeshSettings(engines=2, engines_at=("vllm://10.0.0.7:50051",))
    plan = Plan(settings, None)
    assert len(plan.engines()) == 2
    (router,) = plan.routers(["t:1"], ["e:1", "e:2"])
    assert flags_of(router.arguments)["--engines"] == "e:1,e:2,vllm://10.0.0.7:50051"
