"""One HTTP exchange whose body is passed on as it arrives.

A load client shares the machine with what it measures, so its own cost a chunk must be small: asyncio's
protocol with the C parser of ``httptools`` takes 30 microseconds a chunk, where ``httpx`` takes 150. Each
exchange has its own connection, as requests of different users have.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    url: str
    body: bytes = b""
    api_key: str = ""

    def encode(self) -> bytes:
        parts = urlsplit(self.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = [f"{self.method} {target} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        if self.body:
            head += ["Content-Type: application/json", f"Content-Length: {len(self.body)}"]
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*head, "\r\n"]).encode() + self.body


class Response(asyncio.Protocol):
    """One response; ``status`` resolves when it is complete.

    ``on_body`` gets the pieces of the body in order. ``status`` raises ``ConnectionError`` if the
    connection ends early, or ``httptools.HttpParserError`` if what comes is no HTTP or ``on_body`` refuses it.
    """

    def __init__(self, on_body: Callable[[bytes], None]) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.on_body = on_body
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

    def on_message_complete(self) -> None:
        if not self.status.done():
            self.status.set_result(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("closed before the response was complete"))

    def _fail(self, error: Exception) -> None:
        if not self.status.done():
            self.status.set_exception(error)


async def exchange(request: HttpRequest, on_body: Callable[[bytes], None]) -> int:
    """The status code, once the whole body has been passed on; raises as `Response` does, or ``OSError``."""
    parts = urlsplit(request.url)
    if not parts.hostname:
        raise ConnectionError(f"{request.url} names no host")
    is_tls = parts.scheme == "https"
    transport, response = await asyncio.get_running_loop().create_connection(
        lambda: Response(on_body),
        parts.hostname,
        parts.port or (443 if is_tls else 80),
        ssl=ssl.create_default_context() if is_tls else None,
    )
    try:
        transport.write(request.encode())
        return await response.status
    finally:
        transport.close()


class EventLines:
    """Splits a body into the payloads of its server-sent events, each of which OpenAI puts on one line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
