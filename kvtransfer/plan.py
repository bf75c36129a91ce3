"""Which blocks of which layer group go where, and which of them in one stroke. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Layer group ``group`` of the prompt blocks ``source`` (indices in the prompt), to pool blocks ``destination``."""

    group: int
    source: range
    destination: list[int]


class PushPlan:
    """How far the prompt of one transfer is written, and how far it is pushed, for each layer group."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_blocks = num_blocks
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
        """What is written and has a destination and was not taken before."""
        taken = [self._take_group(group) for group in range(len(self._written))]
        return [blocks for blocks in taken if blocks.source]

    def _take_group(self, group: int) -> GroupBlocks:
        source = range(self._pushed[group], max(self._pushed[group], self._written[group]))
        self._pushed[group] = source.stop
        return GroupBlocks(group, source, self._destination[source.start - self._first : source.stop - self._first])

    @property
    def is_complete(self) -> bool:
        """Every block that has a destination was taken for every group."""
        return all(pushed == self.num_blocks for pushed in self._pushed)

    @property
    def num_block_groups(self) -> int:
        """(block, layer group) pairs that travel."""
        return len(self._destination) * len(self._written)
