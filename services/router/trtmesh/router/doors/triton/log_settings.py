"""Triton's log settings over Python's logging."""

from __future__ import annotations

import logging
from typing import Any

from tritonclient.grpc import service_pb2
from trtmesh.chassis.errors import InvalidRequest, UnsupportedField

VERBOSE = "log_verbose_level"


def change_log_settings(asked: Any) -> service_pb2.LogSettingsResponse:
    """Sets what was asked and tells how all settings are now. Raises InvalidRequest or UnsupportedField."""
    log = logging.getLogger("trtmesh")
    for name, value in asked.items():
        if name != VERBOSE:
            raise UnsupportedField(
                f"log setting '{name}' cannot be changed while the server runs; only {VERBOSE} can"
            )
        if value.WhichOneof("parameter_choice") != "uint32_param":
            raise InvalidRequest(f"log setting '{VERBOSE}' must be a number, at least 0")
    if VERBOSE in asked:
        log.setLevel(logging.DEBUG if asked[VERBOSE].uint32_param else logging.NOTSET)
    response = service_pb2.LogSettingsResponse()
    for name, level in (
        ("log_info", logging.INFO),
        ("log_warning", logging.WARNING),
        ("log_error", logging.ERROR),
    ):
        response.settings[name].bool_param = log.isEnabledFor(level)
    response.settings[VERBOSE].uint32_param = int(log.isEnabledFor(logging.DEBUG))
    response.settings["log_format"].string_param = "default"
    response.settings["log_file"].string_param = ""
    return response
