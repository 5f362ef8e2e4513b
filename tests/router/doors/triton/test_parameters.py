"""Request parameters without effect are counted and logged within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as kserve
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.metrics import OTHER
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.server import check_parameters
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.metrics import MOST_PARAMETERS, RouterMetrics

MODELS = triton_models(TritonSettings())


def call(parameters: Mapping[str, Any]) -> Call:
    sent = kserve.ModelInferRequest(model_name="ensemble")
    sent.inputs.add(name="stop", datatype="BOOL", shape=(1, 1)).contents.bool_contents.append(True)
    return replace(read_call(MODELS["ensemble"], sent), parameters=parameters)


def test_names_are_counted_and_logged_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    metrics = RouterMetrics()
    for _ in range(2):
        for number in range(2 * MOST_PARAMETERS):
            check_parameters(call({f"own{number}": 1}), metrics)
    counted = metrics.unknown_parameters
    assert len(counted) == MOST_PARAMETERS + 1
    assert counted["own0"] == 2
    assert counted[OTHER] == 2 * MOST_PARAMETERS
    assert len(caplog.records) == MOST_PARAMETERS


@pytest.mark.parametrize("name", ["priority", "timeout"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_value_of_a_known_parameter_is_checked(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_parameters(call({name: value}), RouterMetrics())
    assert (caught.value.field, caught.value.value) == (f"parameter '{name}'", repr(value))
