"""A device without torch that notices every missing, stale or foreign KV entry.

The KV of a token is a number that depends on the token, its position and on all entries before it *as they lie in the
pool*; the next token depends on all entries of all layers. A step computes layer group by layer group, each when
`FakeExecutor.advance` is called, so that a test decides what happens in between.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from crossdock.core.kv_layout import KvLayout, LayerGroup
from crossdock.core.request import Request, unpack_ids
from crossdock.core.sequence import Chunk, ChunkResult, Draw
from crossdock.kvtransfer.pool_bytes import PoolBytes

VOCAB_SIZE = 1 << 20
NUM_LAYERS = 2
WORD = (1 << 64) - 1


def layout_of(block_size: int) -> KvLayout:
    """8 bytes a token and layer: one number."""
    return KvLayout(num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")


def mix(kind: int, token: int, position: int, context: int) -> int:
    """64 bits that change when any argument does; the finaliser of MurmurHash3 over a weighted sum."""
    word = (context + token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + kind * 0x165667B19E3779F9 + 1) & WORD
    word = ((word ^ (word >> 33)) * 0xFF51AFD7ED558CCD) & WORD
    word = ((word ^ (word >> 33)) * 0xC4CEB9FE1A85EC53) & WORD
    return word ^ (word >> 33)


def draw(request: Request, output_index: int, context: int) -> int:
    """The token that a sampler with the request's seed draws."""
    return mix(NUM_LAYERS, request.params.seed or 0, output_index, context) % VOCAB_SIZE


def reference_output(request: Request) -> list[int]:
    """What the request must yield, computed without any pool."""
    tokens, sums = unpack_ids(request.prompt), [0] * NUM_LAYERS
    output: list[int] = []
    for position in range(request.max_total_tokens):
        if position == len(tokens):
            token = draw(request, len(output), sum(sums))
            tokens.append(token)
            output.append(token)
            if token in request.params.stop_token_ids:
                break
        for layer in range(NUM_LAYERS):
            sums[layer] += mix(layer, tokens[position], position, sums[layer] & WORD)
    return output


@dataclass(slots=True, eq=False)
class FakeLaunched:
    """A step on its way; the same to the engine as an executor's own."""

    chunks: Seq[Chunk]
    token_ids: list[list[int]]
    previous: "FakeLaunched | None"
    num_groups_done: int = 0
    contexts: list[int] = field(default_factory=list)
    sampled: dict[int, int] = field(default_factory=dict)
    outcome: list[ChunkResult] | None = None

    @property
    def is_done(self) -> bool:
        return self.outcome is not None

    def results(self) -> list[ChunkResult]:
        assert self.outcome is not None, "the loop asks for results only when the step is done"
        return self.outcome


class FakeExecutor:
    """Steps run in launch order. ``check_write`` is asked before a block is written."""

    def __init__(self, memory: PoolBytes, check_write: Callable[[int], None]) -> None:
        self._entries = memory.array.view("uint64")
        self._groups = memory.groups
        self._block_size = memory.layout.block_size
        self._check_write = check_write
        self.queue: deque[FakeLaunched] = deque()

    def launch(self, chunks: Seq[Chunk], previous: FakeLaunched | None) -> FakeLaunched:
        known = [chunk.sequence.token_ids[chunk.start : chunk.end].tolist() for chunk in chunks]
        launched = FakeLaunched(chunks, known, previous, contexts=[0] * len(chunks))
        self.queue.append(launched)
        return launched

    def advance(self) -> None:
        """Compute one layer group of the oldest step."""
        step = self.queue[0]
        if step.num_groups_done == 0:
            self._take_pending(step)
            self._copy_blocks(step)
        for number in range(len(step.chunks)):
            self._compute(step, number, self._groups[step.num_groups_done])
        step.num_groups_done += 1
        if step.num_groups_done == len(self._groups):
            step.outcome = [self._result(step, number) for number in range(len(step.chunks))]
            step.previous = None
            self.queue.popleft()

    def finish_all(self) -> None:
        while self.queue:
            self.advance()

    def _take_pending(self, step: FakeLaunched) -> None:
        for chunk, ids in zip(step.chunks, step.token_ids, strict=True):
            if chunk.takes_pending:
                assert step.previous is not None, "a pending token comes from the step before"
                ids.append(step.previous.sampled[id(chunk.sequence)])
            assert len(ids) == chunk.num_tokens, "the ids of a chunk are known when its step begins"

    def _copy_blocks(self, step: FakeLaunched) -> None:
        for chunk in step.chunks:
            if chunk.copy_from is not None:
                destination = chunk.blocks[chunk.start // self._block_size]
                self._check_write(destination)
                self._entries[destination] = self._entries[chunk.copy_from]

    def _compute(self, step: FakeLaunched, number: int, group: LayerGroup) -> None:
        chunk, size = step.chunks[number], self._block_size
        table = list(chunk.blocks[: -(-chunk.end // size)])
        assert len(table) * size >= chunk.end, "the blocks hold the chunk"
        for block in table[chunk.start // size :]:
            self._check_write(block)
        for layer in range(group.first, group.end):
            context = int(self._entries[table, layer].reshape(-1)[: chunk.start].sum())
            for position, token in enumerate(step.token_ids[number], chunk.start):
                entry = mix(layer, token, position, context & WORD)
                self._entries[table[position // size], layer, position % size] = entry
                context += entry
            step.contexts[number] += context & WORD

    def _result(self, step: FakeLaunched, number: int) -> ChunkResult:
        chunk = step.chunks[number]
        if not chunk.samples:
            return ChunkResult(None)
        index, context = chunk.output_index, step.contexts[number]
        token, *others = [draw(choice, index, context) for choice in chunk.sequence.request.choices]
        step.sampled[id(chunk.sequence)] = token
        return ChunkResult(token, forks=tuple(Draw(other) for other in others))
