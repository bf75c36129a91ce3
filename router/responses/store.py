"""Responses kept for later: bounded in number, bytes and age, apart by tenant.

A conversation is a chain of turns, each of which holds only what it added, so that branches share what they have in
common. A turn that is dropped cannot be named any more, but stays as long as one that stands on it is kept. When there
is too much, the tenant who holds most loses what it has not used for longest.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from ...core.config import ResponsesConfig

TURN_BYTES = 1024
"""What a turn costs beside its texts, roughly."""


@dataclass(slots=True, eq=False)
class Turn:
    """One response as JSON text, and the items that it was the answer to; ``kept_at`` is in seconds."""

    tenant: str
    id: str
    body: bytes
    input_items: bytes
    parent: "Turn | None"
    kept_at: float
    num_holders: int = 0
    """The store, while it can be named, and the turns that stand on it."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items) + TURN_BYTES


def turns_to(last: Turn | None) -> list[Turn]:
    """The conversation that ends with this turn, from its first."""
    turns: list[Turn] = []
    while last is not None:
        turns.append(last)
        last = last.parent
    return turns[::-1]


@dataclass(slots=True)
class _Tenant:
    """``named`` are the turns that it may ask for, the least recently used first; they stand on others."""

    named: OrderedDict[str, Turn] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """All times are seconds of one clock that does not go back."""

    def __init__(self, config: ResponsesConfig) -> None:
        self._config = config
        self._tenants: dict[str, _Tenant] = {}
        self._named: dict[str, Turn] = {}
        """In the order of their age."""
        self.num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        return self._config.max_kept > 0

    def __len__(self) -> int:
        """How many can be named."""
        return len(self._named)

    def get(self, tenant: str, response_id: str, now: float) -> Turn | None:
        """What is got counts as used; nothing for an id that is unknown, dropped, or another tenant's."""
        self._drop_old(now)
        turn = self._named.get(response_id)
        if turn is None or turn.tenant != tenant:
            return None
        self._tenants[tenant].named.move_to_end(response_id)
        return turn

    def has_room_for(self, turn: Turn) -> bool:
        """Whether `keep` will keep it, whatever else must go."""
        return self.keeps_any and sum(each.num_bytes for each in turns_to(turn)) <= self._config.max_bytes

    def keep(self, turn: Turn) -> None:
        """There must be room for it."""
        assert self.has_room_for(turn), "the caller has asked"
        self._drop_old(turn.kept_at)
        self._hold(turn)
        self._make_room()
        self._tenants[turn.tenant].named[turn.id] = self._named[turn.id] = turn

    def drop(self, turn: Turn) -> None:
        """It cannot be named any more."""
        del self._named[turn.id], self._tenants[turn.tenant].named[turn.id]
        self._let_go(turn)

    def _drop_old(self, now: float) -> None:
        while self._named:
            oldest = next(iter(self._named.values()))
            if now - oldest.kept_at <= self._config.max_seconds:
                return
            self.drop(oldest)

    def _make_room(self) -> None:
        """For one more turn, whose bytes are counted already."""
        while len(self._named) >= self._config.max_kept:
            self._drop_least_used(max(self._tenants.values(), key=lambda tenant: len(tenant.named)))
        while self.num_bytes > self._config.max_bytes:
            losers = [tenant for tenant in self._tenants.values() if tenant.named]
            self._drop_least_used(max(losers, key=lambda tenant: tenant.num_bytes))

    def _drop_least_used(self, tenant: _Tenant) -> None:
        self.drop(next(iter(tenant.named.values())))

    def _hold(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_holders += 1
            if turn.num_holders > 1:
                return
            self._count(turn, turn.num_bytes)
            turn = turn.parent

    def _let_go(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self._count(turn, -turn.num_bytes)
            turn = turn.parent

    def _count(self, turn: Turn, num_bytes: int) -> None:
        tenant = self._tenants.setdefault(turn.tenant, _Tenant())
        tenant.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if tenant.num_bytes == 0:
            del self._tenants[turn.tenant]
