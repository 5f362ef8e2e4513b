"""How many engines a load needs, by replays of it over simulated fleets."""
