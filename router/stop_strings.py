"""Stop strings, found across the borders of tokens and never shown in part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .parsing.markers import unfinished


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may be shown now; ``is_stopped`` when a stop string came right after it."""

    text: str
    is_stopped: bool = False


class StopScanner:
    """Passes text on, but for the longest end of it that could still become a stop string.

    The stop string that is complete first ends the text, at its start; of those complete at the same character the
    longest. So the outcome does not depend on how the text is cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is refused at the door"
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> Scanned:
        """A stop string completed by ``text`` ends the output only if ``may_stop``; else it is text like any other."""
        if not self._stops:
            return Scanned(text)
        seen = self._held + text
        start = self._first_stop(seen) if may_stop else None
        if start is not None:
            self._held = ""
            return Scanned(seen[:start], is_stopped=True)
        border = min((unfinished(seen, stop) for stop in self._stops), default=len(seen))
        self._held = seen[border:]
        return Scanned(seen[:border])

    def flush(self) -> str:
        """What was held back, once nothing more can follow."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, seen: str) -> int | None:
        return min(self._completed(seen), default=(0, None))[1]

    def _completed(self, seen: str) -> Iterator[tuple[int, int]]:
        """(end, start) of the first occurrence of each stop string that reaches beyond what was held."""
        for stop in self._stops:
            start = seen.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                yield start + len(stop), start
