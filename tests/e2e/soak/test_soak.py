"""Everything goes wrong, at random, for minutes: every answer is right or an honest error, and no block is lost.

It runs for `SOAK_SECONDS`, or as many as the environment variable `CROSSDOCK_TEST_SOAK` says, and for a round at least;
`CROSSDOCK_TEST_SEED` draws other disturbances.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from ..questions import Question, random_questions
from ..server import free_port
from .fleet import Fleet, Place
from .meddler import CALM, ROUTER, Meddler, Weather
from .visitors import Visitors

SOAK_SECONDS = 600.0
ROUND_SECONDS = 15.0
SEED = "20261129"
PLACES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
NUM_BLOCKS = 64
LONGEST_PROMPT = 600
"""With its answer two thirds of a pool: two of them can't decode side by side."""
NUM_TOKENS = 96
NUM_REGULARS = 8
NUM_CALM_ANSWERS = 4
STORM = Weather(lost=0.03, late=0.04, swapped=0.1, twice=0.04, garbled=0.02, flipped=0.02, resized=0.02)
TRANSPORTS = ("tcp", "ucx", "shm")


@pytest.fixture(scope="module")
def questions(small_model: Path) -> Sequence[Question]:
    return random_questions(small_model, 12, LONGEST_PROMPT, NUM_TOKENS)


def flags_for(random: Random) -> Callable[[str], Sequence[str]]:
    """Prefill workers have all transports, every new decode worker one, in turn."""
    transports = cycle(random.sample(TRANSPORTS, len(TRANSPORTS)))

    def flags(place: str) -> Sequence[str]:
        names = ",".join(TRANSPORTS) if place.startswith("prefill") else next(transports)
        return (f"--transports={names}", f"--num-blocks={NUM_BLOCKS}", "--chunk-tokens=64", "--transfer-checksums")

    return flags


@dataclass
class Soak:
    """One run, each round in one of the ``weathers`` with disturbances of these ``kinds``.

    ``counts`` are its disturbances, ``errors`` the honest ones.
    """

    weathers: Sequence[Weather]
    kinds: Sequence[str]
    fleet: Fleet
    meddler: Meddler
    questions: Sequence[Question]
    random: Random
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    num_right: int = 0
    num_left: int = 0

    def round(self, seconds: float) -> None:
        """Disturbances, one after the other, under load; then calm, in which everything must be as it was."""
        visitors = Visitors(self.questions, self.fleet.router.url, NUM_REGULARS, self.random.randrange(1 << 30))
        try:
            self.meddler.weather = self.random.choice(self.weathers)
            self.counts["rounds of storm"] += self.meddler.weather == STORM
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(self.random.uniform(0.2, 2))
                kind = self.random.choice(self.kinds)
                self.counts[kind] += 1
                KINDS[kind](self, visitors)
        finally:
            self.meddler.weather = CALM
            visitors.leave()
        self.judge(visitors)

    def judge(self, visitors: Visitors) -> None:
        assert visitors.faults == [], visitors.faults
        scrape = self.fleet.settle()
        assert scrape.unfinished == {}
        assert self.fleet.faults == []
        self.num_rounds += 1
        self.num_right += visitors.num_right
        self.num_left += visitors.num_left
        self.errors += visitors.errors
        self.serve_calmly()

    def serve_calmly(self) -> None:
        """Service is as good as before: no error at all."""
        calm = Visitors(self.questions, self.fleet.router.url, NUM_CALM_ANSWERS, self.num_rounds)
        time.sleep(0.5)
        calm.leave()
        assert (calm.faults, dict(calm.errors)) == ([], {}), calm
        assert calm.num_answered >= NUM_CALM_ANSWERS
        self.num_right += calm.num_right
        self.num_left += calm.num_left

    def any_place(self, role: str = "") -> str:
        return self.random.choice([place for place in PLACES if place.startswith(role)])

    # --- disturbances --------------------------------------------------------------------------

    def kill(self, visitors: Visitors) -> None:
        self.fleet.kill(self.any_place())

    def kill_router(self, visitors: Visitors) -> None:
        self.fleet.kill_router()

    def freeze(self, shortest: float, longest: float, visitors: Visitors) -> None:
        self.fleet.freeze(self.any_place(), self.random.uniform(shortest, longest))

    def burst(self, visitors: Visitors) -> None:
        visitors.burst(self.random.randint(16, 48))

    def cut_pair(self, visitors: Visitors) -> None:
        """Prefill and decode don't hear each other, the router hears both."""
        self.cut(self.any_place("prefill"), self.any_place("decode"))

    def cut_off(self, visitors: Visitors) -> None:
        """A worker and the router don't hear each other, its peers hear it."""
        self.cut(self.any_place(), ROUTER)

    def cut(self, one: str, other: str) -> None:
        """In both directions or one."""
        both = [(one, other), (other, one)]
        self.meddler.cuts = frozenset(self.random.choice([both, both[:1], both[1:]]))
        time.sleep(self.random.choice([1.0, 2.0, 5.0, 12.0]))
        self.meddler.cuts = frozenset()

    # --- what it did ---------------------------------------------------------------------------

    @property
    def report(self) -> Iterator[str]:
        yield f"{self.num_rounds} rounds: {self.num_right} answers right, {self.num_left} clients left, and as errors"
        yield from (f"  {number} x {text}" for text, number in self.errors.most_common())
        yield "disturbances: " + ", ".join(f"{number} x {kind}" for kind, number in self.counts.most_common())
        fates = self.meddler.fates
        for fate in sorted({fate for fate, _ in fates}):
            yield f"  {fate}: " + ", ".join(f"{n} {name}" for (kind, name), n in fates.most_common() if kind == fate)


KINDS: dict[str, Callable[[Soak, Visitors], None]] = {
    "worker killed": Soak.kill,
    "router killed": Soak.kill_router,
    "frozen for less than a death": lambda soak, visitors: soak.freeze(0.3, 2.0, visitors),
    "frozen for more than a death": lambda soak, visitors: soak.freeze(4.5, 12.0, visitors),
    "burst": Soak.burst,
    "prefill and decode cut": Soak.cut_pair,
    "worker and router cut": Soak.cut_off,
}


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Past pytest's capture: the seed and the sums are wanted of good runs too."""

    def write(line: str) -> None:
        with capfd.disabled():
            sys.stdout.write(line + "\n")

    return write


@pytest.mark.full
@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_whatever_happens_answers_are_right_or_errors_and_no_block_is_lost(
    small_model: Path, tmp_path: Path, questions: Sequence[Question], say: Callable[[str], None]
) -> None:
    seconds = float(os.environ.get("CROSSDOCK_TEST_SOAK", SOAK_SECONDS))
    seed = int(os.environ.get("CROSSDOCK_TEST_SEED", SEED))
    say(f"\nsoak of {seconds:.0f} s with CROSSDOCK_TEST_SEED={seed}")
    random, control_port = Random(seed), free_port()
    meddler = Meddler(f"tcp://127.0.0.1:{control_port}", PLACES, seed)
    places = {place: Place(reports_to=meddler.router_address(place)) for place in PLACES}
    fleet = Fleet(small_model, tmp_path, {ROUTER: Place(), **places}, control_port, flags_for(random))
    soak = Soak((STORM, STORM, CALM), tuple(KINDS), fleet, meddler, questions, random)
    try:
        fleet.settle()
        end = time.monotonic() + seconds
        while soak.num_rounds == 0 or time.monotonic() < end:
            soak.round(ROUND_SECONDS)
    finally:
        faults = fleet.stop()
        meddler.stop()
        for line in soak.report:
            say(line)
    assert faults == []
