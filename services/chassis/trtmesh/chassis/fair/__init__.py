"""Shares out the event loop and the memory of a process between clients. Imports nothing of trtmesh.

`parse_scheduler.py` divides the time for received input between connections, `start_scheduler.py` the starts of
handlers and items, `handshakes.py` those of TLS; `loop_yield.py` lets streams advance in between, `rotation.py` has
addresses take turns.
`message_admission.py` hands messages to handlers: `large_message_thread.py` reads large ones (`large.py`) one at a
time, and `backlog.py` bounds those that are parsed and not yet read.
`budget.py` bounds what is held for all clients together, `rate.py` what a client does over time,
`connection_limits.py` the connections of a server and of an address.
"""
