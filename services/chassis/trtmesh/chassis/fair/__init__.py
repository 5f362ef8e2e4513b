"""Shares out the event loop and the memory of a process between clients. Imports nothing of trtmesh.

`turns.py` divides the time of the event loop, `messages.py` admits messages, `budget.py` limits the memory of all
clients together, and `limits.py` the rates of one peer and the connections of one address.
"""
