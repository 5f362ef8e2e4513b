"""The TensorRT-LLM backend: items become calls of the library, and the library's results become steps.

Everything happens on the event loop's thread, but for loading and shutting down the model, files of adapters, and
computations on logits. The library's own processes compute; every live item has a task for reading the results.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trtmesh.chassis import adapter_content
from trtmesh.chassis.block_hashes import root_hash
from trtmesh.chassis.errors import (
    BackendFailed,
    HandoffFailed,
    ModelUnusable,
    SettingsError,
    TrtmeshError,
    UnsupportedField,
    WorkerLost,
)
from trtmesh.chassis.stopping import End
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.admission import admit, check_queue
from trtmesh.engine.backend import (
    AdapterLoad,
    BackendInfo,
    BackendStats,
    Capabilities,
    Deliver,
    Fail,
    HandoffState,
    HeldAdapter,
    Submission,
)
from trtmesh.engine.backends.tensorrt_llm.adapters import AdapterFolder
from trtmesh.engine.backends.tensorrt_llm.arguments import arguments, model_of, target_modules
from trtmesh.engine.backends.tensorrt_llm.calls import Call, Reading, Translator
from trtmesh.engine.backends.tensorrt_llm.errors import of_request
from trtmesh.engine.backends.tensorrt_llm.fields import supported_fields
from trtmesh.engine.backends.tensorrt_llm.handoff import kind_of, state_of
from trtmesh.engine.backends.tensorrt_llm.kv_events import PLAIN, LibraryBlocks, Root
from trtmesh.engine.backends.tensorrt_llm.library import Library, capacity_of, is_dead
from trtmesh.engine.backends.tensorrt_llm.load import Counts, Row, row_of
from trtmesh.engine.backends.tensorrt_llm.model_files import ModelFiles, read_model
from trtmesh.engine.backends.tensorrt_llm.sequences import LibrarySequence, LiveItem, sequences_of
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings
from trtmesh.engine.ledger import Ledger
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
"""Time between two looks at the library's processes."""
QUEUE_SECONDS = 0.2
"""Time for the library's next row, after which a reader begins anew."""
STUCK_SECONDS = 300.0
"""How long sequences may wait without a step before the worker gives up and exits."""

CAPACITY_SECONDS = 10.0
"""Longest wait after the warm-up for the first row, with the size of the KV cache."""
SHUTDOWN_SECONDS = 10.0
"""How long the library may take to shut down."""
WARM_UP_PROMPT = (1, 2, 3, 4)

T = TypeVar("T")


class TensorRtLlmBackend:
    """Implements Backend."""

    def __init__(self, model_dir: Path, settings: TensorRtLlmSettings) -> None:
        """`model_dir` holds config.json and, for routers to compare, the tokenizer."""
        self._model_dir = model_dir
        self._settings = settings
        self._ledger = Ledger[LiveItem]()
        self._counts = Counts()
        self._row = Row()
        self._steps_at_row = 0
        self._changed: dict[LiveItem, None] = {}
        self._flush: asyncio.Handle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._broken = False
        self._closing = False
        self._loading: Future[Any] | None = None
        self._llm: Any = None

    async def start(self, deliver: Deliver, fail: Fail) -> BackendInfo:
        self._deliver, self._fail = deliver, fail
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        model = await asyncio.to_thread(read_model, self._model_dir, settings)
        longest = _longest(settings, model)
        self._adapters = AdapterFolder(settings.adapters, model.config)
        try:
            await asyncio.to_thread(self._adapters.open)
        except OSError as error:
            raise SettingsError(
                f"cannot hold adapters: {error}", setting="engine.tensorrt_llm.adapters.disk_bytes"
            ) from error
        self._loading = _in_thread("tensorrt-llm-load", partial(self._construct, longest))
        self._library, self._llm = await asyncio.wrap_future(self._loading)
        self._adapters.modules = target_modules(settings, self._library)
        self._translator = Translator(self._library, model.vocabulary_size, settings)
        await self._warm_up(model)
        engine = model.engine
        configured = engine.tokens_per_block if engine else settings.tokens_per_block
        tokens_per_block = await self._size_of_cache(longest, configured)
        self._info = _info(settings, model, self._library, longest, self._row, tokens_per_block)
        self._names = LibraryBlocks(tokens_per_block)
        self._accompany(self._watch)
        self._accompany(partial(self._drain, self._llm.get_stats_async, self._take_row))
        if settings.reports_blocks:
            read = self._llm.get_kv_cache_events_async
            self._accompany(partial(self._drain, read, self._take_blocks))
        log.info("TensorRT-LLM %s, %s flow", self._library.release, settings.flow)
        return self._info

    def _construct(self, longest: int) -> tuple[Library, Any]:
        library = Library(self._settings.flow)
        given = arguments(self._settings, longest, library)
        return library, library.construct(model_of(self._settings, self._model_dir), given)

    async def _warm_up(self, model: ModelFiles) -> None:
        """Runs one item to the end, within STUCK_SECONDS: a model that computes nothing must not become ready."""
        width = self._settings.limits.max_beam_width
        beams = {"use_beam_search": True, "best_of": width} if width > 1 else {}
        values = {"max_tokens": 2, "end_id": -1, "ignore_eos": True, "detokenize": False, **beams}
        prompt = [token % model.vocabulary_size for token in WARM_UP_PROMPT]
        deadline = asyncio.timeout(STUCK_SECONDS)
        try:
            async with deadline:
                await self._llm.generate_async(
                    inputs={"prompt_token_ids": prompt},
                    sampling_params=self._library.sampling(values),
                    streaming=False,
                )
        except Exception as error:
            # Broad on purpose: whatever happens, the model does not serve.
            problem = f"{type(error).__name__}: {error}"
            if deadline.expired():
                problem = f"it did not end within {STUCK_SECONDS:g} s"
            raise ModelUnusable(f"TensorRT-LLM does not compute a first item: {problem}") from error

    async def _size_of_cache(self, longest: int, configured: int) -> int:
        """Reads the size of the KV cache into the row, from the library or the first statistics. Returns the tokens of
        a block, as told or else as configured."""
        told = capacity_of(self._llm)
        if told is not None:
            self._row = row_of({"kvCacheStats": told})
        ends_at = time.monotonic() + CAPACITY_SECONDS
        while not self._row.max_blocks and time.monotonic() < ends_at:
            async for row in self._llm.get_stats_async(timeout=QUEUE_SECONDS):
                self._row = row_of(row)
            await asyncio.sleep(QUEUE_SECONDS / 10)
        tokens_per_block = self._row.tokens_per_block or configured
        if not self._row.max_blocks:
            blocks = self._settings.limits.max_batch_size * -(-longest // tokens_per_block)
            log.warning("the library tells no size of its KV cache; %d blocks are assumed", blocks)
            self._row = row_of({"kvCacheStats": {"maxNumBlocks": blocks}})
        return tokens_per_block

    # Items.

    def submit(self, item: Submission) -> None:
        if self._broken:
            raise WorkerLost("the engine has failed and takes no more items")
        rule = admit(item, self._info)
        if item.stop_vocabulary is not None:
            raise UnsupportedField(
                "not supported: TensorRT-LLM knows no texts of tokens; send stop words as ids",
                field="stop_vocabulary",
            )
        running = sum(len(live.sequences) for live in self._items if live.started)
        check_queue(item, self._info, len(self._ledger.live), running)
        adapter = None
        if item.config.lora:
            adapter = self._adapters.store.hold(item.config.lora, len(item.keys))
        try:
            call = self._translator.call(item, rule, adapter.files if adapter else None)
            sequences, size = sequences_of(item), self._info.vocabulary_size
            live = LiveItem(item, rule, call, adapter, sequences, size, self._counts)
            if item.sender_lease_id:
                live.state_of = self._state_of
            complete = rule.end_after(item.token_ids) if item.emitted_tokens else None
            if not complete:
                self._open(live)
        except BaseException:
            # Whatever was raised, no sequence will release it.
            if adapter:
                for _ in item.keys:
                    self._adapters.release(adapter)
            raise
        self._counts.adapter_hits += len(item.keys) if adapter else 0
        for key in item.keys:
            self._ledger.add(key, live)
        if complete:
            # A migrated item that had all its tokens.
            for sequence in list(live.sequences):
                self._end(live, sequence, *complete)
            return
        live.reader = self._loop.create_task(self._read(live))

    def _open(self, live: LiveItem) -> None:
        """Calls the library. Raises TrtmeshError."""
        item = live.item
        try:
            live.result = self._llm.generate_async(**live.call.arguments)
        except Exception as error:
            # Broad on purpose: the library raises whatever its parts raise.
            raise of_request(error, self._library) from error
        self._names.expect(item.token_ids, _root(item, live.call))

    def _state_of(self, params: Any) -> HandoffState:
        return state_of(params, self._library, self._settings.transfer_milliseconds / 1000)

    @property
    def _items(self) -> list[LiveItem]:
        return list(dict.fromkeys(self._ledger.live.values()))

    async def _read(self, live: LiveItem) -> None:
        """Reads the results of an item until all sequences have ended."""
        try:
            async for _ in live.result:
                if live.result.finished:
                    # Newer releases may end an item with an error beside its end.
                    self._check_result(live)
                if live.has_logits and live.result.finished:
                    live.computed = await asyncio.to_thread(
                        live.compute, list(live.result.outputs), list(live.sequences)
                    )
                self._advanced(live, live.advance(time.time_ns()))
                if not live.sequences:
                    return
            self._check_result(live)
            raise BackendFailed("the library ended the item without an end of each sequence")
        except Exception as error:  # noqa: BLE001 - the library raises whatever its parts raise
            self._failed(live, error)

    def _check_result(self, live: LiveItem) -> None:
        """Raises the error that some releases put into the result."""
        if problem := getattr(live.result, "error", None):
            raise self._library.request_error(problem)

    def _advanced(self, live: LiveItem, ended: list[tuple[LibrarySequence, End]]) -> None:
        self._changed[live] = None
        for sequence, end in ended:
            self._end(live, sequence, *end)
        self._flush_soon()

    def _failed(self, live: LiveItem, error: Exception) -> None:
        """An item fails alone, unless the model is gone."""
        # An answer is progress: items that the library refuses one after the other do not make it stand still.
        self._counts.steps += 1
        problem = of_request(error, self._library)
        if self._library.means_death(error) or is_dead(self._llm):
            self._break(BackendFailed(f"TensorRT-LLM is gone: {type(error).__name__}: {error}"))
            return
        halves = live.item.handoff_state or live.item.sender_lease_id
        if halves and not live.started and not isinstance(problem, HandoffFailed):
            problem = HandoffFailed(problem.message)
        for sequence in list(live.sequences):
            self._end(live, sequence, pb.FINISH_REASON_ERROR, error=problem)

    def _end(
        self,
        live: LiveItem,
        sequence: LibrarySequence,
        reason: int,
        stop_token_ids: tuple[int, ...] = (),
        error: TrtmeshError | None = None,
    ) -> None:
        """Ends a sequence; the last sequence of an item ends the call."""
        live.tell(sequence, self._ledger.output)
        live.sequences.remove(sequence)
        self._ledger.end(live.end_of(sequence, reason, stop_token_ids, error))
        if live.adapter:
            self._adapters.release(live.adapter)
        if not live.sequences:
            self._close(live)
        self._flush_soon()

    def _close(self, live: LiveItem) -> None:
        """Forgets the call; an unfinished call is aborted, without waiting."""
        if live.result is not None and not live.result.finished:
            with suppress(Exception):
                live.result.abort()
        if live.reader and live.reader is not asyncio.current_task():
            live.reader.cancel()
        # Its cancellation refers to the item.
        live.reader = None
        self._changed.pop(live, None)

    def stop(self, keys: SequenceOf[int], reason: int) -> None:
        for key in keys:
            live = self._ledger.live.get(key)
            if live is not None:
                sequence = next(each for each in live.sequences if each.key == key)
                together = live.call.reading is Reading.BEAMS
                for each in list(live.sequences) if together else [sequence]:
                    self._end(live, each, reason)

    # Output.

    def _flush_soon(self) -> None:
        """Delivers in the next turn, so that the results of an iteration make a single step."""
        if self._flush is None:
            self._flush = self._loop.call_soon(self._deliver_changes)

    def _deliver_changes(self) -> None:
        self._flush = None
        changed, self._changed = self._changed, {}
        for live in changed:
            for sequence in live.sequences:
                live.tell(sequence, self._ledger.output)
        store = self._adapters.store
        if store.has_news:
            self._ledger.output.adapters += store.take_news()
        # Ends and news alone are no step: those of clients that give up would hide a library that stands still.
        self._counts.steps += bool(self._ledger.output.keys)
        self._deliver(self._ledger.take(self._counts.steps))

    # The library beside the items.

    def _accompany(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(self._loop.create_task(self._guarded(work)))

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a task of the worker's life, whose failure is the worker's."""
        try:
            await work()
        except Exception as error:
            # Broad on purpose: without this task the worker would look healthy.
            log.exception("a task beside the items failed")
            self._break(error)

    async def _drain(
        self,
        read: Callable[..., AsyncIterator[dict[str, Any]]],
        take: Callable[[dict[str, Any]], None],
    ) -> None:
        """Takes the rows of a queue of the library, each row once, until the backend closes.

        An iteration over the queue ends whenever the queue is empty for a while. Waits with a timeout may swallow a
        cancellation there, so `_closing` counts too.
        """
        while not self._closing:
            async for row in read(timeout=QUEUE_SECONDS):
                take(row)
                if self._closing:
                    return
            # Before the first request it ends at once.
            await asyncio.sleep(QUEUE_SECONDS / 10)

    def _take_row(self, row: dict[str, Any]) -> None:
        self._row = row_of(row)
        if self._counts.steps == self._steps_at_row:
            # An iteration without output is progress too, such as a part of a long prompt.
            self._counts.steps += 1
        self._steps_at_row = self._counts.steps

    def _take_blocks(self, event: dict[str, Any]) -> None:
        if events := self._names.translate([event]):
            self._ledger.output.kv_events += events
            self._flush_soon()

    async def _watch(self) -> None:
        """Notices a lost model, or a long time without progress.

        Time without sequences does not count, but does not begin anew either: clients that give up before the limit and
        come back find the same library.
        """
        steps, waited, seen = self._counts.steps, 0.0, time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if is_dead(self._llm):
                raise BackendFailed("TensorRT-LLM has shut down")
            before, seen = seen, time.monotonic()
            if self._counts.steps != steps:
                steps, waited = self._counts.steps, 0.0
            elif self._ledger.live:
                waited += seen - before
            if waited > STUCK_SECONDS:
                raise BackendFailed(f"TensorRT-LLM made no step for {STUCK_SECONDS:g} s")

    def _break(self, error: BaseException) -> None:
        """Ends every sequence, for other workers to continue, and informs the service."""
        if self._broken:
            return
        self._broken = True
        lost = WorkerLost(f"the engine failed: {error}")
        for live in self._items:
            for sequence in list(live.sequences):
                self._end(live, sequence, pb.FINISH_REASON_ERROR, error=lost)
        self._fail(error)

    # Load and adapters.

    def stats(self) -> BackendStats:
        row, counts, store = self._row, self._counts, self._adapters.store
        items = self._items
        total = self._info.total_blocks
        # The last row of a burst still counts its blocks, and no other row follows.
        used = min(total, row.used_blocks) if items else 0
        running = sum(len(live.sequences) for live in items if live.started)
        return BackendStats(
            step_count=counts.steps,
            running_sequences=running,
            waiting_sequences=len(self._ledger.live) - running,
            pending_prompt_tokens=sum(live.pending_prompt_tokens for live in items),
            total_blocks=total,
            used_blocks=used,
            free_blocks=total - used,
            computed_prompt_tokens=counts.computed_prompt_tokens,
            reused_prompt_tokens=counts.reused_prompt_tokens,
            generated_tokens=counts.generated_tokens,
            paused_sequences=row.paused_sequences if items else 0,
            new_blocks=row.new_blocks,
            reused_blocks=row.reused_blocks,
            device_memory_bytes=row.device_bytes,
            pinned_memory_bytes=row.pinned_bytes,
            adapter_slots=self._adapters.slots,
            free_adapter_slots=max(0, self._adapters.slots - len(store.states)),
            adapter_host_bytes=store.limits.host_bytes,
            used_adapter_host_bytes=store.used_bytes,
            adapter_loads=store.loads,
            adapter_evictions=store.evictions,
            adapter_hits=counts.adapter_hits,
            adapter_load_seconds=self._adapters.load_seconds,
        )

    def adapters(self) -> SequenceOf[HeldAdapter]:
        return self._adapters.store.states

    def load_adapter(self, load: AdapterLoad) -> None:
        self._adapters.load(load, self._flush_soon)

    def unload_adapter(self, number: int, version: str, *, unpin: bool) -> None:
        self._adapters.unload(number, version, unpin=unpin)
        self._flush_soon()

    # Handoffs: the library's pools are its own, and it moves the KV itself.

    def drop(self, lease_id: str) -> None:
        """The library has no call for this, and frees the KV after the fetch, or after kv_transfer_timeout_ms."""

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for live in self._items:
            for sequence in list(live.sequences):
                self._end(live, sequence, pb.FINISH_REASON_CANCELLED)
        if self._flush:
            self._flush.cancel()
            self._deliver_changes()
        if self._loading is not None:
            await self._shut_down(self._loading)
        if adapters := self.__dict__.pop("_adapters", None):
            await adapters.close()

    async def _shut_down(self, loading: Future[Any]) -> None:
        """Ends the library's processes. A process that does not end in time is left: this process is about to exit."""

        def shut_down() -> None:
            _, llm = loading.result()
            llm.shutdown()

        ended = asyncio.wrap_future(_in_thread("tensorrt-llm-shutdown", shut_down))
        try:
            await asyncio.wait_for(asyncio.shield(ended), SHUTDOWN_SECONDS)
        except TimeoutError:
            log.warning("TensorRT-LLM did not shut down within %g s", SHUTDOWN_SECONDS)
            ended.cancel()
        except Exception as error:  # noqa: BLE001 - a failed start, or a model that is gone
            log.debug("TensorRT-LLM was not shut down: %s", error)
        self._llm = None


def _longest(settings: TensorRtLlmSettings, model: ModelFiles) -> int:
    """Most tokens of a sequence, as told to the library: by default the library would cut longer sequences."""
    wanted = settings.limits.max_sequence_tokens
    most = model.engine.max_sequence_tokens if model.engine else model.max_positions
    if most is None and not wanted:
        raise ModelUnusable(
            "is not set, but config.json does not tell the model's length",
            setting="engine.tensorrt_llm.limits.max_sequence_tokens",
        )
    if most is not None and wanted > most:
        raise ModelUnusable(
            f"is {wanted} but the model has {most} positions",
            setting="engine.tensorrt_llm.limits.max_sequence_tokens",
        )
    return wanted or most or 0


def _info(
    settings: TensorRtLlmSettings,
    model: ModelFiles,
    library: Library,
    longest: int,
    row: Row,
    tokens_per_block: int,
) -> BackendInfo:
    limits, batching, engine = settings.limits, settings.batching, model.engine
    batch, prompt = (
        limits.max_batch_size,
        None if batching.chunked_context else batching.max_step_tokens,
    )
    if engine is not None:
        _check_engine(settings, engine.max_batch_size, engine.max_beam_width)
        prompt = min(engine.max_prompt_tokens, prompt or engine.max_prompt_tokens)
    adapters, drafts = settings.adapters, settings.drafts
    return BackendInfo(
        backend="tensorrt_llm",
        model="",
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        vocabulary_size=model.vocabulary_size,
        max_sequence_tokens=longest,
        max_batch_size=batch,
        max_sequences_per_item=min(limits.max_sequences_per_item, batch),
        tokens_per_block=tokens_per_block,
        total_blocks=row.max_blocks,
        supported_fields=supported_fields(settings, engine, library),
        # The order of sums depends on the batch, and a sampled sequence continues with draws from another seed.
        capabilities=Capabilities(
            deterministic=False,
            resumes_exactly=False,
            stops_single_sequences=False,
            max_adapters=adapters.max_batch_adapters if adapters.disk_bytes else 0,
            draft_methods=(drafts.lower(),) if drafts else (),
        ),
        end_ids=model.end_ids,
        data_type=model.data_type,
        max_queue_size=limits.max_queue_size,
        max_prompt_tokens=prompt,
        static_batching=settings.option("scheduler_config", "capacity_scheduler_policy")
        == "STATIC_BATCH",
        max_adapter_bytes=min(adapter_content.MAX_ADAPTER_BYTES, adapters.disk_bytes),
        state_kind=kind_of(settings, library),
    )


def _check_engine(settings: TensorRtLlmSettings, max_batch_size: int, max_beam_width: int) -> None:
    """Raises SettingsError for limits beyond the built engine's."""
    for name, wanted, most in (
        ("limits.max_batch_size", settings.limits.max_batch_size, max_batch_size),
        ("limits.max_beam_width", settings.limits.max_beam_width, max_beam_width),
    ):
        if wanted > most:
            raise SettingsError(
                f"is {wanted}, but the engine was built for at most {most}",
                setting=f"engine.tensorrt_llm.{name}",
            )


def _root(item: Submission, call: Call) -> Root:
    """The name before the item's first block; a salt of the worker's own counts too."""
    salt, lora = call.arguments.get("cache_salt"), item.config.lora
    if not salt and lora is None:
        return PLAIN
    adapter = Adapter(lora.id or 0, lora.name or "", lora.version or "") if lora else None
    return root_hash(salt, adapter=adapter), adapter


def _in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Runs on a thread that does not keep the process alive, unlike an executor's threads."""
    future: Future[T] = Future()
    # A cancelled wait cannot cancel it, so setting a result never fails.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
