"""Which blocks of which layer group go where, and which of them in one stroke. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Run:
    """``num_blocks`` consecutive blocks of the source that go to consecutive blocks of the destination."""

    source: int
    destination: int
    num_blocks: int


def merge_runs(sources: Sequence[int], destinations: Sequence[int]) -> list[Run]:
    """Copy block ``sources[i]`` to ``destinations[i]`` for all i, in as few runs as this order allows."""
    assert len(sources) == len(destinations), "every block has one destination"
    runs: list[Run] = []
    start = 0
    for i in range(1, len(sources) + 1):
        is_adjacent = (
            i < len(sources) and sources[i] == sources[i - 1] + 1 and destinations[i] == destinations[i - 1] + 1
        )
        if not is_adjacent:
            runs.append(Run(sources[start], destinations[start], i - start))
            start = i
    return runs


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Of the prompt blocks ``source`` (indices in the prompt), to pool blocks ``destination``.

    That is ``num_groups`` layer groups from ``group`` on.
    """

    group: int
    source: range
    destination: list[int]
    num_groups: int = 1


class PushPlan:
    """How far the prompt of one transfer is written, and how far it is pushed, for each layer group.

    Fewer than ``min_pairs`` of a block and a layer group are not worth a push while more will follow.
    """

    def __init__(self, num_blocks: int, num_groups: int, min_pairs: int = 1) -> None:
        self.num_blocks = num_blocks
        self._min_pairs = min_pairs
        self._written = [0] * num_groups
        self._pushed = [0] * num_groups
        self._first = num_blocks
        self._destination: list[int] = []

    def write(self, group: int, num_blocks: int) -> None:
        """The first ``num_blocks`` blocks hold this layer group; never takes back what was written before."""
        assert num_blocks <= self.num_blocks, f"{num_blocks} blocks are written, the prompt has {self.num_blocks}"
        self._written[group] = max(self._written[group], num_blocks)

    def write_all(self) -> None:
        self._written = [self.num_blocks] * len(self._written)

    def assign(self, first_missing: int, blocks: list[int]) -> None:
        """Prompt block ``first_missing + i`` goes to ``blocks[i]``; those before it stay. Must be `fits`."""
        self._first = first_missing
        self._destination = blocks
        self._pushed = [first_missing] * len(self._pushed)

    def fits(self, first_missing: int, blocks: list[int]) -> bool:
        """Whether these blocks complete the prompt, each given once."""
        return 0 <= first_missing == self.num_blocks - len(blocks) and len(set(blocks)) == len(blocks)

    def take(self) -> list[GroupBlocks]:
        """What is written and has a destination and was not taken before; groups of the same blocks together."""
        waiting = [
            range(pushed, max(pushed, written)) for pushed, written in zip(self._pushed, self._written, strict=True)
        ]
        if sum(map(len, waiting)) < self._min_pairs and min(self._written) < self.num_blocks:
            return []
        self._pushed = [source.stop for source in waiting]
        taken = []
        for source, groups in groupby(range(len(waiting)), waiting.__getitem__):
            first, *others = groups
            destination = self._destination[source.start - self._first : source.stop - self._first]
            if source:
                taken.append(GroupBlocks(first, source, destination, 1 + len(others)))
        return taken

    @property
    def is_complete(self) -> bool:
        """Every block that has a destination was taken for every group."""
        return all(pushed == self.num_blocks for pushed in self._pushed)

    @property
    def num_block_groups(self) -> int:
        """(block, layer group) pairs that travel."""
        return len(self._destination) * len(self._written)
