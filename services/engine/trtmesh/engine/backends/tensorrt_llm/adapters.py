"""LoRA adapters as directories, from which the library loads them at their first use.

The library knows adapters by a number of its own, which is also the key of its caches, so every content has a number
that no other ever had, and keeps it when it is loaded again. It has no call to unload one: its caches evict what is not
used, but its loader keeps the tensors of every number on the GPU as long as the process lives.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent
from trtmesh.chassis.errors import BackendFailed, TrtmeshError
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.adapter_store import (
    AdapterStore,
    StoredAdapter,
    StoreLimits,
    checked_rank,
    content_of,
)
from trtmesh.engine.backend import AdapterLoad
from trtmesh.engine.backends.tensorrt_llm.adapter_folders import LockedFolder, remove_abandoned
from trtmesh.engine.backends.tensorrt_llm.adapter_layers import check_module, check_peft
from trtmesh.engine.backends.tensorrt_llm.calls import AdapterFiles
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmAdapterSettings
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class WrittenAdapter(StoredAdapter):
    """An adapter whose files are on disk."""

    files: AdapterFiles


class AdapterFolder:
    """Writes contents to directories on a thread; everything else happens on the event loop's."""

    def __init__(self, settings: TensorRtLlmAdapterSettings, config: Mapping[str, Any]) -> None:
        """`config` describes the model."""
        self._settings = settings
        self._config = config
        self.slots = settings.max_batch_adapters if settings.disk_bytes else 0
        limits = StoreLimits(settings.disk_bytes, self.slots, host_setting="adapters.disk_bytes")
        self.store = AdapterStore[WrittenAdapter](limits)
        self._numbers: dict[tuple[int, str], int] = {}
        """By number and version in the mesh. Only grows, as does what the library keeps of each."""
        self._directories = count(1)
        self._writer = ThreadPoolExecutor(1, "adapter-files")
        self._turn = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()
        self._own: LockedFolder | None = None
        self.load_seconds = 0.0
        self.modules: tuple[str, ...] | None = None
        """The layers that the library computes adapters of; None where it decides itself."""

    def open(self) -> None:
        """Makes the directory for all files. Raises OSError."""
        if self._settings.disk_bytes:
            parent = Path(tempfile.gettempdir())
            remove_abandoned(parent)
            self._own = LockedFolder(parent)

    def release(self, adapter: StoredAdapter) -> None:
        """Takes back the hold of a sequence."""
        assert isinstance(adapter, WrittenAdapter)
        self._remove(self.store.release(adapter))

    def load(self, load: AdapterLoad, told: Callable[[], None]) -> None:
        """Writes an adapter's files; `told` is called once there is news."""
        task = asyncio.get_running_loop().create_task(self._load(load, told))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    def unload(self, number: int, version: str, *, unpin: bool) -> None:
        self._remove(self.store.unload(number, version, unpin=unpin))

    async def close(self) -> None:
        """Removes every file."""
        for task in list(self._loads):
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)
        own, self._own = self._own, None
        if own:
            self._writer.submit(own.remove)
        await asyncio.to_thread(self._writer.shutdown)

    async def _load(self, load: AdapterLoad, told: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            # In turn: of two loads of one content, the second finds the files of the first.
            async with self._turn:
                await self._put(load)
        except TrtmeshError as error:
            self.store.failed(load.identity, error)
        except Exception as error:
            # Broad on purpose: a defect must not leave the router without an answer.
            log.exception("the adapter %d could not be loaded", load.identity.id)
            failure = BackendFailed(f"{type(error).__name__}: {error}")
            self.store.failed(load.identity, failure)
        self.load_seconds += time.monotonic() - began
        told()

    async def _put(self, load: AdapterLoad) -> None:
        identity = load.identity
        known = self.store.get(identity.id, identity.version)
        if known is not None:
            self.store.retain(known, pinned=load.pinned)
            return
        content = content_of(load)
        rank = checked_rank(content, self._settings.max_rank)
        files = await asyncio.get_running_loop().run_in_executor(
            self._writer, self._write, identity, content
        )
        adapter = WrittenAdapter(
            identity=identity,
            rank=rank,
            size_bytes=content.size_bytes,
            pinned=load.pinned,
            files=files,
        )
        try:
            self._remove(self.store.put(adapter))
        except TrtmeshError:
            self._remove([adapter])
            raise

    def _write(self, identity: Adapter, content: AdapterContent) -> AdapterFiles:
        """Writes the files in PEFT's format. Raises TrtmeshError for a content that the model does not take."""
        assert self._own
        if content.format == pb.ADAPTER_FORMAT_PEFT:
            check_peft(content, self.modules)
        # Not the number: the files of another load of the same content may be about to leave.
        directory = self._own.path / str(next(self._directories))
        directory.mkdir()
        try:
            if content.format == pb.ADAPTER_FORMAT_PEFT:
                names = FILE_NAMES[pb.ADAPTER_FORMAT_PEFT]
                (directory / names.config).write_bytes(content.config)
                (directory / names.weights).write_bytes(content.weights)
            else:
                _write_arrays(content, directory, self._config, self.modules)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        number = self._numbers.setdefault((identity.id, identity.version), len(self._numbers) + 1)
        return AdapterFiles(identity.name or f"adapter-{number}", number, directory)

    def _remove(self, adapters: list[WrittenAdapter]) -> None:
        for each in adapters:
            self._writer.submit(shutil.rmtree, each.files.directory, ignore_errors=True)


def _write_arrays(
    content: AdapterContent,
    directory: Path,
    config: Mapping[str, Any],
    modules: tuple[str, ...] | None,
) -> None:
    """The library's interface takes directories only, so arrays become PEFT's format."""
    from trtmesh.engine.adapters.arrays import parse_arrays
    from trtmesh.engine.adapters.lora import fit, of_one_rank
    from trtmesh.engine.adapters.peft import write_peft
    from trtmesh.engine.backends.tensorrt_llm.adapter_layers import names_of, targets_of

    targets = targets_of(config)
    lora = fit(parse_arrays(content, targets), targets)
    names = names_of(config)
    for place in lora.updates:
        _, module = place
        check_module(names[place], module.name.lower(), modules)
    write_peft(of_one_rank(lora), directory, "", names)
