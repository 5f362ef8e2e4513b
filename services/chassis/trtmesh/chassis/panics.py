"""Panics of libraries written in Rust: they derive from BaseException, and concern a single call."""

from __future__ import annotations


def is_failure(error: BaseException) -> bool:
    """Whether an error is of the work at hand: an Exception or a panic, and no request to end the task or process."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
