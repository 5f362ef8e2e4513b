"""gRPC over the HTTP/2 framing of `chassis.http2`: messages and metadata, and above them a server and a client."""
