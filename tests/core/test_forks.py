"""Sequences that part after a common prompt: what they share, what is copied and when; blocks of 16 tokens."""

from collections import deque
from random import Random

import pytest

from crossdock.core.block_pool import OutOfBlocks
from crossdock.core.block_tables import BlockTables
from crossdock.core.messages import PoolBooks
from crossdock.core.request import SamplingParams
from crossdock.core.sequence import Chunk, ChunkResult, Sequence, settle, take_chunk

from ..parts import card, free, name_of, request, tables_of


def computed(tables: BlockTables, num_prompt: int, num_forks: int = 3, max_tokens: int = 20) -> Sequence:
    """A prompt with its first token, 500."""
    sequence = Sequence.of(request("a", num_prompt, max_tokens, num_forks=num_forks))
    tables.grow(sequence, num_prompt)
    settle(take_chunk(sequence, num_prompt), ChunkResult(500))
    tables.publish(sequence)
    sequence.num_in_flight = 0
    return sequence


def split(tables: BlockTables, sequence: Sequence, *others: int) -> list[Sequence]:
    return tables.split(sequence, [500, *others])


def launch(tables: BlockTables, sequence: Sequence) -> Chunk:
    tables.grow(sequence, sequence.num_scheduled + 1)
    return take_chunk(sequence, 1)


def finish(tables: BlockTables, *chunks: Chunk) -> None:
    for chunk in chunks:
        settle(chunk, ChunkResult(600))
        tables.publish(chunk.sequence)
        tables.step_done(chunk)


def books(tables: BlockTables) -> PoolBooks:
    tables.prefixes.check()
    return tables.pool.books()


def test_a_request_stands_for_its_choices_which_differ_by_id_and_seed() -> None:
    first, second, third = request("a", 3, num_forks=2).choices
    assert [choice.request_id for choice in (first, second, third)] == ["a", "a1", "a2"]
    assert [choice.params.seed for choice in (first, second, third)] == [0, 1, 2]
    assert (first, first.choices) == (request("a", 3), (first,))
    assert second.params == SamplingParams(max_tokens=20, seed=1)


def test_choices_share_the_prompt_and_all_but_the_last_copy_its_partial_block_when_they_write() -> None:
    tables = tables_of(8)
    choices = split(tables, computed(tables, 40), 501, 502, 503)
    assert [(name_of(choice), choice.blocks, choice.output_ids) for choice in choices] == [
        ("a", [0, 1, 2], [500]),
        ("a1", [0, 1, 2], [501]),
        ("a2", [0, 1, 2], [502]),
        ("a3", [0, 1, 2], [503]),
    ]
    assert books(tables).leased == 3
    held_before = choices[0].blocks
    chunks = [launch(tables, choice) for choice in choices]
    assert [(chunk.copy_from, chunk.blocks) for chunk in chunks] == [
        (2, [0, 1, 3]),
        (2, [0, 1, 4]),
        (2, [0, 1, 5]),
        (None, [0, 1, 2]),
    ]
    assert held_before == [0, 1, 2]
    finish(tables, *chunks)
    assert books(tables).leased == 6
    assert [launch(tables, choice).copy_from for choice in choices] == [None] * 4


def test_choices_of_a_prompt_of_full_blocks_need_no_copy() -> None:
    tables = tables_of(8)
    chunks = [launch(tables, choice) for choice in split(tables, computed(tables, 32), 501, 502, 503)]
    assert [chunk.copy_from for chunk in chunks] == [None] * 4
    assert [chunk.blocks for chunk in chunks] == [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]


def test_choices_that_go_no_further_leave_the_others_alone() -> None:
    tables = tables_of(8)
    sequence = computed(tables, 40)
    going_on = tables.split(sequence, [None, None, None, 503])
    assert [name_of(choice) for choice in going_on] == ["a3"]
    assert sequence.is_released
    assert launch(tables, going_on[0]).copy_from is None
    assert books(tables).leased == 3


def test_nobody_else_gets_a_block_before_its_copies_are_made() -> None:
    """The source of a copy is given up by all while the step that reads it is on the device."""
    tables = tables_of(8)
    first, second = split(tables, computed(tables, 40, num_forks=1), 501)
    chunk = launch(tables, first)
    tables.release(second)
    tables.release(first)
    assert books(tables) == PoolBooks(free=4, cached=0, leased=4, quarantined=0)
    tables.step_done(chunk)
    assert books(tables) == free(8, cached=2)


def test_a_copy_without_room_changes_nothing() -> None:
    tables = tables_of(4)
    first, second = split(tables, computed(tables, 40, num_forks=1), 501)
    other = tables.pool.take(1)
    with pytest.raises(OutOfBlocks):
        tables.grow(first, 41)
    assert (first.blocks, first.copy_from) == ([0, 1, 2], None)
    tables.reset(second)
    assert launch(tables, first).copy_from is None
    tables.pool.give_back(other)
    assert books(tables).leased == 3


@pytest.mark.parametrize(("num_prompt", "most"), [(20, 3), (32, 64), (49, 1)])
def test_so_many_choices_fit_a_pool_of_four_blocks(num_prompt: int, most: int) -> None:
    assert card(4).max_choices(num_prompt) == most


def test_random_ends_of_forks_lose_no_block() -> None:
    """A fork may run, be preempted or end while steps that copy for it and for others are on the device."""
    for seed in range(200):
        random, tables = Random(seed), tables_of(12, prefix_cache=seed % 2 == 0)
        living, flying = split(tables, computed(tables, random.randint(1, 60)), 501, 502, 503), deque[Chunk]()
        while living or flying:
            act(random, tables, living, flying)
            tables.prefixes.check()
        assert books(tables).leased == 0


def act(random: Random, tables: BlockTables, living: list[Sequence], flying: "deque[Chunk]") -> None:
    move = random.random()
    if flying and (move < 0.4 or not living):
        chunk = flying.popleft()
        if chunk.sequence in living:
            finish(tables, chunk)
        else:
            tables.step_done(chunk)
        return
    sequence = random.choice(living)
    if move < 0.8 and sequence.num_in_flight < 2 and not sequence.is_at_limit:
        try:
            tables.grow(sequence, sequence.num_tokens)
        except OutOfBlocks:
            move = 0.9
        else:
            flying.append(take_chunk(sequence, sequence.num_unscheduled))
    if move >= 0.9 and sequence.num_in_flight == 0:
        tables.reset(sequence)
        tables.reuse(sequence, sequence.num_tokens - 1)
    if move >= 0.95 or sequence.is_at_limit:
        living.remove(sequence)
        tables.release(sequence)
