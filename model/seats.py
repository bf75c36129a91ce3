"""Rows of a table on the device that list the blocks of a sequence from step to step (see `kernels/step_inputs`).

A sequence that took part in the step before has gained at most its next block since; any other is seated anew, all its
blocks with it. Seats outlive their sequences until others need them: steps in flight that still read a seat run before
the one that writes it anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Seat:
    """``num_blocks`` columns are on the device as of step ``step``, whose row ``place`` is the sequence's."""

    number: int
    sequence: Sequence
    step: int
    num_blocks: int = 0
    place: int = -1


class Seats:
    """Which sequence sits where; at most ``num_seats / 2`` in one step, so that those of the step before stay."""

    def __init__(self, num_seats: int) -> None:
        self._free = list(range(num_seats))
        self._taken: dict[int, Seat] = {}
        self._newcomers: list[Seat] = []

    def take(self, sequence: Sequence, step: int) -> Seat:
        """The sequence's seat in this step; what it knows is void unless the sequence took part in the one before."""
        seat = self._taken.get(id(sequence))
        if seat is None:
            if not self._free:
                self._vacate(step)
            seat = self._taken[id(sequence)] = Seat(self._free.pop(), sequence, step)
            self._newcomers.append(seat)
        elif seat.step < step - 1:
            seat.num_blocks = 0
            self._newcomers.append(seat)
        seat.step = step
        return seat

    def keep(self, seats: Iterable[Seat], step: int) -> None:
        """The same as in the step before, in the same places."""
        for seat in seats:
            seat.step = step

    def end_step(self) -> tuple[Seat, ...]:
        """Those seated since the last call."""
        newcomers, self._newcomers = self._newcomers, []
        return tuple(newcomers)

    def _vacate(self, step: int) -> None:
        gone = [key for key, seat in self._taken.items() if seat.step < step - 1]
        self._free += [self._taken.pop(key).number for key in gone]
