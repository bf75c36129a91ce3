"""The router as workers see it, in token ids and without HTTP: real worker processes under a clock of this process."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import (
    Hello,
    Incarnation,
    Link,
    Message,
    Peer,
    PeerInfo,
    Peers,
    PrefillTask,
    RequestFailed,
    Role,
    TokenDelta,
    Tokens,
    WorkerCard,
)
from crossdock.core.request import Request, RequestId, SamplingParams, TransferId
from crossdock.deploy.launch import crossdock_command

READY_SECONDS = 180.0
STOP_SECONDS = 10.0
PEERS_SECONDS = 2.0


class WorkersFailed(RuntimeError):
    """They ended, or did not do in time what was waited for; with the ends of their logs."""


@dataclass(slots=True, eq=False)
class Watched:
    """One request: when it was sent, when each of its tokens came, and what its decode worker told of it.

    The second token may overtake the first, which comes from another worker.
    """

    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    came_at: list[float] = field(default_factory=list)
    transfer_seconds: float = 0.0
    decode_queue_seconds: float = 0.0
    is_finished: bool = False
    _early: dict[int, tuple[TokenDelta, float]] = field(default_factory=dict)

    def take(self, delta: TokenDelta, now: float) -> None:
        self._early[delta.index] = delta, now
        while (following := self._early.pop(len(self.token_ids), None)) is not None:
            delta, came_at = following
            assert delta.token_id is not None, "greedy requests of a fixed length end with a token"
            self.token_ids.append(delta.token_id)
            self.came_at.append(came_at)
            self.is_finished = delta.finish is not None
            if delta.times is not None and delta.times.transfer_seconds is not None:
                self.transfer_seconds = delta.times.transfer_seconds
                self.decode_queue_seconds = delta.times.queue_seconds

    @property
    def first_token_seconds(self) -> float:
        return self.came_at[0] - self.sent_at


class PlayedRouter:
    """``logs`` are those of the workers, told when something goes wrong."""

    def __init__(self, logs: Sequence[Path] = ()) -> None:
        self.logs = list(logs)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._mailbox = Mailbox("127.0.0.1", 0, Incarnation("played-router"))
        self._cards: dict[Peer, WorkerCard] = {}
        self.links: list[Link] = []
        self._requests: dict[RequestId, Watched] = {}
        self._numbers = count()
        self._told_peers_at = 0.0

    @property
    def address(self) -> str:
        return self._mailbox.peer.address

    def worker(self, role: Role) -> Peer:
        return next(peer for peer, card in self._cards.items() if card.role is role)

    def wait_for(self, num_workers: int, num_links: int) -> None:
        """All are there, and each prefill worker has a way to each decode worker. Raises `WorkersFailed`."""
        self.run_until(lambda: len(self._cards) == num_workers and len(self.links) >= num_links, READY_SECONDS)
        if errors := [link.error for link in self.links if link.error]:
            raise self._failed("; ".join(errors))

    def submit(self, prompt: bytes, max_tokens: int, prefill: Peer, decode: Peer) -> Watched:
        """A greedy request whose tokens ``decode`` makes from the second on; a single one needs no transfer.

        ``prompt`` are ids as `pack_ids` makes them.
        """
        request_id = RequestId(f"r{next(self._numbers)}")
        params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
        request = Request(request_id=request_id, prompt=prompt, params=params)
        watched = self._requests[request_id] = Watched(time.perf_counter())
        self._mailbox.send(prefill, PrefillTask(request=request, transfer_id=TransferId(request_id), decode=decode))
        return watched

    def finish(self, requests: Sequence[Watched], seconds: float = 120.0) -> None:
        """Until they all are finished. Raises `WorkersFailed`."""
        self.run_until(lambda: all(request.is_finished for request in requests), seconds)

    def run_until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Raises `WorkersFailed`."""
        end = time.monotonic() + seconds
        while not holds():
            self._listen()
            if any(process.poll() is not None for process in self.processes):
                raise self._failed("a worker has ended")
            if time.monotonic() > end:
                raise self._failed(f"not within {seconds:.0f} s")

    def close(self) -> None:
        self._mailbox.close()

    def _listen(self) -> None:
        self._mailbox.poll_socket.poll(100)
        while (delivery := self._mailbox.receive()) is not None:
            self._take(delivery.sender, delivery.message, time.perf_counter())
        if time.monotonic() - self._told_peers_at > PEERS_SECONDS:
            self._tell_peers()

    def _take(self, sender: Peer, message: Message, now: float) -> None:
        match message:
            case Hello(card=card):
                self._cards[sender] = card
                self._tell_peers()
            case Link() as link:
                self.links = [known for known in self.links if known.to != link.to] + [link]
            case Tokens(deltas=deltas):
                for delta in deltas:
                    self._requests[delta.request_id].take(delta, now)
            case RequestFailed(request_id=request_id, reason=reason):
                raise self._failed(f"{request_id}: {reason}")

    def _tell_peers(self) -> None:
        self._told_peers_at = time.monotonic()
        everyone = Peers(workers=[PeerInfo(peer, card) for peer, card in self._cards.items()])
        for peer in self._cards:
            self._mailbox.send(peer, everyone)

    def _failed(self, reason: str) -> WorkersFailed:
        ends = "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.logs)
        return WorkersFailed(reason + ends)


@contextmanager
def fleet(model: Path, roles: Sequence[Role], flags: Sequence[str], logs: Path) -> Iterator[PlayedRouter]:
    """Worker processes that are ready, one a role, on the GPUs of this host in turn, and gone afterwards.

    Raises `WorkersFailed`.
    """
    router = PlayedRouter([logs / f"{role.value}{number}.log" for number, role in enumerate(roles)])
    try:
        for number, (role, log) in enumerate(zip(roles, router.logs, strict=True)):
            place = (f"--number={number}", f"--num-on-host={len(roles)}", f"--parent-pid={os.getpid()}")
            command = crossdock_command(
                "worker", str(model), f"--role={role.value}", f"--router={router.address}", *place, *flags
            )
            with log.open("wb") as output:
                router.processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        num_decode = sum(role is Role.DECODE for role in roles)
        router.wait_for(len(roles), num_decode if Role.PREFILL in roles else 0)
        yield router
    finally:
        for process in router.processes:
            process.terminate()
        for process in router.processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        router.close()


def random_prompt(draw: np.random.Generator, num_tokens: int, vocab_size: int) -> bytes:
    """Token ids as they travel, made so fast that no token that comes meanwhile is noticed late."""
    return draw.integers(vocab_size, size=num_tokens, dtype="<u4").tobytes()
