"""Shares out the event loop and the memory of a process between clients. Imports nothing of trtmesh.

`turns.py` divides the time of the event loop, `messages.py` admits messages, and `limits.py` has the other limits:
memory of all clients together, rates of a peer, connections of an address.
"""
