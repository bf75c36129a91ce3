"""Bulk from one process to one other through a communicator. What may take long has a thread: to join, and to abort.

::

    JOINING ── the peer has joined too ──> OPEN ── buffers in order, several under way ──┐
       │                                                                                 │
       └── end(), an error of the communicator, no progress for too long ── FAILED <─────┘
                                                                              └── the abort has returned: GONE

In between the loop carries, by `Channel.advance`: a thread would wait for the loop to let go of Python's lock.

A buffer belongs to the channel from `Channel.carry` until it is carried or the channel is GONE: what a communicator
may still read or write is never used for anything else. An abort that fails, or never returns, keeps its buffers.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, islice
from threading import Event, Thread
from typing import Protocol

from ..core.part import Payload
from .pool_bytes import PASSED, Mark

BATCH_BYTES = 16 << 20
"""So much is started together, since to start it costs as much as to carry it. What is larger is done sooner alone."""
POLL_SECONDS = 1e-3
"""How late it may be seen that the peer has joined."""
CLOSE_SECONDS = 2.0

_log = logging.getLogger("crossdock.links")


class CommunicatorFailed(Exception):
    """What the library says of a communicator."""


class Rank(IntEnum):
    """A side of a channel. Bulk goes one way: of two channels, one a direction, neither can wait for the other."""

    SENDER = 0
    RECEIVER = 1


class Work(Protocol):
    """Transfers that were started together."""

    @property
    def is_done(self) -> bool:
        """Raises `CommunicatorFailed`."""


class Communicator(Protocol):
    """One side of the way between two processes. One thread at a time calls it, and no call but `abort` takes long."""

    @property
    def is_busy(self) -> bool:
        """It still waits for the peer to join, or for the last `start` to be handed to the device.

        Raises `CommunicatorFailed`, also for what happened to work that was started before.
        """

    def start(self, buffers: Sequence[Payload], after: Mark) -> Work:
        """Send these, or receive into them, after all that was started before and what ``after`` is behind.

        Only when it is not busy, and without waiting.

        Both sides must start buffers of the same sizes in the same order, together or one by one. Raises
        `CommunicatorFailed`.
        """

    def abort(self) -> None:
        """End it, whatever is under way; when this returns no buffer is used any more.

        May take long. Raises `CommunicatorFailed`.
        """


class Network(Protocol):
    """What communicators are made of."""

    @property
    def name(self) -> str:
        """With its version."""

    def new_id(self) -> bytes:
        """What both sides of a new communicator must know; may take long. Raises `CommunicatorFailed`."""

    def join(self, unique_id: bytes, rank: Rank) -> Communicator:
        """Begin to be this side of it. A peer that never joins may never be noticed. Raises `CommunicatorFailed`."""


@dataclass(slots=True, eq=False)
class Carried:
    """The first ``num_bytes`` of a buffer on their way; ``is_done`` once they have left, or are here.

    The device leaves the buffer alone until ``after`` is passed.
    """

    buffer: Payload
    num_bytes: int
    after: Mark
    is_done: bool = False


@dataclass(slots=True)
class _Batch:
    items: list[Carried]
    work: Work


_unsafe: list[Carried] = []
"""Of channels whose abort has failed: their buffers are kept from all other use."""


class Channel:
    """One side, from its making. Without ``unique_id`` it makes one, to be told to the peer.

    All is called by one thread, and `advance` in each iteration of its loop, which must not sleep while the channel
    ``is_moving``. If there is something to do and nothing is done for ``patience_seconds``, the channel fails. ``wake``
    is called from another thread whenever its state has changed.
    """

    def __init__(
        self,
        network: Network,
        rank: Rank,
        patience_seconds: float,
        wake: Callable[[], None],
        unique_id: bytes | None = None,
    ) -> None:
        self.unique_id = unique_id
        self.failure: str | None = None
        """Why nothing is carried any more."""
        self.is_gone = False
        self._network = network
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._wake = wake
        self._communicator: Communicator | None = None
        self._waiting: deque[Carried] = deque()
        self._batches: deque[_Batch] = deque()
        self._last_progress = time.monotonic()
        self._end_reason: str | None = None
        self._is_ending = Event()
        self._thread = Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    def carry(self, buffer: Payload, num_bytes: int, after: Mark = PASSED) -> Carried:
        """Send or fill the beginning of a buffer, after all that were given before."""
        carried = Carried(buffer, num_bytes, after)
        if not (self._waiting or self._batches):
            self._last_progress = time.monotonic()
        self._waiting.append(carried)
        self.advance()
        return carried

    @property
    def is_moving(self) -> bool:
        """Bytes are on their way, which nothing but `advance` notices."""
        return self._communicator is not None and self._end_reason is None and bool(self._waiting or self._batches)

    def advance(self) -> None:
        """Start what waits and see what is done."""
        if self.is_moving:
            assert self._communicator is not None, "it moves nothing before both have joined"
            try:
                self._advance(self._communicator)
            except CommunicatorFailed as error:
                self.end(str(error))

    def end(self, reason: str) -> None:
        """Carry nothing more; does not wait for that. The first reason counts."""
        self._end_reason = self._end_reason or reason
        self._is_ending.set()

    def _advance(self, communicator: Communicator) -> None:
        """Raises `CommunicatorFailed`."""
        if not communicator.is_busy and self._waiting:
            items = _first_batch(self._waiting)
            buffers = [item.buffer[: item.num_bytes] for item in items]
            self._batches.append(_Batch(items, communicator.start(buffers, items[-1].after)))
            for _ in items:  # which are held here also if it fails
                self._waiting.popleft()
        while self._batches and self._batches[0].work.is_done:
            for item in self._batches.popleft().items:
                item.is_done = True
            self._last_progress = time.monotonic()
        if self.is_moving and time.monotonic() - self._last_progress > self._patience_seconds:
            raise CommunicatorFailed(f"no progress for {self._patience_seconds:g} s")

    def wait_until_gone(self) -> None:
        """For a while: the process may end all the same."""
        self._thread.join(CLOSE_SECONDS)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        communicator: Communicator | None = None
        reason = "its thread has crashed"
        try:
            if self.unique_id is None:
                self.unique_id = self._network.new_id()
                self._wake()
            communicator = self._network.join(self.unique_id, self._rank)
            self._await_peer(communicator)
            self._last_progress = time.monotonic()
            self._communicator = communicator  # which is the loop's from here on, until it wants to end
            self._wake()
            self._is_ending.wait()
            reason = str(self._end_reason)
        except CommunicatorFailed as error:
            reason = str(error)
        finally:
            self.end(reason)
            self.failure = reason
            self._wake()
            if communicator is not None:
                self._abort(communicator)
            self.is_gone = True
            self._wake()

    def _abort(self, communicator: Communicator) -> None:
        try:
            communicator.abort()
        except CommunicatorFailed as error:
            _unsafe.extend([*(item for batch in self._batches for item in batch.items), *self._waiting])
            _log.warning("%s: a communicator could not be aborted: %s", self._network.name, error)

    def _await_peer(self, communicator: Communicator) -> None:
        """Raises `CommunicatorFailed`."""
        end = time.monotonic() + self._patience_seconds
        while communicator.is_busy and self._end_reason is None:
            if time.monotonic() > end:
                raise CommunicatorFailed(f"no progress for {self._patience_seconds:g} s")
            time.sleep(POLL_SECONDS)


def _first_batch(waiting: Sequence[Carried]) -> list[Carried]:
    """The first of them, and those behind it that fit."""
    sizes = accumulate(item.num_bytes for item in waiting)
    return list(islice(waiting, max(1, sum(size <= BATCH_BYTES for size in sizes))))
