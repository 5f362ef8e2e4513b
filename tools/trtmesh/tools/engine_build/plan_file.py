"""The plan of a build: models, precisions and shapes, in one YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from trtmesh.chassis.config_file import load_yaml, suggestion
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.model_dir import HUB_NAME
from trtmesh.chassis.settings import Settings
from trtmesh.chassis.validation import joined, problem_of
from trtmesh.tools.engine_build.precisions import (
    Dtype,
    Flow,
    KvCache,
    Precision,
    Weights,
    usual_dtype,
)

MAX_PLAN_BYTES = 2**20
MAX_VARIANTS = 1024
"""Most combinations of a model's lists."""

RELEASES = ((1, 2), (1, 3), (1, 4))
"""Releases of TensorRT-LLM whose commands are known."""
LAST_TENSORRT = (1, 2)
"""The last release with the TensorRT-engine flow."""


def _listed(value: object) -> object:
    """Takes a single value for a list of one."""
    return value if isinstance(value, list | tuple) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("has a value twice")
    return values


Count = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Counts = Annotated[
    tuple[Count, ...],
    BeforeValidator(_listed),
    AfterValidator(_distinct),
    Field(min_length=1, max_length=32),
]
Word = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
Command = Annotated[tuple[Word, ...], BeforeValidator(_listed), Field(min_length=1, max_length=64)]
"""A program, or a list of a program and its first arguments."""


def _release(text: str) -> str:
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\w+)?", text)
    if match is None or (int(match[1]), int(match[2])) not in RELEASES:
        known = ", ".join(f"{major}.{minor}" for major, minor in RELEASES)
        raise ValueError(f"must be a release of {known}, such as '1.2.1'")
    return text


def _hub_name(text: str) -> str:
    if not HUB_NAME.fullmatch(text):
        raise ValueError("must be OWNER/NAME")
    return text


class Gpu(Settings):
    """The GPUs that serve the models."""

    architecture: Literal[80, 86, 89, 90, 100, 103, 120]
    """Compute capability without its dot: 80 and 86 Ampere, 89 Ada, 90 Hopper, 100 to 120 Blackwell."""
    memory_gib: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Memory of one GPU; weights that do not fit are refused."""


class Tools(Settings):
    """The programs of the steps. Each is a program, or a list of a program and its first arguments."""

    hub: Command = ("hf",)
    """Downloads models."""
    python: Command = ("python3",)
    """Runs the scripts, with TensorRT-LLM installed."""
    trtllm_build: Command = ("trtllm-build",)
    """Compiles engines."""
    examples: Path = Path("/app/tensorrt_llm/examples")
    """Directory `examples` of TensorRT-LLM's release, with quantization/quantize.py and the converters."""
    hf_ptq: Path = Path("/opt/TensorRT-Model-Optimizer/examples/llm_ptq/hf_ptq.py")
    """Script of ModelOpt that quantizes for the PyTorch flow."""


class Calibration(Settings):
    """Calibration of quantized precisions. Unset leaves it to the tool; what a tool lacks is refused."""

    dataset: Word | None = None
    """Name of a data set, or its directory."""
    samples: Count | None = None
    """Number of samples."""
    tokens: Count | None = None
    """Tokens of the longest sample."""
    batch_size: Count | None = None
    """Samples at the same time."""

    @property
    def given(self) -> Mapping[str, str]:
        return {name: str(value) for name, value in self if value is not None}


class PrecisionPlan(Settings):
    """A precision: the word for the weights, or a mapping."""

    weights: Weights
    """Of the linear layers."""
    kv_cache: KvCache = KvCache.AUTO
    """`auto` is the dtype."""
    dtype: Dtype | None = None
    """Of the rest; unset means bf16, and fp16 for int8_smoothquant."""

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: object) -> object:
        return {"weights": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if not self.weights.is_quantized and self.dtype not in (None, usual_dtype(self.weights)):
            raise ValueError(f"weights are {self.weights}, so dtype is too; leave it out")
        return self

    @property
    def precision(self) -> Precision:
        return Precision(self.weights, self.kv_cache, self.dtype or usual_dtype(self.weights))


class Lengths(Settings):
    """Longest sequences of a variant."""

    input: Count
    """Tokens of the longest prompt."""
    output: Count
    """Most new tokens."""

    @property
    def total(self) -> int:
        return self.input + self.output


class ModelPlan(Settings):
    """A model, and the lists whose combinations are built."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}$")]
    """Names the directories of the model."""
    hub: Annotated[str, AfterValidator(_hub_name)] | None = None
    """Repository OWNER/NAME of the Hugging Face Hub; or else `directory`."""
    revision: Annotated[str, Field(pattern=r"^[\w./][\w./-]*$")] | None = None
    """Branch, tag or commit of the repository; unset means `main`."""
    directory: Path | None = None
    """Local directory of the model."""
    config: Path | None = None
    """A config.json for sizes before the download."""
    precisions: Annotated[
        tuple[PrecisionPlan, ...], BeforeValidator(_listed), Field(min_length=1, max_length=32)
    ]
    """See below."""
    tensor: Counts = (1,)
    """Ranks that divide each layer."""
    pipeline: Counts = (1,)
    """Ranks that divide the layers among them."""
    expert: Counts = (1,)
    """Of the tensor ranks, those that divide the experts among them; for mixtures of experts."""
    lengths: Annotated[
        tuple[Lengths, ...], BeforeValidator(_listed), Field(min_length=1, max_length=32)
    ]
    """See below."""
    batch_sizes: Counts
    """Most sequences of a step."""
    max_num_tokens: Count = 8192
    """Most tokens of a step."""
    beam_width: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Most beams of a request."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.hub is None) == (self.directory is None):
            raise ValueError("needs hub or directory, one of them")
        if self.directory is not None:
            for name in ("revision", "config"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} has no effect on a local directory")
        return self

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        names = [each.precision.name for each in self.precisions]
        if len(set(names)) < len(names):
            raise ValueError("precisions has a value twice")
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError("lengths has a value twice")
        lists = (self.precisions, self.tensor, self.pipeline, self.expert, self.lengths)
        count = len(self.batch_sizes)
        for each in lists:
            count *= len(each)
        if count > MAX_VARIANTS:
            raise ValueError(f"has {count} combinations, but at most {MAX_VARIANTS} are allowed")
        return self


class BuildPlan(Settings):
    """What `trtmesh build` makes. Paths are relative to the working directory."""

    release: Annotated[str, AfterValidator(_release)]
    """Release of TensorRT-LLM, in quotes: '1.2.1'."""
    flow: Flow = Flow.PYTORCH
    """`pytorch`, or `tensorrt` for compiled engines, of release 1.2 alone."""
    output: Path
    """Directory of all results."""
    gpu: Gpu
    """See below."""
    tools: Tools = Tools()
    """See below."""
    calibration: Calibration = Calibration()
    """See below."""
    parallel: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Steps at the same time; steps share the GPUs they see."""
    build_workers: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """GPUs of one `trtllm-build`."""
    models: Annotated[tuple[ModelPlan, ...], Field(min_length=1, max_length=64)]
    """See below."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [model.name.lower() for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError("models has a name twice")
        if self.flow is Flow.TENSORRT and self.minor_release > LAST_TENSORRT:
            raise ValueError(
                f"flow is tensorrt, but release {self.release} has no TensorRT engines; 1.2 is the last that has"
            )
        if self.flow is Flow.PYTORCH and self.build_workers != 1:
            raise ValueError(
                "build_workers has no effect on the pytorch flow, which compiles nothing"
            )
        return self

    @property
    def minor_release(self) -> tuple[int, int]:
        major, minor, *_ = self.release.split(".")
        return int(major), int(minor)


def read_plan(file: Path) -> BuildPlan:
    """Reads and validates a plan. Raises SettingsError that names the file and the setting."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_PLAN_BYTES + 1)
        if len(data) > MAX_PLAN_BYTES:
            raise SettingsError(
                f"{file} is larger than {MAX_PLAN_BYTES} bytes, the limit of a plan"
            )
        content = load_yaml(data.decode())
    except OSError as error:
        raise SettingsError(f"cannot read the plan {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"the plan {file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"the plan {file} must be a mapping")
    try:
        return BuildPlan.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(map(_describe, error.errors()))
        raise SettingsError(f"{file}: {problems}") from error


def _describe(error: Mapping[str, Any]) -> str:
    place = dotted(error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{place} is no setting{suggestion(str(error['loc'][-1]), _NAMES)}"
    problem = problem_of(error)
    if error["type"] == "missing":
        return f"{place} {problem}"
    if isinstance(error["input"], dict):
        return f"{place}: {problem}" if place else problem
    return joined(f"{place} is {error['input']!r}", problem)


def dotted(path: tuple[int | str, ...]) -> str:
    """The name of a setting: models[0].tensor[1]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


_NAMES = {
    name
    for kind in (BuildPlan, ModelPlan, PrecisionPlan, Lengths, Gpu, Tools, Calibration)
    for name in kind.model_fields
}
