"""`trtmesh build`: models in the formats of TensorRT-LLM, from one plan."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from trtmesh.chassis.errors import SettingsError, StartupError
from trtmesh.chassis.model_dir import check_model_dir
from trtmesh.chassis.quoting import escaped
from trtmesh.cli.output import put, say_error
from trtmesh.cli.session import FAILED, OK, run
from trtmesh.tools.engine_build.commands import config_command, source_of, steps_of
from trtmesh.tools.engine_build.mesh_file import mesh_file_of, mesh_sections, write_mesh_file
from trtmesh.tools.engine_build.model_facts import ModelFacts, read_facts
from trtmesh.tools.engine_build.outputs import is_done
from trtmesh.tools.engine_build.plan_file import BuildPlan, ModelPlan, read_plan
from trtmesh.tools.engine_build.report import dry_run, in_order
from trtmesh.tools.engine_build.runner import Runner, check_tools, locked, run_guarded
from trtmesh.tools.engine_build.steps import Step
from trtmesh.tools.engine_build.variants import Variant, variants_of


def build(
    plan: Annotated[Path, typer.Argument(help="YAML file of models, precisions and shapes.")],
    *,
    only_show: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the commands and the expected sizes; run nothing."),
    ] = False,
) -> None:
    """Download, quantize, convert and build models for TensorRT-LLM, and write the configuration of a mesh for each.

    A second run continues after the last whole step. Then: trtmesh up --config OUTPUT/mesh/VARIANT.yaml

    Exit status: 0 all is built, 1 a step failed, 2 wrong plan, 130 Ctrl-C.
    """
    run(_build(plan, only_show=only_show))


async def _build(file: Path, *, only_show: bool) -> int:
    plan = read_plan(file)
    if only_show:
        facts = [_local_facts(plan, model) for model in plan.models]
        for line in dry_run(plan, _planned(plan, facts)):
            put(escaped(line))
        return OK
    # SIGTERM ends the tools as Ctrl-C does.
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    try:
        async with locked(plan.output) as lock:
            return await _make(plan, lock)
    except OSError as error:
        raise StartupError(f"{error.filename or plan.output}: {error.strerror}") from error


def _planned(plan: BuildPlan, facts: Iterable[ModelFacts]) -> Mapping[Variant, Step | None]:
    variants = [each for index, fact in enumerate(facts) for each in variants_of(plan, index, fact)]
    return steps_of(plan, variants)


async def _make(plan: BuildPlan, lock: int) -> int:
    # Each model is known before the first weights arrive, so that no hour is lost on an impossible plan.
    facts = [await _facts(plan, model, lock) for model in plan.models]
    last = _planned(plan, facts)
    steps = in_order(list(last.values()))
    check_tools([step for step in steps if not is_done(step)])
    runner = Runner(plan.output / "logs", lock, plan.parallel, put, say_error)
    await runner.run(steps)
    for variant, step in last.items():
        if step is None or runner.is_made(step):
            mesh_file = mesh_file_of(plan, variant)
            write_mesh_file(mesh_file, mesh_sections(plan, variant, step))
            put(f"wrote {mesh_file}: trtmesh up --config {mesh_file}")
    return FAILED if runner.failed else OK


def _known_config(plan: BuildPlan, model: ModelPlan) -> Path | None:
    """The config.json of a model that is here. Raises SettingsError where the plan names another file that is not."""
    if model.config is not None and not model.config.is_file():
        place = f"models[{plan.models.index(model)}] ({model.name})"
        raise SettingsError(
            f"{place}: config is {str(model.config)!r}, which is no file; fetch it, or leave config out"
        )
    places = (model.config, source_of(plan, model) / "config.json")
    return next((file for file in places if file is not None and file.is_file()), None)


def _local_facts(plan: BuildPlan, model: ModelPlan) -> ModelFacts:
    file = _known_config(plan, model)
    if file is None and model.hub is not None:
        raise SettingsError(
            f"{model.name} is not downloaded yet, so its sizes are unknown; set config to a config.json of {model.hub}"
        )
    return read_facts(file or source_of(plan, model) / "config.json")


async def _facts(plan: BuildPlan, model: ModelPlan, lock: int) -> ModelFacts:
    """The facts of a model; fetches its config.json first if it is not here."""
    if model.directory is not None:
        check_model_dir(model.directory)
    if model.hub is None or _known_config(plan, model) is not None:
        return _local_facts(plan, model)
    log = plan.output / "logs" / f"config-{model.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=plan.output, prefix=".config-") as directory:
        command = config_command(plan, model, Path(directory))
        if which(command[0]) is None:
            raise SettingsError(f"{command[0]!r} is not on PATH; set tools.hub")
        with log.open("wb") as stream:
            status = await run_guarded(command, stream, lock, lambda: None)
        if status:
            raise StartupError(f"cannot fetch config.json of {model.hub}; see {log}")
        return read_facts(Path(directory) / "config.json")
