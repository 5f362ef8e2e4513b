"""gRPC channels with the mesh's limits and keepalive."""

from __future__ import annotations

from typing import Any

import grpc
from trtmesh.chassis.tls.client import ClientTls

GREETING_SECONDS = 1.0
"""Limit for connecting before another attempt or peer. A distant or busy peer easily takes 0.1 s; a frozen peer never
finishes."""


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Message limits, and a keepalive to detect a dead network."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_channel(
    address: str,
    max_message_bytes: int,
    connect_seconds: float = GREETING_SECONDS,
    tls: ClientTls | None = None,
) -> grpc.aio.Channel:
    """A channel with a separate connection, over TLS if given; the caller closes the channel. Reconnects every second;
    each attempt takes at most `connect_seconds`. Raises SettingsError for TLS with unusable files."""
    options = [
        *channel_options(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(connect_seconds * 1000)),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),
    ]
    if tls is not None:
        options += tls.channel_options()
        return grpc.aio.secure_channel(address, tls.credentials(), options=options)
    return grpc.aio.insecure_channel(address, options=options)
