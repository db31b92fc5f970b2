"""Uvicorn's HTTP/1.1 protocol with bounds on the size of a request's head."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 4 << 20
MAX_HEADERS = 256


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose head exceeds `MAX_HEAD_BYTES` or has over `MAX_HEADERS` headers.

    The parser under it holds a header in memory until the header ends, however long it is.
    Bytes are counted per read, so the bound is exact to within one read (256 KiB).
    """

    _head_bytes = 0
    _in_body = False
    _problem = ""

    def data_received(self, data: bytes) -> None:
        """Count what arrives while a head is open."""
        if not self._in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse("The head of the request is too large.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the headers."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._problem = f"The request has more than {MAX_HEADERS} headers."
            raise ValueError(self._problem)  # the parser gives up and asks for a 400

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong where it is known better than the parser knows it."""
        super().send_400_response(self._problem or msg)

    def _refuse(self, message: str) -> None:
        self._head_bytes = 0
        if not self.transport.is_closing():
            self.logger.warning(message)
            self.send_400_response(message)

    def on_headers_complete(self) -> None:
        """The head ends here."""
        self._in_body, self._head_bytes = True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next byte belongs to the head of the next request."""
        self._in_body = False
        super().on_message_complete()
