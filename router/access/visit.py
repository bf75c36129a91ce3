"""One HTTP request from its admission to its end: who sent it, until when, and what it holds of its key's limits."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..openai_errors import RATE_LIMITED, ApiError
from ..token_usage import TokenUsage
from .account import Account, Limit, OverLimit
from .caller import Caller

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at`` is on the clock ``time.monotonic``, ``seconds`` after the request arrived."""

    at: float
    seconds: float


Record = Callable[[Caller, TokenUsage], None]


class Visit:
    """``account`` is absent where nothing is counted; ``record`` gets what was used, once, at the end."""

    def __init__(
        self, caller: Caller, account: Account | None, deadline: Deadline | None, record: Record, clock: Clock
    ) -> None:
        self.caller = caller
        self.deadline = deadline
        self._account = account
        self._record = record
        self._clock = clock
        self._num_reserved = 0

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline.at - self._clock()

    @property
    def is_limited(self) -> bool:
        return self._account is not None

    def enter(self) -> None:
        """Count the request in; raises `ApiError` 429. What came in must `leave`."""
        if self._account is not None and (refused := self._account.enter(self._clock())) is not None:
            raise _too_many(self.caller, refused)

    def reserve(self, num_prompt: int, num_most: int) -> None:
        """Before any worker hears of the request, which may use ``num_most`` tokens in all.

        Raises `ApiError`: 429 where it must wait, 400 where waiting would not help.
        """
        if self._account is None:
            return
        allowed = self.caller.limits.tokens_per_minute
        if allowed is not None and num_prompt > allowed:
            message = f"The prompt has {num_prompt} tokens, the key '{self.caller.name}' may use {allowed} a minute."
            raise ApiError.invalid(None, message, RATE_LIMITED)
        reserved = self._account.reserve(num_most, self._clock())
        if isinstance(reserved, OverLimit):
            raise _too_many(self.caller, reserved)
        self._num_reserved = reserved

    def settle(self, used: TokenUsage) -> None:
        """Workers have been at it, whatever came of it: this is what it cost. Called at most once."""
        self._charge(used.num_total)
        self._record(self.caller, used)

    def leave(self) -> None:
        """The answer has been sent, or nobody waits for it any more."""
        self._charge(0)
        if self._account is not None:
            self._account.leave()

    def _charge(self, num_tokens: int) -> None:
        """Instead of what is still reserved."""
        if self._account is not None:
            self._account.settle(self._num_reserved, num_tokens, self._clock())
            self._num_reserved = 0

    def headers(self) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-…``, as it stands now."""
        headers: dict[str, str] = {}
        for standing in self._account.standings(self._clock()) if self._account is not None else ():
            headers[f"x-ratelimit-limit-{standing.limit}"] = str(standing.allowed)
            headers[f"x-ratelimit-remaining-{standing.limit}"] = str(standing.remaining)
            headers[f"x-ratelimit-reset-{standing.limit}"] = f"{standing.seconds:.3f}s"
        return headers


def _too_many(caller: Caller, refused: OverLimit) -> ApiError:
    what = f"{refused.allowed} {refused.limit} a minute"
    if refused.limit is Limit.CONCURRENCY:
        what = f"{refused.allowed} requests at a time"
    retry_after = max(1, math.ceil(refused.seconds))
    message = f"The key '{caller.name}' is limited to {what}. Please try again in {retry_after} s."
    return ApiError(429, message, type=refused.limit, code=RATE_LIMITED, retry_after=retry_after)
