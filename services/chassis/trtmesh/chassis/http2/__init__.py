"""HTTP/2 framing for asyncio, server and client side (RFC 9113, RFC 7541). Imports nothing of trtmesh but `fair`.

`connection.py` dispatches received frames and keeps the connection alive, `writer.py` sends frames within the peer's
flow-control windows, `headers.py` encodes and decodes header blocks, `frames.py` has the wire format and the errors.
`rates.py` ends connections that only cost work.
"""
