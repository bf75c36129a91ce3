"""A budget that refills steadily: at most a minute's worth at once, and never more than its rate over time."""

from dataclasses import dataclass

SECONDS = 60.0
ROUNDING = 1e-9


@dataclass(slots=True)
class Bucket:
    """``per_minute`` are there at the start; the level falls below zero when more is used than was reserved.

    Pure: ``now`` is any clock that never goes back, in seconds.
    """

    per_minute: int
    filled_at: float
    level: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "Bucket":
        return cls(per_minute, now, float(per_minute))

    def level_at(self, now: float) -> float:
        return min(float(self.per_minute), self.level + (now - self.filled_at) * self.per_minute / SECONDS)

    def seconds_until(self, num: int, now: float) -> float:
        """How long until ``num`` are there if nobody takes any; 0 if they are."""
        missing = num - self.level_at(now)
        return missing * SECONDS / self.per_minute if missing > ROUNDING else 0.0

    def take(self, num: int, now: float) -> None:
        """Whether they are there or not; a negative number is given back."""
        self.level = min(float(self.per_minute), self.level_at(now) - num)
        self.filled_at = now

    def change(self, per_minute: int, now: float) -> None:
        """Another rate from now on; what was used stays used."""
        used = self.per_minute - self.level_at(now)
        self.per_minute, self.filled_at, self.level = per_minute, now, per_minute - used
