"""How sequences get and lose blocks; block size 4, a pool of 8 unless said otherwise."""

from dataclasses import dataclass

import pytest

from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.block_pool import BlockPool, OutOfBlocks
from crossdock.core.block_tables import BlockTables
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import PoolBooks
from crossdock.core.prefix_cache import PrefixCache
from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import Chunk, ChunkResult, Sequence, settle, take_chunk

KEY = b"cluster"
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
HASHER = BlockHasher(KEY, model_root(KEY, "tiny@1", LAYOUT), 4)
PROMPT = list(range(10))
EMPTY = PoolBooks(free=8, cached=0, leased=0, quarantined=0)


def sequence_of(tokens: list[int], salt: bytes = b"", max_tokens: int = 20) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Sequence.of(Request(request_id=RequestId("r"), prompt=pack_ids(tokens), params=params, salt=salt))


@dataclass(slots=True)
class Worker:
    """What a part does with its sequences, without a device."""

    pool: BlockPool
    prefixes: PrefixCache
    tables: BlockTables

    @classmethod
    def of(cls, num_blocks: int = 8, is_enabled: bool = True) -> "Worker":
        pool = BlockPool(num_blocks)
        prefixes = PrefixCache(pool, is_enabled)
        return cls(pool, prefixes, BlockTables(pool, prefixes, HASHER, 4))

    def start(self, tokens: list[int], salt: bytes = b"") -> Sequence:
        sequence = sequence_of(tokens, salt)
        self.tables.reuse(sequence, len(tokens) - 1)
        self.tables.grow(sequence, len(tokens))
        return sequence

    def launch(self, sequence: Sequence) -> Chunk:
        self.tables.grow(sequence, sequence.num_tokens)
        return take_chunk(sequence, sequence.num_unscheduled)

    def finish(self, chunk: Chunk, token_id: int) -> None:
        sequence = chunk.sequence
        settle(chunk, ChunkResult(token_id if chunk.samples else None))
        self.tables.publish(sequence)
        self.tables.step_done(chunk)

    def run(self, tokens: list[int], salt: bytes = b"", num_output: int = 1) -> Sequence:
        """A whole request: its output ids are 50, 51, ..."""
        sequence = self.start(tokens, salt)
        for index in range(num_output):
            self.finish(self.launch(sequence), 50 + index)
        self.tables.release(sequence)
        return sequence

    def num_cached(self, tokens: list[int], salt: bytes = b"") -> int:
        """Tokens that a request for this prompt would find."""
        sequence = sequence_of(tokens, salt)
        found = self.tables.reuse(sequence, len(tokens) - 1)
        self.tables.release(sequence)
        self.prefixes.check()
        return found


def test_second_request_shares_the_first_ones_prefix() -> None:
    worker = Worker.of()
    first = worker.start(PROMPT)
    worker.finish(worker.launch(first), 50)
    second = sequence_of([*PROMPT[:8], 77, 78])
    assert worker.tables.reuse(second, 9) == 8
    assert (second.blocks, second.num_scheduled, second.num_computed, second.num_published) == ([0, 1], 8, 8, 2)
    worker.tables.grow(second, 10)
    assert (first.blocks, second.blocks) == ([0, 1, 2], [0, 1, 3])
    assert worker.pool.books() == PoolBooks(free=4, cached=0, leased=4, quarantined=0)
    worker.tables.release(first)
    worker.tables.release(second)
    assert worker.pool.books() == PoolBooks(free=6, cached=2, leased=0, quarantined=0)
    worker.prefixes.check()


def test_a_block_is_never_matched_before_its_kv_is_written() -> None:
    worker = Worker.of()
    first = worker.start(PROMPT)
    chunk = worker.launch(first)
    worker.tables.publish(first)
    assert worker.num_cached(PROMPT) == 0
    worker.finish(chunk, 50)
    assert worker.num_cached(PROMPT) == 8


def test_of_a_chunked_prompt_only_the_computed_part_is_published() -> None:
    worker = Worker.of()
    first = worker.start(PROMPT)
    chunk = take_chunk(first, 7)
    worker.finish(chunk, 50)
    assert (first.num_published, worker.num_cached(PROMPT)) == (1, 4)


def test_abort_before_the_step_ran_leaves_no_hit() -> None:
    worker = Worker.of()
    worker.tables.release(worker.start(PROMPT))
    assert worker.num_cached(PROMPT) == 0
    assert worker.pool.books() == EMPTY


def test_abort_while_the_step_runs_leaves_no_hit_and_frees_the_blocks_only_when_it_is_done() -> None:
    worker = Worker.of()
    sequence = worker.start(PROMPT)
    chunk = worker.launch(sequence)
    worker.tables.release(sequence)
    assert (sequence.is_released, sequence.blocks) == (True, [0, 1, 2])
    assert worker.pool.books().leased == 3
    assert worker.num_cached(PROMPT) == 0
    worker.finish(chunk, 50)
    assert (sequence.blocks, worker.pool.books()) == ([], EMPTY)
    assert worker.num_cached(PROMPT) == 0


def test_blocks_of_two_launched_steps_wait_for_the_second() -> None:
    worker = Worker.of()
    sequence = worker.start(PROMPT)
    first = worker.launch(sequence)
    second = worker.launch(sequence)
    worker.tables.release(sequence)
    worker.tables.step_done(first)
    assert worker.pool.books().leased == 3
    worker.tables.step_done(second)
    assert worker.pool.books() == EMPTY


def test_after_an_unrelated_request_took_the_blocks_the_old_prompt_finds_nothing() -> None:
    worker = Worker.of(num_blocks=3)
    worker.run(PROMPT)
    assert worker.num_cached(PROMPT) == 8
    worker.run([90] * 10)
    assert worker.num_cached(PROMPT) == 0
    assert worker.num_cached([90] * 10) == 8


def test_two_requests_with_one_prompt_in_one_step_compute_it_both_and_keep_one_copy() -> None:
    worker = Worker.of()
    first, second = worker.start(PROMPT), worker.start(PROMPT)
    chunks = [worker.launch(first), worker.launch(second)]
    assert second.num_computed == 0
    for chunk in chunks:
        worker.finish(chunk, 50)
    worker.tables.release(second)
    worker.tables.release(first)
    assert worker.pool.books() == PoolBooks(free=6, cached=2, leased=0, quarantined=0)
    worker.prefixes.check()


def test_reuse_takes_whole_blocks_and_leaves_what_the_caller_asks_for() -> None:
    worker = Worker.of()
    worker.run(PROMPT[:8])
    reused = []
    for max_tokens in (3, 4, 7, 8, 100):
        sequence = sequence_of(PROMPT[:8])
        reused.append(worker.tables.reuse(sequence, max_tokens))
        worker.tables.release(sequence)
    assert reused == [0, 4, 4, 8, 8]


def test_salts_keep_tenants_apart() -> None:
    worker = Worker.of()
    worker.run(PROMPT, salt=b"alice")
    assert worker.num_cached(PROMPT) == 0
    assert worker.num_cached(PROMPT, salt=b"bob") == 0
    assert worker.num_cached(PROMPT, salt=b"alice") == 8


def test_a_follow_up_question_finds_the_answers_blocks_too() -> None:
    worker = Worker.of()
    worker.run(PROMPT, num_output=7)
    assert worker.num_cached([*PROMPT, 50, 51, 52, 53, 54, 55, 99]) == 16


def test_a_block_whose_last_token_is_still_on_the_device_is_not_published() -> None:
    worker = Worker.of()
    sequence = worker.start(PROMPT[:7])
    prompt = worker.launch(sequence)
    ahead = worker.launch(sequence)
    sequence.num_computed = ahead.end
    worker.tables.publish(sequence)
    assert sequence.num_published == 1
    sequence.num_pending -= 1
    sequence.append(50)
    worker.tables.publish(sequence)
    assert sequence.num_published == 2
    worker.tables.step_done(prompt)
    worker.tables.step_done(ahead)
    worker.tables.release(sequence)
    assert worker.num_cached([*PROMPT[:7], 50, 99]) == 8


def test_a_preempted_sequence_finds_its_own_prompt_and_output_again() -> None:
    worker = Worker.of()
    sequence = worker.start(PROMPT)
    for token_id in (50, 51, 52):
        worker.finish(worker.launch(sequence), token_id)
    worker.tables.reset(sequence)
    assert (sequence.blocks, sequence.num_scheduled, sequence.num_computed, sequence.num_published) == ([], 0, 0, 0)
    assert worker.pool.books() == PoolBooks(free=5, cached=3, leased=0, quarantined=0)
    assert worker.tables.reuse(sequence, sequence.num_tokens - 1) == 12
    assert sequence.blocks == [0, 1, 2]


def test_a_sequence_is_not_reset_while_a_step_writes_to_its_blocks() -> None:
    worker = Worker.of()
    sequence = worker.start(PROMPT)
    worker.launch(sequence)
    with pytest.raises(AssertionError, match="a launched step still writes"):
        worker.tables.reset(sequence)


def test_growing_takes_only_the_missing_blocks() -> None:
    worker = Worker.of()
    sequence = worker.start(PROMPT)
    assert [worker.tables.num_missing(sequence, tokens) for tokens in (1, 12, 13, 32)] == [0, 0, 1, 5]
    worker.tables.grow(sequence, 12)
    assert sequence.blocks == [0, 1, 2]
    worker.tables.grow(sequence, 13)
    assert sequence.blocks == [0, 1, 2, 3]


def test_growing_beyond_the_pool_changes_nothing() -> None:
    worker = Worker.of()
    sequence = worker.start(PROMPT)
    with pytest.raises(OutOfBlocks, match="6 blocks wanted, 5 of 8 available"):
        worker.tables.grow(sequence, 33)
    assert (sequence.blocks, worker.pool.books().leased) == ([0, 1, 2], 3)


def test_a_request_that_outgrows_the_whole_pool_is_told_so_before_it_takes_a_block() -> None:
    worker = Worker.of(num_blocks=50)
    too_long = sequence_of([1] * 1002)
    assert worker.tables.num_missing(too_long, 1002) == 251 > worker.pool.num_available
    with pytest.raises(OutOfBlocks):
        worker.tables.grow(too_long, 1002)
    assert worker.pool.books().free == 50
    assert worker.start(PROMPT).blocks == [0, 1, 2]


def test_when_prompts_hold_all_blocks_one_victim_lets_the_others_go_on() -> None:
    worker = Worker.of()
    sequences = [worker.start([number] * 4) for number in range(8)]
    for sequence in sequences:
        worker.finish(worker.launch(sequence), 50)
    with pytest.raises(OutOfBlocks):
        worker.launch(sequences[0])
    worker.tables.reset(sequences[-1])
    assert worker.launch(sequences[0]).blocks == [0, 7]
    assert worker.num_cached([7] * 4) == 0
    worker.prefixes.check()


def test_a_late_release_of_a_gone_sequence_takes_nothing_from_its_successor() -> None:
    worker = Worker.of()
    gone = worker.start(PROMPT)
    worker.tables.release(gone)
    successor = worker.start(PROMPT)
    assert successor.blocks == [0, 1, 2]
    worker.tables.release(gone)
    worker.tables.publish(gone)
    assert (successor.blocks, worker.pool.books().leased) == ([0, 1, 2], 3)
    with pytest.raises(AssertionError, match="no step of this sequence is in flight"):
        worker.tables.step_done(Chunk(gone, 0, 1, False, False, (0,)))


def test_a_released_sequence_gets_no_blocks() -> None:
    worker = Worker.of()
    gone = worker.start(PROMPT)
    worker.tables.release(gone)
    for take in (lambda: worker.tables.grow(gone, 4), lambda: worker.tables.reuse(gone, 4)):
        with pytest.raises(AssertionError):
            take()
    with pytest.raises(AssertionError, match="does not come back"):
        worker.tables.reset(gone)


def test_without_prefix_cache_nothing_is_hashed_found_or_kept() -> None:
    worker = Worker.of(is_enabled=False)
    first = worker.run(PROMPT)
    assert (first.block_hashes, first.num_published) == ([], 0)
    assert worker.num_cached(PROMPT) == 0
    assert worker.pool.books() == EMPTY


# --- hashes that another worker tells --------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [1, 2], PROMPT[:4], PROMPT, list(range(40))], ids=len)
def test_hashes_that_another_worker_tells_are_those_that_are_made_here(tokens: list[int]) -> None:
    told = Worker.of().tables.prompt_hashes(sequence_of(tokens, b"s"))
    assert told == b"".join(HASHER.hashes(pack_ids(tokens), b"s"))
    sequence = sequence_of(tokens, b"s")
    assert Worker.of().tables.believe(sequence, told)
    assert b"".join(sequence.block_hashes) == told


TOLD = b"".join(HASHER.hashes(pack_ids(PROMPT)))


NOT_OF_THE_PROMPT = {
    "too few": TOLD[:16],
    "too many": TOLD + TOLD[:16],
    "a part of one": TOLD[:20],
    "in another order": TOLD[16:] + TOLD[:16],
    "with another salt": b"".join(HASHER.hashes(pack_ids(PROMPT), b"s")),
    "with another key": b"".join(BlockHasher(b"k", model_root(KEY, "tiny@1", LAYOUT), 4).hashes(pack_ids(PROMPT))),
    "of another model": b"".join(BlockHasher(KEY, model_root(KEY, "m", LAYOUT), 4).hashes(pack_ids(PROMPT))),
    "of another prompt": b"".join(HASHER.hashes(pack_ids(PROMPT[::-1]))),
}


@pytest.mark.parametrize("told", NOT_OF_THE_PROMPT.values(), ids=NOT_OF_THE_PROMPT)
def test_hashes_that_are_not_those_of_the_prompt_are_not_believed(told: bytes) -> None:
    sequence = sequence_of(PROMPT)
    assert not Worker.of().tables.believe(sequence, told)
    assert sequence.block_hashes == []


def test_without_a_prefix_cache_nobody_tells_or_keeps_hashes() -> None:
    tables, sequence = Worker.of(is_enabled=False).tables, sequence_of(PROMPT)
    assert tables.prompt_hashes(sequence) == b""
    assert tables.believe(sequence, TOLD)
    assert sequence.block_hashes == []
    assert Worker.of().tables.believe(sequence, b""), "they are made here when they are needed"
