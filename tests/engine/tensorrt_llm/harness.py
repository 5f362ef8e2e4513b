"""The backend over the stand-in, and what the stand-in saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.backend_lab import Lab, Outcome, config_of
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backend import BackendInfo, StepOutput, Submission
from trtmesh.engine.backends.tensorrt_llm.backend import TensorRtLlmBackend
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings

DEMO = Path(__file__).parents[3] / "models" / "demo"
VOCABULARY = 6144
PROMPT = [9, 40, 41, 42, 9, 43, 44, 45, 46]


def backend(model_dir: Path = DEMO, /, **settings: Any) -> TensorRtLlmBackend:
    return TensorRtLlmBackend(model_dir, TensorRtLlmSettings.model_validate(settings))


def executor() -> Any:
    """The newest executor of the stand-in in this process."""
    import tensorrt_llm._stand_in.machine as machine

    return machine.EXECUTORS[-1]


def watch(on: Lab, see: Callable[[StepOutput], object]) -> None:
    """Shows every further step of the backend."""
    backend = on.backend
    assert isinstance(backend, TensorRtLlmBackend)
    deliver = backend._deliver

    def seen(step: StepOutput) -> None:
        see(step)
        deliver(step)

    backend._deliver = seen


def info_of(on: Lab) -> BackendInfo:
    """What the backend said of itself at its start."""
    backend = on.backend
    assert isinstance(backend, TensorRtLlmBackend)
    return backend._info


def last_call() -> dict[str, Any]:
    """Arguments of the last call of the library."""
    call: dict[str, Any] = executor().calls[-1]
    return call


def last_params() -> Any:
    return last_call()["sampling_params"]


async def run(on: Lab, prompt: Sequence[int] = PROMPT, **options: Any) -> list[Outcome]:
    return await on.run(prompt, config_of(options))


async def tokens(on: Lab, prompt: Sequence[int] = PROMPT, **options: Any) -> list[int]:
    """The tokens of an item with one sequence."""
    (outcome,) = await run(on, prompt, **options)
    assert outcome.end is not None
    assert outcome.end.error is None, outcome.end.error
    return outcome.token_ids


async def submit(
    on: Lab, tokens: Sequence[int], config: GenerationConfig, **fields: Any
) -> Outcome:
    """Runs an item of one sequence with more than a prompt, such as emitted tokens."""
    key = len(on.outcomes)
    names = {"request_id": f"item-{key}", "batch_index": 0, "sequence_index": 0}
    given: dict[str, Any] = {**names, "emitted_tokens": 0, **fields}
    item = Submission(keys=(key,), token_ids=list(tokens), config=config, **given)
    on.outcomes[key] = Outcome()
    on.backend.submit(item)
    (outcome,) = await on.ended([key])
    return outcome
