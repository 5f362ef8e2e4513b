"""HTTP/2 framing for asyncio, server and client side (RFC 9113, RFC 7541). Imports nothing of trtmesh but `fair`.

`connection.py` dispatches received frames and keeps the connection alive, `writer.py` sends frames within the peer's
flow-control windows, `send_buffer.py` queues bytes without copying them, `headers.py` encodes and decodes header
blocks, `frames.py` has the wire format and the errors.
`closed_streams.py` distinguishes late frames from wrong frames. `rates.py` ends connections that only cost work.
"""
