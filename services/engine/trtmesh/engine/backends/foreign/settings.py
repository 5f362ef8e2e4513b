"""Settings of the foreign backend."""

from __future__ import annotations

from trtmesh.chassis.settings import CommaList, Settings


class ForeignSettings(Settings):
    """An engine that runs elsewhere and speaks a contract of its own; no model is loaded here."""

    address: str = ""
    """The engine, as vllm://host:port, sglang://host:port or trtllm://host:port."""
    model_dirs: CommaList = ()
    """Directories of models. The engine is taken to serve the one that has the name of its model: the fingerprint of
    the worker is that of an engine of ours with these weights. The tokenizers must be equal."""
