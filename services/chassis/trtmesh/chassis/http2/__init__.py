"""gRPC over HTTP/2 on one connection, as far as servers and clients have it in common.

An asyncio protocol takes the frames of HTTP/2 apart and puts them together; the hpack library reads headers. What one
pass of the event loop made for a peer leaves in one write, which is what makes small messages cheap.
"""
