"""Tells large messages from small ones."""

from __future__ import annotations

LARGE_BYTES = 2**17
"""Least size of a large message. A smaller one is parsed in less than 10 ms, whatever it contains, and is not counted
once it is parsed."""
