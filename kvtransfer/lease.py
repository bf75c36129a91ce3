"""A promise on blocks: who may write to them, for how long, and which promise of this slot it is.

The owner of the blocks and the holder each keep their own `Lease`, measured by their own clock. The holder
counts it shorter, so that it stops before the owner's deadline. Time is seconds of a monotonic clock.
"""

from dataclasses import dataclass

from ..core.messages import Commit, Incarnation, LeaseId, Push, Renew


@dataclass(slots=True)
class Lease:
    """``seconds`` from the last renewal it is expired; ``holder`` alone may use it."""

    id: LeaseId
    generation: int
    holder: Incarnation
    seconds: float
    deadline: float

    def renew(self, now: float) -> None:
        self.deadline = now + self.seconds

    def is_expired(self, now: float) -> bool:
        return now >= self.deadline

    def covers(self, message: Push | Renew | Commit, sender: Incarnation) -> bool:
        """Whether the message speaks of this very promise and comes from its holder."""
        return (message.lease_id, message.generation, sender) == (self.id, self.generation, self.holder)


class LeaseBook:
    """Ids for the leases of one pool. An id that has been used before comes back with the next generation."""

    def __init__(self) -> None:
        self._generations: list[int] = []
        self._free: list[LeaseId] = []

    def grant(self, holder: Incarnation, seconds: float, now: float) -> Lease:
        lease_id = self._free.pop() if self._free else self._new_id()
        return Lease(lease_id, self._generations[lease_id], holder, seconds, now + seconds)

    def _new_id(self) -> LeaseId:
        self._generations.append(0)
        return LeaseId(len(self._generations) - 1)

    def end(self, lease: Lease) -> None:
        """No message with this id and generation means anything from now on. Ending a lease again does nothing."""
        if self._generations[lease.id] == lease.generation:
            self._generations[lease.id] += 1
            self._free.append(lease.id)
