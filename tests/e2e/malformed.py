"""What no client should send: bodies that are no request, and connections that break off."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from random import Random

VALID: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0.5},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4, "n": 1, "stop": ["x"], "logit_bias": {"65": 1}, "user": "u"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/embeddings": {"input": ["hi"], "encoding_format": "float"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
}

UNFIT = (
    *("1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 5000, "-1" + "0" * 400),
    *(r'{"\ud800": 1}', r'["\udfff"]', '{"a": {"b": [{}]}}', "[[[[]]]]", "[" * 60 + "]" * 60),
)
"""JSON that no field of any of these bodies takes."""

JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request that must be refused."""

    path: str
    body: bytes
    content_type: str = JSON_TYPE


def malformed_requests(random: Random) -> Iterator[Malformed]:
    """A few hundred, others at every seed."""
    for path, valid in VALID.items():
        whole = json.dumps(valid).encode()
        yield from (Malformed(path, body) for body in _no_objects())
        yield from (Malformed(path, whole[: random.randrange(1, len(whole))]) for _ in range(4))
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "nonsense"):
            yield Malformed(path, whole, kind)
        yield Malformed(path, whole[:-1] + b', "unknown": 1}')
        for field in valid:
            for unfit in UNFIT:
                others = {name: value for name, value in valid.items() if name != field}
                yield Malformed(path, _with(others, field, unfit))
        for unfit in random.sample(UNFIT, 3):
            yield Malformed(path, _with(valid, f"field{random.randrange(10**6)}", unfit))


def _with(body: dict[str, object], field: str, value: str) -> bytes:
    return f"{json.dumps(body)[:-1]}{', ' * bool(body)}{json.dumps(field)}: {value}}}".encode()


def _no_objects() -> Iterator[bytes]:
    yield from (b"", b"null", b"[]", b'"text"', b"1", b"{", b"}", b"\x00", b"\xff\xfe", b'{"a" 1}', b"{'a': 1}")
    yield b"[" * 100_000
    yield b'{"a":' * 50_000
    yield b'{"prompt": "\xc3"}'
    yield b'{"prompt": "a\x01b"}'


# --- connections -----------------------------------------------------------------------------------


def _head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Type: {JSON_TYPE}", *lines, "", ""]).encode()


def gone_in_mid_body(connection: socket.socket) -> None:
    connection.sendall(_head("/v1/completions", "Content-Length: 1000") + b'{"prompt": "half of')


def gone_in_mid_chunk(connection: socket.socket) -> None:
    connection.sendall(_head("/v1/completions", "Transfer-Encoding: chunked") + b'ff\r\n{"prompt": ')


def gone_in_mid_head(connection: socket.socket) -> None:
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-")


def gone_in_mid_stream(connection: socket.socket) -> None:
    body = json.dumps({"prompt": "go on", "max_tokens": 300, "stream": True, "ignore_eos": True}).encode()
    connection.sendall(_head("/v1/completions", f"Content-Length: {len(body)}") + body)
    assert connection.recv(64).startswith(b"HTTP/1.1 200")


def gone_before_the_answer(connection: socket.socket) -> None:
    body = json.dumps({"prompt": "go on", "max_tokens": 300, "ignore_eos": True}).encode()
    connection.sendall(_head("/v1/completions", f"Content-Length: {len(body)}") + body)


def no_http(connection: socket.socket) -> None:
    connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello?\r\n\r\n")
    assert connection.recv(64)[:12] in (b"HTTP/1.1 400", b"")


def a_chunk_of_no_size(connection: socket.socket) -> None:
    connection.sendall(_head("/v1/completions", "Transfer-Encoding: chunked") + b"zz\r\nabc\r\n")
    assert connection.recv(64)[:12] in (b"HTTP/1.1 400", b"")


def a_slow_sender(connection: socket.socket) -> None:
    """It gets its answer all the same."""
    body = json.dumps({"prompt": "slow", "max_tokens": 2}).encode()
    for byte in _head("/v1/completions", f"Content-Length: {len(body)}") + body:
        connection.sendall(bytes([byte]))
        time.sleep(0.002)
    assert connection.recv(64).startswith(b"HTTP/1.1 200")


CONNECTIONS: tuple[Callable[[socket.socket], None], ...] = (
    *(gone_in_mid_body, gone_in_mid_chunk, gone_in_mid_head, gone_in_mid_stream, gone_before_the_answer),
    *(no_http, a_chunk_of_no_size, a_slow_sender),
)


def connect(port: int, behave: Callable[[socket.socket], None]) -> None:
    """Behave so, and leave without a word."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        behave(connection)
