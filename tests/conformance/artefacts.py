"""Cases of h2spec that fail for another reason than a breach of HTTP/2, as its report names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Artefact:
    """Why a case fails."""

    reason: str
    always: bool = True
    """False if it depends on who is faster."""


NO_DATA = Artefact("it waits for DATA, but a call without a message is answered by a status alone")
HTTP1 = Artefact("it reads the HTTP/1.1 response to something other than a preface as a frame")
TOO_FAST = Artefact("calls without a message end before they reach the limit", always=False)
DEPENDENCIES = Artefact("RFC 9113 has no dependencies of streams any more")
WINDOW = Artefact(
    "it sends a frame of the announced size, 1 MiB, into a window of 64 KiB", always=False
)
GET = Artefact("its GET is answered by 405 before the frame in question", always=False)

_ALWAYS_MET = {
    "generic/2: Sends a WINDOW_UPDATE frame on half-closed (remote) stream": NO_DATA,
    "generic/2: Sends a PRIORITY frame on half-closed (remote) stream": NO_DATA,
    "http2/3.5: Sends invalid connection preface": HTTP1,
    "http2/4.2: Sends a DATA frame with 2^14 octets in length": WINDOW,
    "http2/5.1.2: Sends HEADERS frames that causes their advertised concurrent stream limit"
    " to be exceeded": TOO_FAST,
    "http2/5.3.1: Sends HEADERS frame that depends on itself": DEPENDENCIES,
    "http2/5.3.1: Sends PRIORITY frame that depend on itself": DEPENDENCIES,
}

OF_H2SPEC_GRPC = _ALWAYS_MET

OF_H2SPEC = _ALWAYS_MET | {
    "http2/5.1: closed: Sends a DATA frame after sending RST_STREAM frame": GET,
    "http2/5.1: closed: Sends a HEADERS frame after sending RST_STREAM frame": GET,
    "http2/6.9: Sends a WINDOW_UPDATE frame with a flow control window increment of 0 on a"
    " stream": GET,
    "http2/6.9.1: Sends multiple WINDOW_UPDATE frames increasing the flow control window to"
    " above 2^31-1 on a stream": GET,
    "http2/8.1: Sends a second HEADERS frame without the END_STREAM flag": GET,
    "http2/8.1.2.1: Sends a HEADERS frame that contains a pseudo-header field as trailers": GET,
    'http2/8.1.2.6: Sends a HEADERS frame with the "content-length" header field which does not'
    " equal the DATA frame payload length": GET,
    'http2/8.1.2.6: Sends a HEADERS frame with the "content-length" header field which does not'
    " equal the sum of the multiple DATA frames payload length": GET,
}
