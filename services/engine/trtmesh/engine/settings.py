"""Settings of an engine process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.engine.backends.foreign.settings import ForeignSettings
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings

# The settings of the torch backend, and with them the package around them, do not import torch.
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.engine.handoff.settings import HandoffSettings

Seconds = Annotated[float, Field(gt=0, le=86400)]


class EngineSettings(SecuredSettings):
    """Settings of an engine process."""

    section: ClassVar[str] = "engine"

    backend: Literal["torch", "tensorrt_llm", "simulated", "foreign"] = "torch"
    """Software that executes the model."""
    worker: str = ""
    """Name of the worker, unique in the fleet; unset makes one from host name and process id."""
    model_dir: Path | None = None
    """Directory of the model; the simulated and the foreign backend need none."""
    model: str = ""
    """Name of the model in requests; unset takes the directory's name, or "simulated"."""
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """Phases of items that this worker computes."""
    load_interval_seconds: Seconds = 0.1
    """Time between two Load events, in seconds."""
    trtllm_service: bool = False
    """Whether gateways may call trtllm.TrtllmService on the same port; needs the extra `gateways`."""
    handoff: HandoffSettings = HandoffSettings()
    torch: TorchSettings = TorchSettings()
    tensorrt_llm: TensorRtLlmSettings = TensorRtLlmSettings()
    simulated: SimulatedSettings = SimulatedSettings()
    foreign: ForeignSettings = ForeignSettings()

    @model_validator(mode="after")
    def _backend_has_the_role(self) -> Self:
        """The library computes prompts for other workers without overlap only, and hands over by its own transfer."""
        if self.backend != "tensorrt_llm" or self.role == "mixed":
            return self
        if not self.tensorrt_llm.hands_over:
            raise ValueError(
                f"role {self.role} needs cache_transceiver_config.backend in tensorrt_llm.options, which moves the KV"
            )
        if self.role == "prefill" and self.tensorrt_llm.overlaps:
            raise ValueError("role prefill needs disable_overlap_scheduler in tensorrt_llm.options")
        return self
