"""What a device does at best, measured, and the least that a step of a Llama needs of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _models import layer_weights

RUNS = 8
COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy on the device, read and written."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device) -> float:
    """Operations a second of a product of square bfloat16 matrices; zeros would be faster."""
    size = PRODUCT_SIZE[device.type]
    one, other = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    result = torch.empty_like(one)
    return 2 * size**3 / _seconds(lambda: torch.mm(one, other, out=result), device)


def step_bytes(shape: dict[str, Any], dtype: torch.dtype, kv_tokens: int) -> int:
    """What a decode step reads at least: every weight but the embeddings of other tokens, and the KV."""
    weights = shape["num_hidden_layers"] * layer_weights(shape)
    weights += shape["vocab_size"] * shape["hidden_size"]
    kv = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return int((weights + kv_tokens * kv) * dtype.itemsize)


def prefill_operations(shape: dict[str, Any], tokens: int) -> int:
    """Of a lone prompt: the layers' products, attention to the tokens before, and the logits after the last."""
    layers, width = shape["num_hidden_layers"], shape["num_attention_heads"] * shape["head_dim"]
    products = 2 * layers * layer_weights(shape) * tokens
    # Two products, of a query with half of the tokens on average.
    attention = 2 * layers * width * tokens**2
    return int(products + attention + 2 * shape["vocab_size"] * shape["hidden_size"])


def _seconds(operation: Callable[[], object], device: torch.device) -> float:
    """The median of some runs after one that warms up."""
    seconds = []
    for _ in range(RUNS + 1):
        _finish(device)
        started = time.perf_counter()
        operation()
        _finish(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
