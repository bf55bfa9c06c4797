"""Checks the heads of requests more strictly than h11 does.

A proxy in front of the service may read a lenient head differently, and then takes one request for two (request
smuggling). `StrictBuffer` replaces an undocumented class of h11; `tests/service/server/test_heads.py` checks a newer
one.
"""

import re

import h11
from h11._receivebuffer import ReceiveBuffer

MAX_HEAD_BYTES = 64 * 1024
_HEADERS_TOO_LARGE = 431
_END = re.compile(rb"\r\n\r\n|(?<!\r)\n")
"""The end of a head, or the end of a line that is not CRLF."""
_OVERLAP = 3
"""Bytes of an end that may have arrived before the rest of it."""


class StrictBuffer(ReceiveBuffer):
    """Extracts the head of a request, or the trailer of its body; raises LocalProtocolError, as h11's readers do."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if self._data[:2] != b"\r\n":  # else there is no trailer, or no request line, which h11 refuses
            self._check_end(_END.search(self._data, max(0, self._multiple_lines_search - _OVERLAP)))
        lines = super().maybe_extract_lines()
        if lines:
            _check_framing(lines)
        return lines

    def _check_end(self, end: re.Match[bytes] | None) -> None:
        if end and end[0] == b"\n":
            raise h11.LocalProtocolError("A line of the head does not end with CRLF.")
        if (end.end() if end else len(self._data)) > MAX_HEAD_BYTES:
            problem = f"The head has more than {MAX_HEAD_BYTES:,} bytes."
            raise h11.LocalProtocolError(problem, error_status_hint=_HEADERS_TOO_LARGE)


def _check_framing(lines: list[bytearray]) -> None:
    """Refuses a head that gives the length of its body in two ways, or in one that HTTP/1.0 does not have."""
    names = {bytes(line.partition(b":")[0]).lower() for line in lines}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.LocalProtocolError("The head has both Content-Length and Transfer-Encoding.")
    if lines[0].endswith(b"HTTP/1.0"):
        raise h11.LocalProtocolError("The head has Transfer-Encoding, which HTTP/1.0 does not have.")
