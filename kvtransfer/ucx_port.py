"""One UCX worker, by ucxx's low-level interface: no thread and no event loop of its own.

The loop polls `poll_socket`, calls `progress`, and `arm` before it sleeps again, as ``ucp_worker_arm`` asks for
(https://openucx.readthedocs.io/en/master/api/file/ucp_8h.html). Error handling is on for
every endpoint, so that a killed peer ends the requests that wait for it.
"""

import base64
import ctypes
import hashlib
import hmac
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from .ucx_lanes import available_lanes

OPTIONS = {"MM_ERROR_HANDLING": "y", "WARN_UNUSED_ENV_VARS": "n"}
"""Shared memory offers error handling only on request; without it UCX would silently take TCP instead."""
CODE_BYTES = 16
MAX_PROGRESS = 64
MAX_LANES = 16
CLOSE_NANOSECONDS = 1_000_000_000


class UcxFailed(Exception):
    """What UCX says."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A send or receive. ``request`` is ucxx's, which does not keep ``buffer`` alive."""

    request: Any
    buffer: object

    @property
    def is_done(self) -> bool:
        return bool(self.request.completed)

    def check(self) -> None:
        """Raises `UcxFailed` if it ended without its result."""
        _checked(self.request.check_error)


class Endpoint:
    """The way to one other worker."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint

    @property
    def is_alive(self) -> bool:
        return bool(self._endpoint.alive)

    def send(self, buffer: object, tag: int) -> Pending:
        """``buffer`` is contiguous memory of the host or a GPU, and stays as it is until this is done."""
        array = Array(buffer)
        return Pending(_checked(lambda: self._endpoint.tag_send(array, libucxx.UCXXTag(tag))), buffer)

    def receive(self, buffer: object, tag: int) -> Pending:
        """Of whoever sends with this tag; `close` ends it."""
        array, full = Array(buffer), libucxx.UCXXTagMaskFull
        return Pending(_checked(lambda: self._endpoint.tag_recv(array, libucxx.UCXXTag(tag), full)), buffer)

    def close(self) -> None:
        """Cancel what is under way."""
        self._endpoint.close_blocking(period=CLOSE_NANOSECONDS, max_attempts=1)

    def lanes(self) -> list[str]:
        """``transport/device`` of each lane that UCX has chosen, known once something has gone over it."""
        return _lanes(self._endpoint.handle)


class Port:
    """A worker with an address of its own, for tagged messages.

    UCX ends the process that connects to what is no address. So an address is told with a code that only holders of
    the cluster's ``key`` can make, and no other is let near UCX. ``moved_at`` is when UCX has moved something.
    """

    def __init__(self, key: bytes) -> None:
        features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        self._context = libucxx.UCXContext(OPTIONS, feature_flags=features)
        self._worker = libucxx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._again = os.eventfd(0, os.EFD_NONBLOCK)
        self._events = select.epoll()
        for source in (self._worker.epoll_file_descriptor, self._again):
            self._events.register(source, select.EPOLLIN)
        self.moved_at = -inf
        self._is_readable = False
        self._key = key
        address: bytes = self._worker.address.tobytes()
        self.address = base64.b64encode(self._code(address) + address).decode()
        self.poll_socket = self._events.fileno()

    def connect(self, address: str) -> Endpoint:
        """Raises `UcxFailed` for what is no address of this cluster, or leads nowhere."""
        try:
            told = base64.b64decode(address, validate=True)
        except ValueError:
            raise UcxFailed("this is no address") from None
        if not hmac.compare_digest(told[:CODE_BYTES], self._code(told[CODE_BYTES:])):
            raise UcxFailed("this is no address of this cluster")
        there = _checked(lambda: libucxx.UCXAddress.create_from_buffer(told[CODE_BYTES:]))
        return Endpoint(_checked(lambda: libucxx.UCXEndpoint.create_from_worker_address(self._worker, there, True)))

    @property
    def available_lanes(self) -> list[str]:
        """``transport/device`` of all that UCX could use here."""
        return available_lanes(self._context.info)

    @property
    def allowed_transports(self) -> str:
        """``UCX_TLS``, ``all`` unless somebody has set it."""
        return str(self._context.config["TLS"])

    def progress(self) -> None:
        """Let UCX move what it can, for a bounded time."""
        num_moved = 0
        while num_moved < MAX_PROGRESS and self._worker.progress():
            num_moved += 1
        if num_moved:
            self.moved_at = time.monotonic()

    def arm(self) -> None:
        """Before the loop sleeps: an event from now on makes `poll_socket` readable, and so does work left over."""
        if self._is_readable:
            os.eventfd_read(self._again)
        self._is_readable = not self._worker.arm()
        if self._is_readable:
            os.eventfd_write(self._again, 1)

    def _code(self, address: bytes) -> bytes:
        return hashlib.blake2b(address, digest_size=CODE_BYTES, key=self._key, person=b"ucx address").digest()

    def next_message(self, tag: int, mask: int) -> tuple[Pending, NDArray[np.uint8]] | None:
        """Take a message that nobody waits for; its bytes are there when it is done."""
        found = self._worker.tag_probe(libucxx.UCXXTag(tag), libucxx.UCXXTagMask(mask), True)
        if not found.matched:
            return None
        into = np.empty(found.length, np.uint8)
        return Pending(self._worker.tag_recv_with_handle(Array(into), found), into), into


def ucx_version() -> str:
    return ".".join(map(str, libucxx.get_ucx_version()))


def _checked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except libucxx.UCXError as error:
        raise UcxFailed(str(error)) from None


# --- what ucxx does not tell: ucp_ep_query of ucp/api/ucp.h ------------------------------------------


class _Lane(ctypes.Structure):
    """``ucp_transport_entry_t``."""

    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """``ucp_ep_attr_t``; the sockets' addresses are not asked for."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("addresses", ctypes.c_ubyte * 256),
        ("lanes", ctypes.POINTER(_Lane)),
        ("num_lanes", ctypes.c_uint),
        ("lane_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


LANES_FIELD = 1 << 3
"""``UCP_EP_ATTR_FIELD_TRANSPORTS``."""


@cache
def _libucp() -> ctypes.CDLL:
    """The copy that ucxx has loaded."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        return ctypes.CDLL(next(line.split()[-1] for line in maps if "/libucp.so" in line))


def _lanes(handle: int) -> list[str]:
    entries = (_Lane * MAX_LANES)()
    attributes = _Attributes(field_mask=LANES_FIELD, lanes=entries, num_lanes=MAX_LANES)
    attributes.lane_bytes = ctypes.sizeof(_Lane)
    status = _libucp().ucp_ep_query(ctypes.c_void_p(handle), ctypes.byref(attributes))
    found = entries[: attributes.num_lanes] if status == 0 else []
    return [f"{lane.transport_name.decode()}/{lane.device_name.decode()}" for lane in found]
