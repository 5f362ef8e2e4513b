"""Settings of the torch backend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from trtmesh.chassis.device_names import DeviceNames, Devices
from trtmesh.chassis.settings import Settings
from trtmesh.engine.backends.settings import AdapterSettings, KvCacheSettings, LimitSettings

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TorchKvCacheSettings(KvCacheSettings):
    """Size of the KV cache, and reuse of its blocks. The lowest limit applies. Without one, the cache takes 1 GiB on a
    CPU and 0.9 of the free memory elsewhere, but no more than limits.max_batch_size sequences of full length need."""

    free_memory_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Most memory, as a share of the memory free after the model is loaded; 0 sets no limit."""
    tokens_per_block: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens per KV block."""


class HostCacheSettings(Settings):
    """Host memory for cached blocks evicted from the KV cache, of retention priority 35 (the default) and above."""

    bytes: Annotated[int, Field(ge=0)] = 0
    """Size in bytes; 0 keeps no evicted blocks."""


class TorchBatchingSettings(Settings):
    """Start of sequences, and the tokens of a step."""

    policy: Literal["max_utilization", "guaranteed_no_evict", "static_batch"] = "max_utilization"
    """max_utilization starts a sequence when the present tokens fit the KV cache, and pauses the newest sequence when
    blocks run out. guaranteed_no_evict starts a sequence only when the longest form fits. static_batch does so too, but
    only after the end of the previous batch; otherwise sequences join and leave at every step."""
    max_step_tokens: Count = 512
    """Most tokens in a step, but at least one for every sequence in the batch."""
    chunked_context: bool = True
    """Whether a prompt may take several steps; if not, prompts longer than max_step_tokens are refused."""

    @property
    def is_static(self) -> bool:
        """Whether a batch starts only after the end of the previous batch."""
        return self.policy == "static_batch"

    @property
    def never_pauses(self) -> bool:
        """Whether a started sequence runs to the end."""
        return self.policy != "max_utilization"


class TorchAdapterSettings(AdapterSettings):
    """LoRA adapters in host memory and in the slots of the device."""

    host_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Most host memory in bytes for adapters, in the type of the activations; the longest unused are evicted. 0 refuses
    adapters."""
    prefetch_directory: Path | None = None
    """Directory whose subdirectories are adapters to load before the worker is ready, in PEFT's format or as
    TensorRT-LLM's arrays. The name of a subdirectory is the adapter's number, or its name."""


class TorchSettings(Settings):
    """Device, weights and decoding."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache; auto is float32 on a CPU and the model's own elsewhere."""
    device: Devices = DeviceNames("cpu")
    """Device in PyTorch's words, such as cpu or cuda:0, or a GPU-... or MIG-... as `nvidia-smi -L` prints it; auto is
    the GPU where the kernels run on one, else the CPU. Several, such as cuda:0,cuda:1, are ranks that share the model:
    each computes a part of every layer. cpu,cpu is for tests."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of a CPU operation; 0 means OMP_NUM_THREADS where set, or what suits the model: one for every 100 MB of
    weights, within the physical cores that the affinity mask and the cgroup leave, shared among ranks and the engines
    of `trtmesh up`. Their waiting threads sleep, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise."""
    batch_invariant: bool = False
    """Whether the tokens of a sequence depend on nothing else that the worker computes, at the price of speed; needs a
    CPU, or a GPU on which the kernels run. If not, rounding depends on the batch, and changes some tokens that nearly
    tie with others."""
    drafts: Literal["off", "ngram", "suffix", "model"] = "off"
    """Source of draft tokens, which the model verifies several at a time: ngram repeats what followed the last tokens
    earlier in the same sequence, suffix also in finished sequences of the same salt and adapter, model is the smaller
    model of draft_model. Tokens stay the same; how many drafts pay is measured, down to none. Needs a single device."""
    draft_model: Path | None = None
    """Directory of the model for drafts, with the tokenizer of the other."""
    normalize_log_probs: bool = False
    """Default of output.normalize_log_probs: whether log-probabilities count only choosable tokens."""
    kv_cache: TorchKvCacheSettings = TorchKvCacheSettings()
    host_cache: HostCacheSettings = HostCacheSettings()
    batching: TorchBatchingSettings = TorchBatchingSettings()
    limits: LimitSettings = LimitSettings()
    adapters: TorchAdapterSettings = TorchAdapterSettings()

    @model_validator(mode="after")
    def _has_its_draft_model(self) -> Self:
        if (self.drafts == "model") != (self.draft_model is not None):
            raise ValueError("drafts is model exactly where draft_model is set")
        return self
