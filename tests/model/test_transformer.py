"""The forward pass against Transformers' own, over every family, rope, window, chunking and mixture of requests."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import ChunkResult, Sequence, settle, take_chunk
from crossdock.model.batch import Batch, build_batch
from crossdock.model.families import decoder_spec
from crossdock.model.kv_tensors import KvTensors
from crossdock.model.loading import build_transformer
from crossdock.model.transformer import Transformer

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
ROPES: dict[str, dict[str, object]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}
VOCAB = 97


class StateDict:
    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors = model.state_dict()

    def names(self) -> set[str]:
        return set(self.tensors)

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self.tensors[name]
        return tensor


@dataclass
class Twins:
    """The same random weights in Transformers and here."""

    theirs: PreTrainedModel
    ours: Transformer[Batch]

    def logits(self, token_ids: list[int]) -> Tensor:
        logits: Tensor = self.theirs(torch.tensor([token_ids])).logits[0]
        return logits

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        assert isinstance(self.theirs, GenerationMixin)
        inputs = torch.tensor([token_ids])
        self.theirs.generation_config.eos_token_id = None
        mask = torch.ones_like(inputs)
        out = self.theirs.generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
        new: list[int] = out[0, len(token_ids) :].tolist()
        return new


class Pool:
    """A pool on its own, stepped by hand; blocks are handed out back to front, so that none lie in order."""

    def __init__(self, ours: Transformer[Batch], block_size: int = 4, dtype: str = "float32") -> None:
        self.ours = ours
        self.layout = ours.spec.kv_layout(block_size, dtype)
        self.kv = KvTensors(self.layout, 320 // block_size)
        self.free = list(range(self.kv.num_blocks))

    def add(self, token_ids: list[int], num_output: int = 0, prefix: tuple[int, ...] = ()) -> Sequence:
        params = SamplingParams(max_tokens=max(1, num_output), seed=0)
        sequence = Sequence.of(Request(request_id=RequestId("r"), prompt=pack_ids(token_ids), params=params))
        sequence.num_scheduled = len(prefix) * self.layout.block_size
        num_blocks = self.layout.num_blocks_for(len(token_ids) + num_output)
        sequence.blocks = [*prefix, *(self.free.pop() for _ in range(num_blocks - len(prefix)))]
        return sequence

    def step(self, *work: tuple[Sequence, int]) -> list[Tensor]:
        """Logits of every row of each sequence's next ``num_tokens`` tokens; a sampled token is the greedy one."""
        chunks = [take_chunk(sequence, num_tokens) for sequence, num_tokens in work]
        token_ids = [i for chunk in chunks for i in chunk.sequence.token_ids[chunk.start : chunk.end]]
        batch = build_batch(chunks, torch.tensor(token_ids), self.layout)
        logits = self.ours.logits(self.ours.forward(batch, self.kv))
        for chunk, rows in zip(chunks, batch.chunk_rows, strict=True):
            settle(chunk, ChunkResult(int(logits[rows[-1]].argmax()) if chunk.samples else None))
        return [logits[rows.start : rows.stop] for rows in batch.chunk_rows]

    def logits(self, token_ids: list[int], chunk_size: int = 1000, prefix: tuple[int, ...] = ()) -> Tensor:
        """Of every token behind the prefix, in chunks of ``chunk_size``."""
        sequence, rows = self.add(token_ids, prefix=prefix), []
        while sequence.num_scheduled < len(token_ids):
            rows += self.step((sequence, min(chunk_size, len(token_ids) - sequence.num_scheduled)))
        return torch.cat(rows)

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        sequence = self.add(token_ids, num_tokens)
        while sequence.num_output < num_tokens:
            self.step((sequence, sequence.num_unscheduled))
        return sequence.output_ids


MakeTwins = Callable[..., Twins]


@pytest.fixture
def twins(tmp_path: Path) -> MakeTwins:
    def make(architecture: str = "LlamaForCausalLM", seed: int = 0, dtype: str = "float32", **config: object) -> Twins:
        sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
        model_type = architecture.removesuffix("ForCausalLM").lower()
        torch.manual_seed(seed)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | heads | config)).eval()
        for name, weight in theirs.named_parameters():
            weight.requires_grad_(False).normal_(1.0 if "norm" in name else 0.0, 0.3)
        theirs = theirs.to(getattr(torch, dtype))
        theirs.save_pretrained(tmp_path)
        spec = decoder_spec(json.loads((tmp_path / "config.json").read_text()))
        return Twins(theirs, build_transformer(spec, StateDict(theirs), getattr(torch, dtype)))

    return make


def random_ids(num_tokens: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours: Tensor, theirs: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_family_gives_the_logits_and_greedy_tokens_of_transformers(
    twins: MakeTwins, architecture: str, is_tied: bool
) -> None:
    pair, prompt = twins(architecture, tie_word_embeddings=is_tied), random_ids(23)
    assert_close(Pool(pair.ours).logits(prompt), pair.logits(prompt))
    assert Pool(pair.ours).greedy(prompt, 16) == pair.greedy(prompt, 16)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_biases_of_attention_and_mlp_are_added(twins: MakeTwins, architecture: str) -> None:
    pair, prompt = twins(architecture, attention_bias=True, mlp_bias=True), random_ids(23)
    assert_close(Pool(pair.ours).logits(prompt), pair.logits(prompt))


@pytest.mark.parametrize("kind", ROPES)
def test_a_scaled_rope_gives_the_logits_and_greedy_tokens_of_transformers(twins: MakeTwins, kind: str) -> None:
    pair = twins(rope_parameters={"rope_type": kind, "rope_theta": 1000.0, **ROPES[kind]})
    prompt = random_ids(90)
    assert_close(Pool(pair.ours).logits(prompt), pair.logits(prompt))
    assert Pool(pair.ours).greedy(prompt, 16) == pair.greedy(prompt, 16)


def test_dynamic_rope_follows_transformers_when_decoding_grows_past_the_original_length(twins: MakeTwins) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
    pair, prompt = twins(rope_parameters=rope, max_position_embeddings=24), random_ids(20)
    assert Pool(pair.ours).greedy(prompt, 24) == pair.greedy(prompt, 24)


def test_dynamic_rope_past_the_original_length_does_not_depend_on_chunks(twins: MakeTwins) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
    pair, prompt = twins(rope_parameters=rope, max_position_embeddings=24), random_ids(50)
    assert_close(Pool(pair.ours).logits(prompt, 7), Pool(pair.ours).logits(prompt))


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunk_size", [1, 3, 16, 21])
@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
def test_chunks_give_the_same_logits_as_the_whole_prompt(
    twins: MakeTwins, block_size: int, chunk_size: int, window: int | None
) -> None:
    pair, prompt = twins("MistralForCausalLM", sliding_window=window), random_ids(41)
    assert_close(Pool(pair.ours, block_size).logits(prompt, chunk_size), pair.logits(prompt))


@pytest.mark.parametrize("window", [None, 6], ids=["full", "window"])
def test_a_cached_prefix_gives_the_same_logits_as_computing_it(twins: MakeTwins, window: int | None) -> None:
    pair, prompt = twins("MistralForCausalLM", sliding_window=window), random_ids(30)
    pool = Pool(pair.ours)
    first = pool.add(prompt)
    pool.step((first, 30))
    other = prompt[:12] + random_ids(9, seed=2)
    assert_close(pool.logits(other, prefix=tuple(first.blocks[:3])), pair.logits(other)[12:])


def test_any_mixture_of_prompts_and_decodes_gives_each_request_its_own_logits(twins: MakeTwins) -> None:
    layer_types = ["full_attention", "sliding_attention"]
    pair = twins("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=7, layer_types=layer_types)
    prompts = [random_ids(n, seed=n) for n in (3, 90, 17, 40, 2, 33, 8)]
    sizes = [1, 1, 9, 1, 2, 33, 1]
    pool = Pool(pair.ours)
    sequences = [pool.add(prompt) for prompt in prompts]
    for sequence, size in zip(sequences, sizes, strict=True):
        if sequence.num_prompt > size:
            pool.step((sequence, sequence.num_prompt - size))
    mixed = pool.step(*zip(sequences, sizes, strict=True))
    for prompt, size, logits in zip(prompts, sizes, mixed, strict=True):
        assert_close(logits, pair.logits(prompt)[-size:])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_logits_are_the_same_to_the_bit_however_the_tokens_are_cut_into_steps(
    twins: MakeTwins, architecture: str
) -> None:
    ours = twins(architecture, hidden_size=96, head_dim=16, sliding_window=70).ours
    prompts = [random_ids(n, seed=n) for n in (120, 90, 41, 7)]
    alone = [Pool(ours).logits(prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, alone, strict=True):
        for chunk_size in (1, 3, 16, 37):
            assert torch.equal(Pool(ours).logits(prompt, chunk_size), logits)
    pool = Pool(ours, 16)
    sequences = [pool.add(prompt) for prompt in prompts]
    for sequence in sequences:
        pool.step((sequence, sequence.num_prompt - 1))
    together = pool.step(*((sequence, 1) for sequence in sequences))
    for logits, expected in zip(together, alone, strict=True):
        assert torch.equal(logits[-1], expected[-1])


def how_much_the_last_logits_change(pool: Pool, prompt: list[int], position: int, chunk_size: int = 1000) -> float:
    changed = [*prompt]
    changed[position] = (changed[position] + 1) % VOCAB
    return float((pool.logits(prompt, chunk_size)[-1] - pool.logits(changed, chunk_size)[-1]).abs().max())


@pytest.mark.parametrize("chunk_size", [1000, 3, 1], ids=["whole", "chunks of 3", "decode"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_window_of_four_sees_the_third_token_back_and_not_the_fourth(
    twins: MakeTwins, chunk_size: int, block_size: int
) -> None:
    pool = Pool(twins("MistralForCausalLM", num_hidden_layers=1, sliding_window=4).ours, block_size)
    prompt = random_ids(14)
    assert how_much_the_last_logits_change(pool, prompt, 13 - 4, chunk_size) == 0
    assert how_much_the_last_logits_change(pool, prompt, 13 - 3, chunk_size) > 0.01


def test_a_window_is_kept_behind_a_cached_prefix(twins: MakeTwins) -> None:
    pool = Pool(twins("MistralForCausalLM", num_hidden_layers=1, sliding_window=4).ours)
    prompt, last = random_ids(12), random_ids(1, seed=3)
    reused = {}
    for position in (None, 12 - 4, 12 - 3):
        prefix = [(i + (place == position)) % VOCAB for place, i in enumerate(prompt)]
        cached = pool.add(prefix)
        pool.step((cached, 12))
        reused[position] = pool.logits(prefix + last, prefix=tuple(cached.blocks))[-1]
    assert torch.equal(reused[12 - 4], reused[None])
    assert not torch.equal(reused[12 - 3], reused[None])


@pytest.mark.parametrize(
    "window",
    [
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 2, "sliding_window": 4},
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    ],
    ids=["all layers declared full", "window switched off"],
)
def test_a_window_that_no_layer_uses_hides_nothing(twins: MakeTwins, window: dict[str, object]) -> None:
    pair, prompt = twins("Qwen2ForCausalLM", **window), random_ids(20)
    assert pair.ours.spec.windows == (None, None)
    assert_close(Pool(pair.ours).logits(prompt), pair.logits(prompt))


def test_windows_begin_at_max_window_layers(twins: MakeTwins) -> None:
    pair = twins("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert pair.ours.spec.windows == (None, 4)
    prompt = random_ids(20)
    assert_close(Pool(pair.ours).logits(prompt), pair.logits(prompt))


def test_layers_are_announced_in_order_with_their_kv_written(twins: MakeTwins) -> None:
    pool = Pool(twins(num_hidden_layers=3).ours)
    sequence = pool.add(random_ids(9))
    batch = build_batch([take_chunk(sequence, 9)], torch.tensor(sequence.token_ids.tolist()), pool.layout)
    written: list[list[bool]] = []

    def note(layer: int) -> None:
        assert layer == len(written)
        written.append([bool(pool.kv.tensor[sequence.blocks, i].any()) for i in range(3)])

    pool.ours.forward(batch, pool.kv, note)
    assert written == [[True, False, False], [True, True, False], [True, True, True]]


def test_kv_is_written_to_the_sequences_own_slots_only(twins: MakeTwins) -> None:
    pool = Pool(twins().ours)
    sequence = pool.add(random_ids(6))
    pool.step((sequence, 6))
    touched = pool.kv.tensor.abs().sum((1, 2, 3, 5)).nonzero().tolist()
    first, second = sequence.blocks
    assert sorted(touched) == sorted([[first, i] for i in range(4)] + [[second, i] for i in range(2)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_stays_as_close_to_float32_as_transformers_does(twins: MakeTwins, architecture: str) -> None:
    pair, prompt = twins(architecture, dtype="bfloat16"), random_ids(40)
    ours, theirs = Pool(pair.ours, dtype="bfloat16").logits(prompt, 17), pair.logits(prompt).float()
    exact = pair.theirs.float()(torch.tensor([prompt])).logits[0]
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()
