"""How long a request stays in the stages of its life on a worker: values that parts note and others tell.

The stages of a request follow each other without a gap: they are its critical path. On a prefill worker it waits
(``prefill.queue``), is computed (``prefill``), and then only its transfer is left (``transfer``), of which most went on
meanwhile. On a decode worker it waits for its first step (``decode.queue``) and runs (``decode``).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from .request import Request, RequestId


class StageName(StrEnum):
    PREFILL_QUEUE = "prefill.queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode.queue"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a traced request, told when the request has left the worker. Times are the ``now`` of the loop.

    ``outcome`` is empty where the stage was completed, else says what ended the request in it.
    """

    name: StageName
    trace: str
    request_id: RequestId
    began_at: float
    ended_at: float
    counts: dict[str, int]
    outcome: str = ""


@dataclass(slots=True)
class _Entered:
    name: StageName
    at: float
    counts: dict[str, int] = field(default_factory=dict)


class Timeline:
    """The stages that one request has entered on one worker."""

    def __init__(self, request: Request, first: StageName, now: float) -> None:
        self._request = request
        self._entered = [_Entered(first, now)]

    def enter(self, name: StageName, now: float) -> None:
        """The stage before it is completed."""
        self._entered.append(_Entered(name, now))

    def count(self, **counts: int) -> None:
        """What the current stage is about, for its span."""
        self._entered[-1].counts.update(counts)

    def seconds(self, name: StageName, now: float) -> float:
        """Of a stage that was entered, up to now if it is the current one."""
        return next(end - stage.at for stage, end in self._spans(now) if stage.name is name)

    def ended(self, now: float, outcome: str = "") -> list[Stage]:
        """The request leaves the worker: all its stages where it is traced, none where it is not."""
        request = self._request
        if not request.trace:
            return []
        return [
            Stage(
                name=stage.name,
                trace=request.trace,
                request_id=request.request_id,
                began_at=stage.at,
                ended_at=end,
                counts=stage.counts,
                outcome=outcome if stage is self._entered[-1] else "",
            )
            for stage, end in self._spans(now)
        ]

    def _spans(self, now: float) -> "zip[tuple[_Entered, float]]":
        """Every stage with its end."""
        return zip(self._entered, [*(following.at for following in self._entered[1:]), now], strict=True)
