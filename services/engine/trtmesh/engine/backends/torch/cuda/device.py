"""A GPU of NVIDIA with kernels for pages, and captured decode steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.accelerator import KINDS_OF_STEPS, ORDERING, Accelerator
from trtmesh.engine.backends.torch.compute.device import Compute
from trtmesh.engine.backends.torch.compute.memory_probe import StepSize
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.cuda import chunk_graphs, decode_graphs, run_graphs
from trtmesh.engine.backends.torch.cuda.attention import GraphAttention, KernelAttention
from trtmesh.engine.backends.torch.cuda.capturing import Record
from trtmesh.engine.backends.torch.cuda.chunk_graphs import ChunkGraphs
from trtmesh.engine.backends.torch.cuda.decode_graphs import DecodeGraphs
from trtmesh.engine.backends.torch.cuda.experts import KernelExperts
from trtmesh.engine.backends.torch.cuda.kernels.block_copies import copy_blocks
from trtmesh.engine.backends.torch.cuda.kernels.layers import norm, norm_reference
from trtmesh.engine.backends.torch.cuda.kernels.ruled_choice import Workspace
from trtmesh.engine.backends.torch.cuda.kernels.updates import FEW_ROWS, MANY_ROWS
from trtmesh.engine.backends.torch.cuda.layers import (
    KernelHead,
    KernelLayer,
    KernelMlp,
    KernelNorm,
    KernelRotation,
    LayerProducts,
    RotaryTable,
)
from trtmesh.engine.backends.torch.cuda.ruled_choice import RuledChoice
from trtmesh.engine.backends.torch.cuda.ruled_rows import RuledRows
from trtmesh.engine.backends.torch.cuda.run_graphs import RunGraphs
from trtmesh.engine.backends.torch.cuda.runner import GraphRunner
from trtmesh.engine.backends.torch.cuda.step_inputs import (
    MOST_CHUNKS,
    ChunkInputs,
    StepInputs,
)
from trtmesh.engine.backends.torch.cuda.updates import (
    AdaptedSteps,
    KernelUpdates,
    PinnedSlots,
)
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, CopiesBlocks, KvCache
from trtmesh.engine.backends.torch.memory.shortage import shortage
from trtmesh.engine.backends.torch.model.fusing import (
    fuse_experts,
    fuse_layers,
    fuse_norms,
    is_plain,
    replace_layers,
)
from trtmesh.engine.backends.torch.model.lora_layers import Products, SlotMemory, UpdateTable
from trtmesh.engine.backends.torch.model.model import Fitted, Model
from trtmesh.engine.backends.torch.parallel.group import RankGroup
from trtmesh.engine.backends.torch.parallel.layers import add_up
from trtmesh.engine.backends.torch.sampling.choice import Chooser

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Of devices with tensor cores for bfloat16."""

STATIC_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Types of transformers."""

MOST_TABLED_POSITIONS = 2**18

FLOAT_BYTES = 4


class Cuda(Accelerator):
    """Runs models with fused layers and kernels of this package."""

    adds_logs = True
    """Whether kernels compute log-probabilities, with sums in an order that depends on the number of rows."""

    def __init__(self, name: torch.device, group: RankGroup | None = None) -> None:
        """`group` are the ranks of a divided model; None for a whole model."""
        super().__init__(name)
        self._group = group

    def fit(self, module: PreTrainedModel, dtype: torch.dtype) -> Fitted:
        products = LayerProducts(module.device)
        fuse_layers(module, KernelRotation(), KernelMlp, partial(KernelLayer, products))
        fuse_norms(module, KernelNorm)
        fuse_experts(module, KernelExperts)
        untyped: Any = module
        head = untyped.get_output_embeddings()
        if type(head) is nn.Linear:
            replace_layers(module, lambda own: KernelHead(products, head) if own is head else None)
        if self._group:
            add_up(module, self._group)
        return fitted(module, dtype)

    def _kept_bytes(self, model: Model, largest: StepSize) -> int:
        """The logits of each graph, the rules of rows, and what adapters add to steps."""
        run_rows = run_graphs.most_rows(largest.rows) if largest.drafts else 0
        rows = sum(decode_graphs.sizes(largest.rows)) + sum(decode_graphs.sizes(run_rows))
        decoded = rows * model.dtype.itemsize
        chunks = (1 + len(chunk_graphs.sizes(largest.tokens))) * MOST_CHUNKS * FLOAT_BYTES
        choosing = max(largest.rows, MOST_CHUNKS, run_rows)
        meta = torch.device("meta")
        rules = Workspace(largest.rows, choosing, model.vocabulary_size, meta).nbytes
        updates = _updates(model)
        inner = updates.most_bytes(largest.tokens) if updates else 0
        return (decoded + chunks) * model.vocabulary_size + rules + KINDS_OF_STEPS * inner

    @property
    def slot_memory(self) -> SlotMemory:
        return PinnedSlots(self.name)

    def products(self, tables: Collection[UpdateTable], max_tokens: int) -> Products:
        return KernelUpdates(tables, max_tokens)

    @property
    def copies_blocks(self) -> CopiesBlocks:
        return copy_blocks

    def compute(
        self,
        model: Model,
        cache: KvCache,
        tables: BlockTables,
        most_tokens: int,
        *,
        drafts: bool = False,
    ) -> Compute:
        attention = self._attention(cache, tables)
        chooser = Chooser(ORDERING)
        runner = Runner(
            model, cache, tables, attention, chooser, self.release_memory, self._synchronize()
        )
        slots, share, choice = len(tables.rows), None, None
        run_rows = run_graphs.most_rows(slots) if drafts else 0
        rules = RuledRows(slots)
        if self._group:
            # Other ranks know no rules.
            share = self._group.share
        else:
            most = max(slots, MOST_CHUNKS, run_rows)
            work = Workspace(slots, most, model.vocabulary_size, self.name)
            rules = RuledRows(slots, work.words, work.biases, adds_logs=self.adds_logs)
            choice = partial(RuledChoice, rules, work, self._recorder())
        inputs = StepInputs(tables.rows, cache.tokens_per_block, rules, self.name)
        adapted = _adapted(model, slots, FEW_ROWS, slots)
        graphs = DecodeGraphs(
            model, attention, inputs, slots, self._recorder(), choice, share, adapted
        )
        most_chunk = chunk_graphs.sizes(most_tokens)[-1]
        prompts = ChunkInputs(tables.rows, cache.tokens_per_block, most_chunk, rules, self.name)
        adapted = None
        if graphs.take_adapters:
            adapted = _adapted(model, most_chunk, MANY_ROWS, MOST_CHUNKS)
        # In separate memory: a step may launch graphs of both kinds.
        chunks = ChunkGraphs(
            model, attention, prompts, most_tokens, self._recorder(), choice, share, adapted
        )
        runs = None
        if run_rows:
            inputs = StepInputs(tables.rows, cache.tokens_per_block, rules, self.name, run_rows)
            adapted = None
            if graphs.take_adapters:
                adapted = _adapted(model, run_rows, FEW_ROWS, slots)
            runs = RunGraphs(
                model, attention, inputs, run_rows, self._recorder(), choice, None, adapted
            )
        if self._group and not (graphs.are_captured and chunks.are_captured):
            # Ranks computing in different ways would wait for each other's sums.
            raise ModelUnusable(
                f"steps of model type {model.module.config.model_type} cannot be captured on {self.name}, as several"
                " GPUs need; the log has the reason; name one in engine.torch.device"
            )
        return GraphRunner(runner, graphs, chunks, runs, rules, chooser)

    def _attention(self, cache: KvCache, tables: BlockTables) -> GraphAttention:
        return KernelAttention(cache, tables)

    def _synchronize(self) -> Callable[[], None]:
        return partial(torch.cuda.synchronize, self.name)

    def _recorder(self) -> Record:
        return _Recorder(self.name, self._group)


def _updates(model: Model) -> KernelUpdates | None:
    products = model.adapters.products if model.adapters else None
    return products if isinstance(products, KernelUpdates) else None


def _adapted(model: Model, most_rows: int, tile_rows: int, most_chunks: int) -> AdaptedSteps | None:
    """The steps with adapters; None where no graph computes these."""
    updates = _updates(model)
    if updates is None or model.adapters is None:
        return None
    return AdaptedSteps(model.adapters, updates, most_rows, tile_rows, most_chunks)


def fitted(module: PreTrainedModel, dtype: torch.dtype) -> Fitted:
    """A model with replaced layers."""
    plain = is_plain(module)
    if plain:
        _tabulate_positions(module, dtype)
    return Fitted(dtype, plain=plain)


def _tabulate_positions(module: Any, dtype: torch.dtype) -> None:
    """Gives a plain model a table of rotary positions, unless these depend on the length of the sequence."""
    rotary, positions = module.model.rotary_emb, module.config.max_position_embeddings
    if rotary.rope_type in STATIC_ROTATIONS and positions <= MOST_TABLED_POSITIONS:
        module.model.rotary_emb = RotaryTable(rotary, positions, dtype)


class _Recorder:
    """Captures operations as graphs with shared memory, but separate results."""

    def __init__(self, device: torch.device, group: RankGroup | None) -> None:
        """`group` are the ranks for the operations; None without any."""
        self._device = device
        self._group = group
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Kernels are compiled and workspaces allocated outside of the capture.
        untyped: Any = torch.cuda
        stream = untyped.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        if self._group:
            self._group.release_first(graph.reset)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def works(device: torch.device) -> bool:
    """Whether the kernels compile and compute on a device; if not, the log has the reason. Raises the error of a trial
    without memory."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        log.warning("%s has no tensor cores for bfloat16, which the kernels need", device)
        return False
    given = torch.linspace(-1, 1, 64, device=device).view(2, 32)
    weight = torch.linspace(0, 1, 32, device=device)
    try:
        got = norm(given, weight, 1e-5)
        is_right = torch.allclose(got, norm_reference(given, weight, 1e-5), atol=1e-5)
    except Exception as error:
        if shortage(error) is not None:
            raise
        # Another way of computing is chosen.
        log.warning("kernels do not run on %s: %s", device, error)
        return False
    if not is_right:
        log.warning("kernels compute wrong results on %s", device)
    return is_right
