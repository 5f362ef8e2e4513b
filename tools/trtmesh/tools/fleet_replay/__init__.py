"""Replays recorded traffic offline over a simulated fleet, with the router's placement and the engine's scheduler."""
