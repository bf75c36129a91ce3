"""The work that is measured on a GPU: decode steps, prefill, prefix hits and a cold batch, through the whole engine."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from crossdock.benchmarks.gpu_profile import Timeline, profile_decode, profile_prefill
from crossdock.benchmarks.gpu_shapes import ModelShape
from crossdock.benchmarks.offline_engine import OfflineEngine
from crossdock.core.request import SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 1024, 128
LONG_PROMPT, CACHED_TOKENS = 8192, 8160


@dataclass(frozen=True, slots=True)
class Measurement:
    """``value`` and its peers in the same unit; a higher value is better if ``is_rate``."""

    name: str
    unit: str
    value: float
    floor: float | None = None
    vllm: float | None = None
    goal: float | None = None
    is_rate: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """What vLLM 0.26.0 took on the same kind of machine for the 8B shape, and what is aimed at."""

    vllm: float
    goal: float


DECODE_PEERS = {1: Peer(4.99, 4.1), 32: Peer(6.26, 5.4), 128: Peer(10.66, 9.0), 256: Peer(17.70, 15.0)}
PREFILL, ONE_PROMPT, PREFIX_HIT, COLD = Peer(38260, 40500), Peer(218, 200), Peer(19.1, 8), Peer(8.50, 7.6)
START = Peer(60, 15)


class Workloads:
    """Each method measures one line of the table; prompts are drawn anew each time."""

    def __init__(self, engine: OfflineEngine, shape: ModelShape, has_peers: bool, seed: int = 0) -> None:
        self._engine = engine
        self._shape = shape
        self._has_peers = has_peers
        self._random = random.Random(seed)

    def warm_up(self) -> None:
        """What is set up or compiled at first use is no part of any measurement."""
        for num_prompts, num_tokens in ((1, 100), (3, 40), (40, 33)):
            self._engine.generate(self._prompts(num_prompts, num_tokens), _greedy(3))

    def decode(self, batch: int, context: int = PROMPT_TOKENS, repeats: int = 3) -> Measurement:
        """``(T(129 tokens) - T(1 token)) / 128`` with the prompts in the prefix cache."""
        prompts = self._prompts(batch, context)
        self._engine.generate(prompts, _greedy(1))
        times = self._engine.times
        steps = []
        for _ in range(repeats):
            one = _seconds(lambda: self._engine.generate(prompts, _greedy(1)))
            times.clear()
            all_tokens = _seconds(lambda: self._engine.generate(prompts, _greedy(NEW_TOKENS + 1)))
            steps.append((all_tokens - one) / NEW_TOKENS)
        floor = self._shape.decode_floor(batch, context + NEW_TOKENS // 2)
        note = f"host: launch {_ms(times.launch)}, wait {_ms(times.wait)}, finish {_ms(times.finish)}"
        peer = DECODE_PEERS.get(batch) if context == PROMPT_TOKENS else None
        return self._measured(
            f"decode, batch {batch}, {context} tokens", "ms", median(steps) * 1e3, floor * 1e3, peer, note=note
        )

    def prefill(self, num_prompts: int = 8, repeats: int = 3) -> Measurement:
        def once() -> float:
            prompts = self._prompts(num_prompts, LONG_PROMPT)
            return _seconds(lambda: self._engine.generate(prompts, _greedy(1)))

        rate = num_prompts * LONG_PROMPT / median(once() for _ in range(repeats))
        floor = LONG_PROMPT / self._shape.prefill_floor(LONG_PROMPT)
        return self._measured(f"prefill, {num_prompts} x {LONG_PROMPT}", "tokens/s", rate, floor, PREFILL, is_rate=True)

    def one_prompt(self, num_tokens: int = LONG_PROMPT, repeats: int = 3) -> Measurement:
        seconds = median(self._first_token_after(self._prompts(1, num_tokens)[0]) for _ in range(repeats))
        floor = self._shape.prefill_floor(num_tokens)
        peer = ONE_PROMPT if num_tokens == LONG_PROMPT else None
        return self._measured(f"TTFT, {num_tokens} tokens", "ms", seconds * 1e3, floor * 1e3, peer)

    def prefix_hit(self, repeats: int = 5) -> Measurement:
        prompts = self._hits(repeats)
        times = self._engine.times
        times.clear()
        seconds = median(self._first_token_after(prompt) for prompt in prompts)
        floor = self._shape.prefill_floor(LONG_PROMPT, CACHED_TOKENS)
        note = f"host: launch {_ms(times.launch[::2])}, wait {_ms(times.wait[1::2])}, finish {_ms(times.finish[1::2])}"
        name = f"TTFT, {CACHED_TOKENS} of {LONG_PROMPT} cached"
        return self._measured(name, "ms", seconds * 1e3, floor * 1e3, PREFIX_HIT, note=note)

    def cold_batch(self, num_prompts: int = 256) -> Measurement:
        prompts = self._prompts(num_prompts, PROMPT_TOKENS)
        self._engine.times.clear()
        seconds = _seconds(lambda: self._engine.generate(prompts, _greedy(NEW_TOKENS)))
        times = self._engine.times
        note = f"{num_prompts * NEW_TOKENS / seconds:.0f} output tokens/s; host launch {_ms(times.launch)}"
        name = f"cold, {num_prompts} x ({PROMPT_TOKENS} + {NEW_TOKENS})"
        return self._measured(name, "s", seconds, None, COLD, note=note)

    def profile(self, batch: int) -> Timeline:
        return profile_decode(self._engine, self._prompts(batch, PROMPT_TOKENS))

    def profile_prompt(self) -> Timeline:
        return profile_prefill(self._engine, self._prompts(2, LONG_PROMPT))

    def profile_hit(self) -> Timeline:
        return profile_prefill(self._engine, self._hits(5))

    def _hits(self, number: int) -> list[list[int]]:
        """Prompts whose first tokens are in the prefix cache."""
        prompt = self._prompts(1, LONG_PROMPT)[0]
        self._engine.generate([prompt], _greedy(1))
        endings = self._prompts(number, LONG_PROMPT - CACHED_TOKENS)
        return [prompt[:CACHED_TOKENS] + ending for ending in endings]

    def _first_token_after(self, prompt: list[int]) -> float:
        started_at = time.perf_counter()
        [answer] = self._engine.generate([prompt], _greedy(1))
        return answer.first_at - started_at

    def _prompts(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        vocab = range(self._shape.spec.vocab_size)
        return [self._random.choices(vocab, k=num_tokens) for _ in range(num_prompts)]

    def _measured(
        self,
        name: str,
        unit: str,
        value: float,
        floor: float | None,
        peer: Peer | None,
        is_rate: bool = False,
        note: str = "",
    ) -> Measurement:
        known = peer if self._has_peers else None
        vllm, goal = (known.vllm, known.goal) if known else (None, None)
        return Measurement(name, unit, value, floor, vllm, goal, is_rate, note)


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, seed=0)


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def _ms(seconds: list[float]) -> str:
    """Median and largest."""
    return f"{median(seconds) * 1e3:.2f} (max {max(seconds) * 1e3:.1f}) ms" if seconds else "-"
