"""A borrower and a lender over a network that loses, repeats and reorders, with borrowers that stall and die."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.core.block_pool import BlockPool
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import (
    Incarnation,
    Message,
    Peer,
    PoolBooks,
    ProbeDone,
    ProbeGrant,
    ProbeRequest,
    ProbeSent,
    ProbeVerdict,
    Role,
    WorkerCard,
)
from crossdock.kvtransfer.loans import Lender
from crossdock.kvtransfer.probe import Probe, ProbeActions

LEASE_SECONDS = 12.0
PREFILL = Peer("tcp://127.0.0.1:1", Incarnation("p"))
DECODE = Peer("tcp://127.0.0.1:2", Incarnation("d"))
CARD = WorkerCard(
    role=Role.PREFILL,
    model="m",
    layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
    num_blocks=24,
    max_model_len=64,
    max_num_seqs=64,
    vocab_size=100,
    num_layer_groups=1,
)
POOL_BLOCKS = 24
OTHERS = "somebody else's"


class Fault(Enum):
    LOSS = "messages get lost"
    REPETITION = "messages arrive again"
    DISORDER = "messages overtake each other"
    DELAY = "time jumps"
    STALL = "the borrower stands still, and may be declared dead by mistake"
    DEATH = "the borrower dies"


@dataclass(frozen=True)
class Packet:
    to: Peer
    message: Message


class Lending:
    """One probe; ``memory`` says what lies in each block of the lender."""

    def __init__(self) -> None:
        self.now = 0.0
        self.packets: list[Packet] = []
        self.pool = BlockPool(POOL_BLOCKS)
        self.memory = [""] * POOL_BLOCKS
        self.others: list[int] = []
        self.lender = Lender(self.pool, LEASE_SECONDS)
        self.probe = Probe("p/d", DECODE, ("shm", "cuda_ipc"), 3, CARD, LEASE_SECONDS)
        self.is_dead = self.is_stalled = self.is_lost = False

    @property
    def is_running(self) -> bool:
        return not self.is_dead and not self.is_stalled

    def post(self, to: Peer, message: Message) -> None:
        """A pair of one host, of which one was declared dead by mistake, loses nothing."""
        packet = Packet(to, message)
        if self.is_lost and to == DECODE:
            self.deliver(packet)
        else:
            self.packets.append(packet)

    def obey(self, actions: ProbeActions) -> None:
        for message in actions.messages:
            self.post(DECODE, message)

    def deliver(self, packet: Packet) -> None:
        match packet.message:
            case ProbeRequest() as asked:
                granted = None if self.is_lost else self.lender.request(asked, PREFILL)
                if granted:
                    self.post(PREFILL, granted)
            case ProbeDone() as done:
                self.lender.done(done.probe_id, PREFILL)
            case ProbeSent() as sent:
                self.judge(sent)
            case ProbeGrant() as granted if self.is_running:
                self.obey(self.probe.granted(granted, self.now))
            case ProbeVerdict() as verdict if self.is_running:
                self.obey(self.probe.judged(verdict, self.now))

    def judge(self, sent: ProbeSent) -> None:
        loan = self.lender.find(sent, PREFILL.incarnation, self.now)
        if loan is not None:
            is_correct = {self.memory[block] for block in loan.blocks[: sent.num_blocks]} == {sent.digest.decode()}
            self.post(PREFILL, ProbeVerdict(probe_id=sent.probe_id, trial=sent.trial, is_correct=is_correct))

    def tick_borrower(self) -> None:
        if not self.is_running:
            return
        self.obey(self.probe.tick(self.now))
        trial = self.probe.trial
        if trial is None:
            return
        content = f"{self.probe.probe_id} {trial.number}"
        for block in trial.blocks:
            self.memory[block] = content
        self.probe.sent(self.now, self.now)
        sent = ProbeSent(
            probe_id=self.probe.probe_id,
            trial=trial.number,
            transport=trial.transport,
            num_blocks=len(trial.blocks),
            digest=content.encode(),
        )
        self.post(DECODE, sent)

    def sweep_lender(self) -> None:
        for loan in self.lender.sweep(self.now):
            self.post(PREFILL, loan.grant)

    def wake(self) -> None:
        """What came meanwhile lies in the mailbox."""
        self.is_stalled = False
        for packet in [packet for packet in self.packets if packet.to == PREFILL]:
            self.packets.remove(packet)
            self.deliver(packet)

    def lose(self) -> None:
        self.is_lost = True
        self.lender.lose(PREFILL, self.now)


class RandomWalk:
    def __init__(self, lending: Lending, faults: frozenset[Fault], random: Random) -> None:
        self.lending = lending
        self.random = random
        self.is_ordered = Fault.DISORDER not in faults
        weights: Counter[Callable[[], None]] = Counter(
            {
                self.deliver: 8,
                lending.tick_borrower: 4,
                lending.sweep_lender: 4,
                self.wait: 2,
                self.take: 1,
                self.give: 1,
            }
        )
        of_faults: dict[Fault, dict[Callable[[], None], int]] = {
            Fault.LOSS: {self.lose_message: 2},
            Fault.REPETITION: {self.repeat: 4},
            Fault.DELAY: {self.jump: 2},
            Fault.STALL: {self.stall: 1, self.wake: 1, self.declare_dead: 1},
            Fault.DEATH: {self.die: 1, self.declare_dead: 1},
        }
        for fault in Fault:  # in the same order in every process
            weights.update(of_faults.get(fault, {}) if fault in faults else {})
        self._steps, self._weights = list(weights), list(weights.values())

    def step(self) -> None:
        self.random.choices(self._steps, self._weights)[0]()
        lending = self.lending
        assert all(lending.memory[block] == OTHERS for block in lending.others), "a trial wrote to blocks of others"
        lending.pool.check()

    def pick(self) -> int:
        return 0 if self.is_ordered else self.random.randrange(len(self.lending.packets))

    def deliver(self) -> None:
        if self.lending.packets:
            self.lending.deliver(self.lending.packets.pop(self.pick()))

    def repeat(self) -> None:
        if self.lending.packets:
            packet = self.lending.packets.pop(self.pick())
            self.lending.packets.append(packet)
            self.lending.deliver(packet)

    def lose_message(self) -> None:
        if self.lending.packets:
            self.lending.packets.pop(self.pick())

    def wait(self) -> None:
        self.lending.now += self.random.uniform(0.0, 1.0)
        self.lending.tick_borrower()
        self.lending.sweep_lender()

    def jump(self) -> None:
        self.lending.now += self.random.choice([LEASE_SECONDS / 3, LEASE_SECONDS * 0.7, LEASE_SECONDS * 1.1])

    def take(self) -> None:
        taken = self.lending.pool.take(self.lending.pool.num_available)
        for block in taken:
            self.lending.memory[block] = OTHERS
        self.lending.others += taken

    def give(self) -> None:
        self.lending.pool.give_back(self.lending.others)
        self.lending.others = []

    def stall(self) -> None:
        self.lending.is_stalled = True

    def wake(self) -> None:
        if self.lending.is_stalled and not self.lending.is_dead:
            self.lending.wake()

    def die(self) -> None:
        self.lending.is_dead = True

    def declare_dead(self) -> None:
        if not self.lending.is_running:
            self.lending.lose()


@settings(max_examples=800, deadline=None)
@given(seed=st.integers(0, 2**32), faults=st.frozensets(st.sampled_from(Fault)))
def test_whatever_goes_wrong_lent_blocks_harm_nobody_and_come_back(seed: int, faults: frozenset[Fault]) -> None:
    lending = Lending()
    walk = RandomWalk(lending, faults, Random(seed))
    for _ in range(80):
        walk.step()
    walk.give()
    lending.is_stalled = False
    lending.packets = [] if lending.is_dead or lending.is_lost else lending.packets
    for _ in range(120):
        while lending.packets:
            lending.deliver(lending.packets.pop(0))
        lending.tick_borrower()
        lending.sweep_lender()
        lending.now += 1.0
        if lending.is_dead and not lending.is_lost:
            lending.lose()
    assert lending.is_dead or lending.is_lost or lending.probe.is_linked
    assert lending.pool.books() == PoolBooks(free=POOL_BLOCKS, cached=0, leased=0, quarantined=0)
