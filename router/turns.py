"""In which order the deliveries of workers are handled: everyone gets a turn, and no turn is long."""

from collections import deque

from ..core.messages import Incarnation, TokenDelta, Tokens
from ..core.part import Delivery

MAX_TOKENS_A_TURN = 4
"""So many are brought to their clients before new requests get their turn of the event loop."""

LONG_QUEUE = 256
"""For each so many pieces that wait, a turn takes one more: what lags behind leaves in fewer and longer writes."""


class Turns:
    """A queue of deliveries a worker, served one after the other.

    A step of a worker with hundreds of requests is one message with a token of each. It is handled in pieces, with
    first tokens, for which somebody has waited longest, in the first of them. Of one worker the order is kept,
    except that a request's first token may overtake tokens of other requests in the same message.
    """

    def __init__(self) -> None:
        self._waiting: dict[Incarnation, deque[Delivery]] = {}

    def __len__(self) -> int:
        """Pieces, not messages."""
        return sum(map(len, self._waiting.values()))

    def add(self, delivery: Delivery) -> Delivery | None:
        """Queue it; of a worker for which nothing waits the first piece comes back, to be handled at once."""
        first, *rest = _pieces(delivery)
        waiting = self._waiting.get(delivery.sender.incarnation)
        if waiting is not None:
            waiting.extend((first, *rest))
            return None
        if rest:
            self._waiting[delivery.sender.incarnation] = deque(rest)
        return first

    def take(self) -> list[Delivery]:
        """The pieces of the next turn; none if nothing waits."""
        num_pieces = min(1 + len(self) // LONG_QUEUE, len(self))
        return [self._take_one() for _ in range(num_pieces)]

    def _take_one(self) -> Delivery:
        """Of the worker that had its turn longest ago."""
        incarnation = next(iter(self._waiting))
        pieces = self._waiting.pop(incarnation)
        taken = pieces.popleft()
        if pieces:
            self._waiting[incarnation] = pieces
        return taken


def _pieces(delivery: Delivery) -> list[Delivery]:
    message = delivery.message
    if not isinstance(message, Tokens) or len(message.deltas) <= MAX_TOKENS_A_TURN:
        return [delivery]
    deltas = sorted(message.deltas, key=_is_no_first)
    starts = range(0, len(deltas), MAX_TOKENS_A_TURN)
    return [Delivery(delivery.sender, Tokens(deltas=deltas[n : n + MAX_TOKENS_A_TURN])) for n in starts]


def _is_no_first(delta: TokenDelta) -> bool:
    return delta.index > 0
