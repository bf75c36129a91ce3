"""Masks of grammars: exact, a function of the tokens alone, and nobody's business but their own request's."""

import string
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, product
from random import Random

import numpy as np
import pytest
import torch
from msgspec.structs import replace as with_params
from pydantic import JsonValue

from crossdock.benchmarks.offline_engine import OfflineEngine
from crossdock.core.config import EngineConfig
from crossdock.core.grammar import GrammarCompiler, Vocabulary
from crossdock.core.request import SamplingParams
from crossdock.core.sequence import Chunk, ChunkResult, take_chunk
from crossdock.core.sequence import Sequence as Tokens
from crossdock.model.engine_plan import BuiltEngine, EnginePlan
from crossdock.model.grammar import Grammars
from crossdock.model.sampler import TokenMasks
from crossdock.model.startup import no_vocabulary
from crossdock.router.grammar import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar

from ..parts import request
from .gpu import cpu_executor, engine_of, gpu_executor
from .test_gpu_engine import CONFIG, plan_of, prompt

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB_SIZE = 89
"""Of the model; the tokenizer has fewer."""
PIECES = [*string.ascii_lowercase, *string.digits, *'{}[]":,- ', '{"', '": ', '", "', "ab", "abc", "true", "null", "12"]
SPECIAL, EOS = len(PIECES), len(PIECES) + 1
NUM_PIECES = EOS + 1


def encode(text: str) -> list[int]:
    """As a tokenizer that knows its special token in any text."""
    ids: list[int] = []
    while text:
        piece = max((piece for piece in [*PIECES, "<s>"] if text.startswith(piece)), key=len)
        ids.append(SPECIAL if piece == "<s>" else PIECES.index(piece))
        text = text.removeprefix(piece)
    return ids


def vocabulary() -> Vocabulary:
    pieces = [piece.encode() for piece in [*PIECES, "<s>", "</s>"]]
    return Vocabulary(pieces, frozenset({SPECIAL}), frozenset({EOS}), encode)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[token_id] for token_id in token_ids)


def grammars_of(load: Callable[[], Vocabulary] = vocabulary) -> Grammars:
    return Grammars(load, VOCAB_SIZE)


SCHEMA: JsonValue = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["abc", "x", None]}, "c": {"items": {"type": "boolean"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS = [
    json_schema_grammar(SCHEMA),
    regex_grammar("[a-f]{2,9}-(12)+"),
    choice_grammar(["abab", "abc", "a", "true"]),
    lark_grammar('start: "[" /[a-z]/ start? "]"'),
]


def waiting(grammar: str, output: Sequence[int] = (), **params: object) -> Tokens:
    """A sequence that has said ``output``; its next chunk samples."""
    wanted = request("a", num_prompt=4, max_tokens=500)
    fields = {"grammar": grammar, "stop_token_ids": (EOS,), **params}
    sequence = Tokens.of(with_params(wanted, params=with_params(wanted.params, **fields)))
    sequence.token_ids.extend(output)
    sequence.num_scheduled = sequence.num_computed = len(sequence.token_ids) - 1
    return sequence


def allowed(grammars: Grammars, chunk: Chunk) -> list[int]:
    step = grammars.begin([chunk])
    assert step is not None
    return ids_in(step.masks().bits.numpy()[0])


def ids_in(bits: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]


def walk(grammars: Grammars, sequence: Tokens, random: Random, num_tokens: int = 60) -> list[list[int]]:
    """Say something at random; what was allowed before each token."""
    masks = []
    for _ in range(num_tokens):
        step = grammars.begin([chunk := take_chunk(sequence, 1)])
        assert step is not None
        masks.append(ids_in(step.masks().bits.numpy()[0]))
        (result,) = step.settled([chunk], [ChunkResult(random.choice(masks[-1]))])
        assert result.token_id is not None
        sequence.num_pending -= 1
        sequence.token_ids.append(result.token_id)
        if result.is_complete:
            break
    return masks


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_masks_are_those_of_llguidance_at_every_token(grammar: str) -> None:
    grammars, compiler = grammars_of(), GrammarCompiler(vocabulary(), VOCAB_SIZE)
    for seed in range(8):
        sequence = waiting(grammar)
        masks = walk(grammars, sequence, Random(seed))
        matcher = compiler.compile(grammar)
        for mask, token_id in zip(masks, sequence.output_ids, strict=True):
            assert mask == ids_in(np.frombuffer(matcher.compute_bitmask(), np.int32))
            assert matcher.consume_token(token_id)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_state_made_from_the_tokens_is_the_one_that_followed_them(grammar: str) -> None:
    """As after a hand-over, a preemption or a retry; without the masks in between."""
    walks = [(sequence := waiting(grammar), walk(grammars_of(), sequence, Random(seed))) for seed in range(9)]
    followed, masks = max(walks, key=lambda walked: len(walked[1]))
    output = followed.output_ids
    assert len(output) > 2
    grammars = grammars_of()
    for cut, mask in enumerate(masks):
        assert allowed(grammars, take_chunk(waiting(grammar, output[:cut]), 1)) == mask
    last = take_chunk(waiting(grammar, output[:-1]), 1)
    step = grammars.begin([last])
    assert step is not None
    step.masks()
    assert step.settled([last], [ChunkResult(output[-1])])[0].is_complete


def test_a_state_that_stands_elsewhere_is_made_anew() -> None:
    grammars, sequence = grammars_of(), waiting(regex_grammar("abc[0-9]+x"))
    walk(grammars, sequence, Random(1), num_tokens=3)
    del sequence.token_ids[-1]
    sequence.num_scheduled = sequence.num_computed = len(sequence.token_ids) - 1
    assert allowed(grammars, take_chunk(sequence, 1)) == allowed(
        grammars_of(), take_chunk(waiting(regex_grammar("abc[0-9]+x"), sequence.output_ids), 1)
    )


def test_special_tokens_and_ids_without_a_token_are_never_text() -> None:
    grammars = grammars_of()
    mask = allowed(grammars, take_chunk(waiting(regex_grammar("(?s:.*)")), 1))
    assert mask == [*range(len(PIECES)), EOS]


def test_text_that_spells_a_special_token_is_written_in_other_tokens() -> None:
    pieces = [b"<", b"s", b">", b"<s>", b""]
    spelled = Vocabulary(pieces, frozenset({3}), frozenset({4}), lambda text: [3] if text == "<s>" else [])
    matcher = GrammarCompiler(spelled).compile(choice_grammar(["<s>"]))
    assert ids_in(np.frombuffer(matcher.compute_bitmask(), np.int32)) == [0]


@pytest.mark.parametrize(
    ("output", "params", "mask"),
    [
        ([0], {}, [0, EOS]),
        ([0], {"min_tokens": 2}, [0]),
        ([0], {"min_tokens": 1}, [0, EOS]),
        ([0], {"ignore_eos": True, "stop_token_ids": ()}, [0]),
        ([0], {"min_tokens": 2, "stop_token_ids": (0, EOS)}, [0, EOS]),
    ],
)
def test_min_tokens_and_ignore_eos_take_from_a_mask_what_they_can(
    output: list[int], params: dict[str, object], mask: list[int]
) -> None:
    """What would leave nothing takes nothing: the grammar has the last word."""
    assert allowed(grammars_of(), take_chunk(waiting(regex_grammar("a{1,3}|a[a]*"), output, **params), 1)) == mask


def test_a_grammar_that_wants_nothing_more_ends_the_request_with_its_last_token() -> None:
    grammars, sequence = grammars_of(), waiting(choice_grammar(["abc"]), ignore_eos=True, stop_token_ids=())
    walk(grammars, sequence, Random(0))
    assert decode(sequence.output_ids) == "abc"


@pytest.mark.parametrize(
    ("grammar", "load", "reason"),
    [
        ("start: foo", vocabulary, "unknown name"),
        (regex_grammar("a"), no_vocabulary, "without one"),
    ],
)
def test_a_grammar_that_does_not_compile_fails_its_request_alone(
    grammar: str, load: Callable[[], Vocabulary], reason: str
) -> None:
    grammars = grammars_of(load)
    chunks = [take_chunk(waiting(grammar), 1), take_chunk(waiting(""), 1)]
    step = grammars.begin(chunks)
    assert step is not None and len(step.masks().rows) == 0
    failed, fine = step.settled(chunks, [ChunkResult(1), ChunkResult(2)])
    assert (failed.token_id, fine) == (None, ChunkResult(2))
    assert reason in failed.failure


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone() -> None:
    """It compiles and has a first mask; after a token there is too much that may follow."""
    endings = islice(product(string.ascii_lowercase, repeat=3), 2100)
    grammar = lark_grammar("start: " + "|".join(f'"a{a}{b}{c}"' for a, b, c in endings))
    grammars, chunks = grammars_of(), [take_chunk(waiting(wanted), 1) for wanted in (grammar, regex_grammar("a+"))]
    step = grammars.begin(chunks)
    assert step is not None
    drawn = [ChunkResult(ids_in(row)[0]) for row in step.masks().bits.numpy()]
    failed, fine = step.settled(chunks, drawn)
    assert (failed.token_id, fine) == (None, drawn[1])
    assert "max is 2000" in failed.failure


def test_a_sequence_runs_when_its_grammar_is_compiled_and_its_tokens_are_known() -> None:
    may_load, woken = threading.Event(), threading.Event()

    def load() -> Vocabulary:
        assert may_load.wait(10)
        return vocabulary()

    grammars = Grammars(load, VOCAB_SIZE, woken.set)
    sequence = waiting(regex_grammar("a+"))
    assert (grammars.may_run(sequence), grammars.may_run(waiting(""))) == (False, True)
    may_load.set()
    assert woken.wait(10)
    assert grammars.may_run(sequence)
    take_chunk(sequence, 1)
    assert not grammars.may_run(sequence)
    grammars.close()


def test_a_compilation_that_takes_long_does_not_hold_up_another() -> None:
    grammars = grammars_of()
    slow = waiting(json_schema_grammar({"enum": [f"v{n}" for n in range(9000)]}))
    quick = waiting(regex_grammar("ab"))
    grammars.may_run_at_once(waiting(regex_grammar("a")))
    assert not grammars.may_run(slow)
    assert grammars.may_run_at_once(quick)
    assert not grammars.may_run(slow)
    grammars.close()


def test_more_grammars_than_are_kept_all_get_their_turn() -> None:
    """Whoever lives holds its own grammar, so that nobody waits for what another one has pushed out."""
    grammars = Grammars(vocabulary, VOCAB_SIZE, max_kept_bytes=200)
    sequences = [waiting(regex_grammar(f"a{n}b")) for n in range(20)]
    deadline = time.monotonic() + 20
    while sum(grammars.may_run(sequence) for sequence in sequences) < len(sequences):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for number, sequence in enumerate(sequences):
        walk(grammars, sequence, Random(0))
        assert decode(sequence.output_ids) == f"a{number}b"
    grammars.close()


# --- in an engine ----------------------------------------------------------------------------------

MakeExecutor = Callable[[EnginePlan, int], BuiltEngine]
EXECUTORS = pytest.mark.parametrize("make", [cpu_executor, gpu_executor])
DRAWN = SamplingParams(temperature=1.0, max_tokens=40, seed=3, stop_token_ids=(EOS,))


def engine_with(make: MakeExecutor, config: EngineConfig = CONFIG) -> OfflineEngine:
    return engine_of(replace(plan_of(config=config), grammars=grammars_of()), make)


def said(engine: OfflineEngine, params: Sequence[SamplingParams], num_prompt: int = 9) -> list[list[int]]:
    answers = [engine.add(prompt(num_prompt, n), wanted)[1] for n, wanted in enumerate(params)]
    engine.run()
    assert all(answer.is_finished for answer in answers)
    return [answer.token_ids for answer in answers]


@EXECUTORS
def test_constrained_and_free_requests_share_steps_and_change_nothing_for_each_other(make: MakeExecutor) -> None:
    greedy = with_params(DRAWN, temperature=0.0, grammar=GRAMMARS[3], presence_penalty=1.0, logit_bias={3: 9.0})
    wishes = [
        with_params(DRAWN, grammar=GRAMMARS[0], max_tokens=7),
        with_params(DRAWN, max_tokens=5, stop_token_ids=()),
        with_params(DRAWN, grammar=GRAMMARS[2]),
        with_params(greedy, min_tokens=9, max_tokens=9, logprobs=2),
    ]
    together = engine_with(make)
    beside = said(together, wishes)
    alone = engine_with(cpu_executor)
    for number, (wanted, tokens) in enumerate(zip(wishes, beside, strict=True)):
        (_, answer) = alone.add(prompt(9, number), wanted)
        alone.run()
        assert answer.token_ids == tokens
    compiler = GrammarCompiler(vocabulary(), VOCAB_SIZE)
    for wanted, tokens in zip(wishes, beside, strict=True):
        if wanted.grammar:
            assert compiler.compile(wanted.grammar).try_consume_tokens(tokens) == len(tokens)
    together.close()
    alone.close()


def test_preempted_requests_go_on_where_their_grammars_were() -> None:
    params = [with_params(DRAWN, grammar=regex_grammar("[a-z0-9]{30}x"), seed=n) for n in range(3)]
    roomy = engine_with(cpu_executor)
    rights = said(roomy, params, 15)
    cramped = engine_with(cpu_executor, replace(CONFIG, num_blocks=6))
    assert said(cramped, params, 15) == rights
    assert cramped.num_preemptions > 0
    cramped.close()
    roomy.close()


def test_a_free_request_gets_a_token_a_step_beside_one_that_waits_for_its_own() -> None:
    engine = engine_with(cpu_executor)
    free = engine.add(prompt(9, 1), with_params(DRAWN, max_tokens=20, stop_token_ids=()))[1]
    bound = engine.add(prompt(9, 2), with_params(DRAWN, grammar=regex_grammar("[a-z]{200}")))[1]
    step = None
    for _ in range(20):
        step = engine.step(step)
    assert (len(free.token_ids), len(bound.token_ids)) == (18, 10)
    engine.run(step)
    engine.close()


def test_masks_bar_all_that_they_do_not_name() -> None:
    logits = torch.zeros(3, 40)
    bits = torch.tensor([[5, 1 << 7], [-(1 << 31), 0]], dtype=torch.int32)
    TokenMasks(torch.tensor([0, 2]), bits).apply(logits)
    open_ids = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert open_ids == [[0, 2, 39], list(range(40)), [31]]
