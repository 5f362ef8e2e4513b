"""Request parameters of calls: checks those with an effect; counts and logs the others."""

from __future__ import annotations

import logging
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

OF_THE_PROTOCOL = frozenset({"triton_enable_empty_final_response"})
"""Parameters with an effect at the door, for every model."""
COUNTS = ("priority", "timeout")
MOST_LOGGED = 256
"""Names that are logged, once each; clients choose the names."""
MOST_NAME_CHARACTERS = 64
"""Longest quoted name."""


class Parameters:
    """The parameters of all calls."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._logged: set[str] = set()

    def check(self, call: Call) -> None:
        """Raises InvalidRequest for an invalid value."""
        read = call.model.template.request_parameters
        for name in COUNTS:
            if name in read and name in call.parameters:
                _check_count(name, call.parameters[name])
        for name in call.parameters.keys() - read - OF_THE_PROTOCOL:
            self._note_unknown(call, name)

    def _note_unknown(self, call: Call, name: str) -> None:
        shown = name[:MOST_NAME_CHARACTERS]
        self._metrics.note_unknown_parameter(shown)
        if name not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(name)
            log.warning("request parameter %r has no effect in model '%s'", shown, call.model.name)


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise InvalidRequest(
            field=f"parameter '{name}'", value=repr(value), limit="an integer, at least 0"
        )
