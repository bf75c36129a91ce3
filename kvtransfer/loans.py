"""Blocks that this worker lends to the probes of others; pure.

::

    wanted ── blocks are free: ProbeGrant ──> OPEN ── ProbeDone ─────────────────────────> given back
                                              │ silent for a lease time                      ^
                                              ├──> QUARANTINED (ProbeGrant again) ProbeDone ─┤
                                              └──> LOST (dead) ── silent for a lease time ───┘

The borrower may write to lent blocks until it says `ProbeDone`; if it falls silent they are quarantined and it is
asked by a repeated grant, which a borrower that has ended the probe answers. See receiver.py for death.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from ..core.block_pool import BlockPool
from ..core.messages import Incarnation, Peer, ProbeGrant, ProbeRequest, ProbeSent

MAX_POOL_SHARE = 8
"""At most one block in so many is lent to one probe, but always one."""


class LoanState(Enum):
    OPEN = auto()
    QUARANTINED = auto()
    LOST = auto()


@dataclass(slots=True)
class Loan:
    probe_id: str
    borrower: Peer
    blocks: list[int]
    deadline: float
    state: LoanState = LoanState.OPEN

    @property
    def grant(self) -> ProbeGrant:
        return ProbeGrant(probe_id=self.probe_id, blocks=self.blocks)


@dataclass(frozen=True, slots=True)
class _Wanted:
    borrower: Peer
    num_blocks: int


class Lender:
    """Takes the blocks from ``pool``; a loan that is silent for ``lease_seconds`` is no longer trusted."""

    def __init__(self, pool: BlockPool, lease_seconds: float) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._wanted: dict[str, _Wanted] = {}
        self._loans: dict[str, Loan] = {}

    def request(self, request: ProbeRequest, borrower: Peer) -> ProbeGrant | None:
        """Remember the wish for `sweep`; the grant if it was fulfilled before."""
        loan = self._loans.get(request.probe_id)
        if loan is not None:
            return loan.grant if loan.borrower == borrower else None
        if request.num_blocks > 0:
            self._wanted[request.probe_id] = _Wanted(borrower, request.num_blocks)
        return None

    def sweep(self, now: float) -> Iterator[Loan]:
        """Fulfil wishes as far as blocks are free; yields loans whose borrower is to get the grant (again)."""
        most = max(1, self._pool.num_blocks // MAX_POOL_SHARE)
        for probe_id, wanted in list(self._wanted.items()):
            num_blocks = min(wanted.num_blocks, most, self._pool.num_available)
            if num_blocks > 0:
                del self._wanted[probe_id]
                blocks = self._pool.take(num_blocks)
                loan = Loan(probe_id, wanted.borrower, blocks, now + self._lease_seconds)
                self._loans[probe_id] = loan
                yield loan
        for loan in [loan for loan in self._loans.values() if now >= loan.deadline]:
            if loan.state is LoanState.LOST:
                self._end(loan)
            else:
                self._quarantine(loan, LoanState.QUARANTINED, now)
                yield loan

    def find(self, sent: ProbeSent, borrower: Incarnation, now: float) -> Loan | None:
        """The open loan in whose blocks the bytes of a trial lie or belong; any sign of life prolongs a loan."""
        loan = self._loans.get(sent.probe_id)
        if loan is None or loan.borrower.incarnation != borrower or not 0 < sent.num_blocks <= len(loan.blocks):
            return None
        if loan.state is not LoanState.QUARANTINED:
            loan.deadline = now + self._lease_seconds
        return loan if loan.state is LoanState.OPEN else None

    def done(self, probe_id: str, borrower: Peer) -> None:
        """The borrower writes no more."""
        wanted, loan = self._wanted.get(probe_id), self._loans.get(probe_id)
        if wanted is not None and wanted.borrower == borrower:
            del self._wanted[probe_id]
        if loan is not None and loan.borrower == borrower:
            self._end(loan)

    def lose(self, borrower: Peer, now: float) -> None:
        """The borrower's incarnation was declared dead."""
        self._wanted = {probe_id: wanted for probe_id, wanted in self._wanted.items() if wanted.borrower != borrower}
        for loan in self._loans.values():
            if loan.borrower == borrower:
                self._quarantine(loan, LoanState.LOST, now)

    def _quarantine(self, loan: Loan, state: LoanState, now: float) -> None:
        if loan.state is LoanState.OPEN:
            self._pool.quarantine(loan.blocks)
        loan.state = state
        loan.deadline = now + self._lease_seconds

    def _end(self, loan: Loan) -> None:
        del self._loans[loan.probe_id]
        if loan.state is LoanState.OPEN:
            self._pool.give_back(loan.blocks)
        else:
            self._pool.end_quarantine(loan.blocks)
