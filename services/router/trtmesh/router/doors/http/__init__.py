"""HTTP for a door of any protocol: a door adds its routes to the port and needs nothing else of this room changed.

`port.py` serves, `authorising.py` and `origins.py` decide who may send, `bodies.py` receives within limits,
`json_bodies.py` reads JSON, `answers.py` writes JSON, `errors.py` answers with errors.
"""
