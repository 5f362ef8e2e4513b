"""What-if: records traffic to a file and replays it offline over a simulated fleet with the router's placement code."""

from trtmesh.router.replay.fleet_model import FleetModel, Outcome
from trtmesh.router.replay.recorder import RecordedItem, Recorder, RecordSettings
from trtmesh.router.replay.simulation import replay
from trtmesh.router.replay.trace import Arrival, read_trace

__all__ = [
    "Arrival",
    "FleetModel",
    "Outcome",
    "RecordSettings",
    "RecordedItem",
    "Recorder",
    "read_trace",
    "replay",
]
