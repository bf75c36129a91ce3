"""Random stories of whole deployments; every one must end with the reference's tokens and all blocks free."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from msgspec.structs import replace

from crossdock.core.messages import Role
from crossdock.core.request import Fork, Request, RequestId, SamplingParams, pack_ids
from crossdock.kvtransfer.sender import MAX_OFFERS

from .fake_device import VOCAB_SIZE, reference_output
from .network import NO_FAULTS, Faults
from .simulated_ring import LEASE_SECONDS, Call, Ring, Shape


@dataclass(frozen=True, slots=True)
class Topology:
    """Roles of the workers, and which of them prefill for which."""

    roles: dict[str, Role]
    pairs: tuple[tuple[str, str], ...]


TOPOLOGIES = {
    "mixed": Topology({"m": Role.MIXED}, (("m", "m"),)),
    "1P1D": Topology({"p": Role.PREFILL, "d": Role.DECODE}, (("p", "d"),)),
    "2P2D": Topology(
        {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE},
        (("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")),
    ),
    "decode worker that prefills too": Topology(
        {"p": Role.PREFILL, "d": Role.DECODE}, (("p", "d"), ("p", "d"), ("d", "d"))
    ),
    "all roles": Topology(
        {"p": Role.PREFILL, "m": Role.MIXED, "d": Role.DECODE},
        (("p", "m"), ("p", "d"), ("m", "m"), ("m", "d")),
    ),
}
CROSSED = Topology({"m1": Role.MIXED, "m2": Role.MIXED}, (("m1", "m2"), ("m2", "m1"), ("m1", "m1"), ("m2", "m2")))


def random_shape(random: Random) -> Shape:
    block_size = random.choice([4, 4, 16])
    return Shape(
        num_blocks=random.choice([6, 8, 12, 24]),
        block_size=block_size,
        chunk_tokens=random.choice([block_size, 2 * block_size, 5 * block_size, 16 * block_size]),
        max_num_seqs=random.choice([2, 64]),
        prefix_cache=random.random() < 0.7,
    )


def random_request(random: Random, number: int, shape: Shape) -> Request:
    """Prompts share beginnings; some ask for nothing, for one token, for several choices, or stop somewhere.

    Each third has a grammar.
    """
    capacity = min(shape.num_blocks * shape.block_size, 80)
    num_prompt = random.randint(1, capacity - 1)
    start = random.choice([1000, 2000])
    prompt = list(range(start, start + num_prompt))
    if random.random() < 0.5:
        prompt[random.randrange(num_prompt) :] = []
        prompt.append(number)
    room = capacity - len(prompt)
    max_tokens = random.choice([0, 1, 2, room, random.randint(0, room), random.randint(0, room)])
    grammar = f"g{number}" if number % 3 == 0 else ""
    params = SamplingParams(max_tokens=min(room, max_tokens), seed=number, grammar=grammar)
    request = Request(
        request_id=RequestId(f"r{number}"),
        prompt=pack_ids(prompt),
        params=params,
        priority=random.choice([0, 0, 1]),
        forks=random_forks(random, number, len(prompt), shape),
    )
    output = reference_output(request)
    if output and random.random() < 0.4:
        stop = (random.choice(output), random.randrange(VOCAB_SIZE))
        request = replace(request, params=replace(params, stop_token_ids=stop))
    return request


def random_forks(random: Random, number: int, num_prompt: int, shape: Shape) -> tuple[Fork, ...]:
    """Mostly none, else as many as fit or fewer."""
    num_spare = shape.num_blocks - -(-num_prompt // shape.block_size)
    most = min(6, shape.max_num_seqs - 1, num_spare if num_prompt % shape.block_size else 6)
    num_forks = random.choice([0, 0, 0, most, random.randint(0, most)])
    return tuple(Fork(RequestId(f"r{number}.{k}"), 1000 * (k + 1) + number) for k in range(num_forks))


@dataclass(slots=True)
class Story:
    """One random deployment and what its clients want of it."""

    ring: Ring
    topology: Topology
    random: Random
    shape: Shape

    @classmethod
    def of(
        cls,
        topology: Topology,
        seed: int,
        faults: Faults = NO_FAULTS,
        push_faults: float = 0.0,
        corruption: float = 0.0,
    ) -> "Story":
        random = Random(seed)
        shape = random_shape(random)
        shapes = {name: (role, shape) for name, role in topology.roles.items()}
        ring = Ring(random, shapes, faults, random.choice(["shm", "tcp"]), push_faults, corruption)
        return cls(ring, topology, random, shape)

    def submit(self) -> Call:
        request = random_request(self.random, len(self.ring.calls), self.shape)
        return self.ring.submit(request, *self.random.choice(self.topology.pairs))

    def act(self, seconds_per_move: float, whims: float, deaths: float) -> None:
        """One move, after which a client may leave and a worker may die, be noticed or stand still."""
        ring, random = self.ring, self.random
        ring.now += random.random() * 2 * seconds_per_move
        ring.move()
        if random.random() < whims and ring.open_calls:
            ring.abort(random.choice(ring.open_calls))
        if random.random() < deaths and ring.workers:
            ring.kill(random.choice(list(ring.workers)))
        if ring.dead and random.random() < 0.02:
            ring.bury()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_without_faults_every_request_completes_and_needs_no_clock(name: str) -> None:
    for seed in range(20):
        story = Story.of(TOPOLOGIES[name], seed)
        for _ in range(20):
            story.submit()
            for _ in range(story.random.choice([0, 10, 60])):
                story.ring.move()
        story.ring.settle()
        assert {call.outcome for call in story.ring.calls.values()} == {"complete"}, story.ring.describe()
        story.ring.drain(10 * LEASE_SECONDS)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_whatever_fails_no_token_is_wrong_and_no_block_is_lost(name: str) -> None:
    for seed in range(30):
        random = Random(seed)
        level = random.choice([0.0, 0.02, 0.2])
        faults = Faults(loss=level, repetition=level, reordering=level)
        story = Story.of(TOPOLOGIES[name], seed, faults, random.choice([0, 0, 0.1]), random.choice([0, 0, 0.2]))
        pace = random.choice([0.0, 0.003, 0.03])
        whims, deaths = random.choice([0.0, 0.01, 0.05]), random.choice([0, 0, 0.003])
        for _ in range(20):
            story.submit()
            for _ in range(story.random.choice([0, 10, 60])):
                story.act(pace, whims, deaths)
        story.ring.bury()
        story.ring.drain(100 * LEASE_SECONDS)


def run(story: Story, seconds_per_move: float, num_moves: int = 400) -> Iterator[None]:
    """Requests come and are served; the caller interferes after each move. Then all must end well."""
    for number in range(num_moves):
        if number % 20 == 0:
            story.submit()
        story.act(seconds_per_move, 0.005, 0.0)
        yield
    story.ring.asleep.clear()
    story.ring.drain(100 * LEASE_SECONDS)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_worker_that_stood_still_writes_nothing_into_blocks_that_are_no_longer_its_own(name: str) -> None:
    for seed in range(8):
        story = Story.of(TOPOLOGIES[name], seed)
        for _ in run(story, 0.003):
            if story.random.random() < 0.02:
                story.ring.asleep = {story.random.choice(list(story.ring.workers))}
            elif story.random.random() < 0.05:
                story.ring.asleep.clear()
                story.ring.now += story.random.random() * 3 * LEASE_SECONDS


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_live_worker_that_is_taken_for_dead_does_no_harm(name: str) -> None:
    for seed in range(8):
        story = Story.of(TOPOLOGIES[name], seed)
        for _ in run(story, 0.003):
            if story.random.random() < 0.01:
                story.ring.slander(story.random.choice(list(story.ring.workers)))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_worker_without_its_router_drops_everything(name: str) -> None:
    for seed in range(8):
        story = Story.of(TOPOLOGIES[name], seed)
        for _ in run(story, 0.003):
            if story.random.random() < 0.01:
                story.ring.lose_router(story.random.choice(list(story.ring.workers)))


def test_two_workers_that_decode_for_each_other_wait_no_longer_than_their_offers_last() -> None:
    """Each may be full of KV that waits for room at the other: some requests fail, all others go on."""
    outcomes: set[str] = set()
    for seed in range(40, 50):
        story = Story.of(CROSSED, seed)
        for _ in range(20):
            story.submit()
            story.ring.move()
        story.ring.drain(100 * LEASE_SECONDS)
        outcomes |= {call.outcome for call in story.ring.calls.values()}
    assert outcomes == {"complete", f"failed: no room within {MAX_OFFERS} offers"}
