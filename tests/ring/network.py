"""Messages between simulated processes, delivered when the test says so.

A link keeps the order of what it carries; payloads have links of their own, from an address at which nobody listens.
Links between two workers may also lose, repeat and reorder; those of the router are as good as ZeroMQ's between live
processes.
"""

from collections import deque
from dataclasses import dataclass
from random import Random

from crossdock.core.messages import Incarnation, Message, Peer
from crossdock.core.part import Delivery
from crossdock.core.wire_format import decode, encode

BULK = "/bulk"


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities, for one message between two workers."""

    loss: float = 0.0
    repetition: float = 0.0
    reordering: float = 0.0


NO_FAULTS = Faults()


class Network:
    """``inboxes`` holds one queue for each process that lives; what is sent to others vanishes."""

    def __init__(self, random: Random, faults: Faults, router: Peer) -> None:
        self.inboxes: dict[Incarnation, deque[Delivery]] = {router.incarnation: deque()}
        self.faults = faults
        self._random = random
        self._router = router
        self._links: dict[tuple[Peer, Peer], list[Delivery]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._links

    def send(self, sender: Peer, to: Peer, message: Message, payload: bytes = b"") -> None:
        assert not to.address.endswith(BULK), "a bulk address is answered"
        if payload:
            sender = Peer(sender.address + BULK, sender.incarnation)
        delivery = Delivery(sender, decode(encode(message)), memoryview(payload))
        copies = 1
        if self._router not in (sender, to):
            copies += self._random.random() < self.faults.repetition
            copies -= self._random.random() < self.faults.loss
        if copies:
            self._links.setdefault((sender, to), []).extend([delivery] * copies)

    def deliver_one(self) -> None:
        """Bring the next message of some link to its inbox."""
        link = self._random.choice(list(self._links))
        waiting = self._links[link]
        is_out_of_order = self._router not in link and self._random.random() < self.faults.reordering
        delivery = waiting.pop(self._random.randrange(len(waiting)) if is_out_of_order else 0)
        if not waiting:
            del self._links[link]
        inbox = self.inboxes.get(link[1].incarnation)
        if inbox is not None:
            inbox.append(delivery)
