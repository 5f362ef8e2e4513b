"""`trtmesh import-triton`: the configuration of a mesh that serves the models of a Triton model repository."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from trtmesh.chassis.config_file import read_config_file
from trtmesh.chassis.errors import ModelUnusable, SettingsError, StartupError
from trtmesh.chassis.quoting import escaped
from trtmesh.cli.mesh_settings import Flags, config_file_of, load_mesh_settings
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.session import FAILED, OK

if TYPE_CHECKING:
    from trtmesh.tools.triton_import import Conversion, Finding

STANDARD_OUTPUT = "-"

SHOWN_NAMES = 4
"""Names of values with one fate that a line shows; the others are counted."""

MATTERS = {
    "decoupled_mode": "false until then: no streams",
    "gpu_device_ids": "one device until then: the CPU, or --device",
}
"""Placeholders whose default may not be what a repository is for, and that default."""


class Backend(Enum):
    """What computes in the engines of the mesh."""

    TORCH = "torch"
    TENSORRT_LLM = "tensorrt_llm"


def import_triton(
    repository: Annotated[Path, typer.Argument(help="Directory whose subdirectories are models.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DIR",
            help="Hugging Face directory of the engine of model NAME, without NAME of all models. Needed if the"
            " repository has none; repeatable.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Device of all engines, such as cuda:0, or a GPU-... or MIG-... of nvidia-smi -L; default"
            " gpu_device_ids of each."
        ),
    ] = "",
    backend: Annotated[
        Backend,
        typer.Option(
            help="Backend of all engines: the embedded one, each engine on one GPU, or TensorRT-LLM, each on all"
            " gpu_device_ids of an instance.",
        ),
    ] = Backend.TORCH,
    fill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY:VALUE,...",
            help="Values for placeholders ${KEY} of the configurations, as fill_template.py takes them; repeatable.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="File to write; `-` is standard output.")] = Path(
        "mesh.yaml"
    ),
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each value, and one at the end.")
    ] = False,
) -> None:
    """Write the configuration of a mesh with the models of a Triton model REPOSITORY under their names.

    Reports on every value: carried over, replaced by something better, unsupported and why, or unset; then how many
    models are served, what is refused, and what is left to fill in.
    Nothing of the repository is executed. Then: trtmesh up --config mesh.yaml

    Exit status: 0 every model is served, 1 some are not, 2 wrong usage or an unreadable repository, 4 none is served.
    """
    tell = say if str(output) == STANDARD_OUTPUT else put
    try:
        name = "" if backend is Backend.TORCH else backend.value
        conversion = _convert(repository, _model_directories(model or ()), device, fill, name)
        if conversion.served:
            _write(output, conversion, f"trtmesh import-triton {repository}", replace=force)
        if json:
            _tell_json(conversion, output, tell)
        else:
            _tell_text(conversion, tell)
        _check_served(conversion)
    except StartupError as error:
        say_error(str(error))
        raise typer.Exit(error.exit_status) from error
    if not json and tell is put:
        tell(f"wrote {output}: trtmesh up --config {output}")
    raise typer.Exit(FAILED if conversion.unserved else OK)


@contextmanager
def imported_repository(flags: Flags) -> Iterator[Flags]:
    """The flags of a stack, with a generated configuration file for its `triton_model_repo`, if any."""
    settings = load_mesh_settings(flags)
    if settings.triton_model_repo is None:
        yield flags
        return
    given = {"": Path(settings.model[0])} if settings.model else {}
    backend = Backend.TENSORRT_LLM.value
    spread = backend if settings.backend == backend else ""
    conversion = _convert(settings.triton_model_repo, given, backend=spread)
    _tell_text(conversion, say)
    _check_served(conversion)
    config = config_file_of(flags)
    own = read_config_file(Path(config)) if config else {}
    with TemporaryDirectory(prefix="trtmesh-") as directory:
        file = Path(directory) / "mesh.yaml"
        file.write_text(_as_yaml(_merged(conversion.sections, own)), encoding="utf-8")
        yield {**flags, "config": str(file)}


def _convert(
    repository: Path,
    models: Mapping[str, Path],
    device: str = "",
    fill: Sequence[str] | None = None,
    backend: str = "",
) -> Conversion:
    # The models of the Triton door take a tenth of a second to import.
    from trtmesh.tools.triton_import import convert_repository, parse_values

    values = parse_values(fill) if fill else None
    return convert_repository(repository, models, device, values, backend)


def _check_served(conversion: Conversion) -> None:
    if not conversion.served:
        raise ModelUnusable("no model of the repository is served; the list has the reasons")


def _model_directories(texts: Sequence[str]) -> dict[str, Path]:
    given: dict[str, Path] = {}
    for text in texts:
        name, equals, directory = text.rpartition("=")
        if name in given:
            raise SettingsError(f"--model names {name or 'a directory for all'!r} twice")
        if equals and not name:
            raise SettingsError(f"--model is {text!r} but must be DIR or NAME=DIR")
        given[name] = Path(directory)
    return given


def _write(output: Path, conversion: Conversion, command: str, *, replace: bool) -> None:
    text = f"# Written by `{command}`.\n{_as_yaml(conversion.sections)}"
    if str(output) == STANDARD_OUTPUT:
        put(text, end="")
        return
    try:
        with output.open("w" if replace else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SettingsError(
            f"{output} exists; --output names another file, --force replaces it"
        ) from None
    except OSError as error:
        raise SettingsError(f"cannot write {output}: {error.strerror}") from error


def _as_yaml(sections: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(sections), sort_keys=False, allow_unicode=True))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges mappings at every depth; `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(known, value)
        else:
            merged[key] = value
    return merged


def _tell_text(conversion: Conversion, tell: Callable[[str], None]) -> None:
    """Prints a paragraph for each model, with its unset values on one line for each consequence, and a summary."""
    for model, group in groupby(conversion.findings, key=lambda finding: finding.model):
        tell(f"{escaped(model)}:")
        unset: dict[str, list[str]] = {}
        for finding in group:
            if finding.outcome.name == "UNSET":
                unset.setdefault(finding.text, []).append(finding.what)
            else:
                tell(f"  {_as_line(finding)}")
        for text, names in unset.items():
            tell(escaped(f"  {'unset':<12}  {_folded([*dict.fromkeys(names)])}: {text}"))
    for line in _summary(conversion):
        tell(escaped(line))


def _folded(names: Sequence[str]) -> str:
    """The first names, and how many others there are."""
    if len(names) <= SHOWN_NAMES:
        return ", ".join(names)
    return (
        f"{', '.join(names[:SHOWN_NAMES])} and {len(names) - SHOWN_NAMES} more (--json names all)"
    )


def _summary(conversion: Conversion) -> Iterator[str]:
    """How many models are served, what is refused, and what is left to fill in."""
    served, unserved = conversion.served, conversion.unserved
    yield f"{len(served)} of {len(served) + len(unserved)} models are served"
    for name, reason in unserved.items():
        yield f"  not {name}: {reason}"
    lost = [
        finding
        for finding in conversion.findings
        if finding.outcome.name == "UNSUPPORTED" and finding.model not in unserved
    ]
    tensors: list[str] = []
    settings: list[str] = []
    for finding in lost:
        is_tensor = finding.what.partition(".")[0] in ("input", "output")
        name = finding.value if finding.what == "input" else finding.what.removeprefix("output.")
        (tensors if is_tensor else settings).append(f"{name} of {finding.model}")
    if tensors:
        yield f"  refused in requests: {', '.join(tensors)}"
    if settings:
        yield f"  without a counterpart here: {', '.join(settings)}"
    if conversion.unfilled:
        matter = [f"{key} ({MATTERS[key]})" for key in MATTERS if key in conversion.unfilled]
        others = len(conversion.unfilled) - len(matter)
        keys = ", ".join([*matter, *([f"{others} whose defaults serve"] if others else [])])
        yield f"  to fill in with --fill KEY:VALUE,...: {keys}"


def _as_line(finding: Finding) -> str:
    value = f" = {finding.value}" if finding.value else ""
    return escaped(f"{finding.outcome.value:<12}  {finding.what}{value}: {finding.text}")


def _tell_json(conversion: Conversion, output: Path, tell: Callable[[str], None]) -> None:
    for finding in conversion.findings:
        fields = {name: getattr(finding, name) for name in ("model", "what", "value", "text")}
        outcome = finding.outcome.name.lower()
        tell(json_module.dumps({"event": "value", "outcome": outcome, **fields}))
    end = {
        "served": list(conversion.served),
        "unserved": dict(conversion.unserved),
        "unfilled": list(conversion.unfilled),
    }
    file = str(output) if conversion.served else None
    tell(json_module.dumps({"event": "written", "file": file, **end}))
