"""Throughput on this machine's CPU, ours and others', the demo model, all requests at once.

    .venv/bin/python benchmarks/cpu.py --vllm ENV --llama-server FILE --transformers-serve ENV

Each candidate runs alone, in processes of its own, on the same prompts with greedy sampling and the same number of
output tokens. What counts is the ratio to a plain loop over ``transformers.generate`` in the same run.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import orjson
import typer
from tokenizers import Tokenizer

from crossdock.benchmarks import servers
from crossdock.benchmarks.servers import Exports, Server
from crossdock.benchmarks.workload import LoadRequest
from crossdock.deploy.model_source import resolve
from crossdock.router.text import load_text

CANDIDATES = "loop,llm,mixed,pd"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt as text and as token ids, so that engines that take only one of them do the same work."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    prompts: tuple[Prompt, ...]
    output_tokens: int
    dtype: str
    num_threads: int

    @property
    def requests(self) -> tuple[LoadRequest, ...]:
        return tuple(LoadRequest(prompt.text, self.output_tokens) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Speed:
    """One candidate's result; latencies are medians, and ``None`` for those that do not stream."""

    name: str
    output_tokens: int
    seconds: float
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    ready_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def generate_one_by_one(job: Job, folder: Path) -> Speed:
    """The plain loop that everybody writes first."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.num_threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, job.dtype))

    def generate(token_ids: tuple[int, ...], num_tokens: int) -> int:
        prompt = torch.tensor([token_ids])
        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **limits)
        return int(output.shape[1]) - len(token_ids)

    generate(job.prompts[0].token_ids[:4], 4)
    started_at = time.perf_counter()
    output_tokens = sum(generate(prompt.token_ids, job.output_tokens) for prompt in job.prompts)
    return Speed("transformers.generate, one by one", output_tokens, time.perf_counter() - started_at)


def generate_offline(job: Job) -> Speed:
    """Our engine in this process, all prompts in one call."""
    from crossdock import LLM, EngineConfig, SamplingParams

    llm = LLM("demo", EngineConfig(dtype=job.dtype, num_threads=job.num_threads))
    params = SamplingParams(temperature=0, max_tokens=job.output_tokens, ignore_eos=True)
    llm.generate([job.prompts[0].token_ids[:4]], SamplingParams(temperature=0, max_tokens=4), show_progress=False)
    started_at = time.perf_counter()
    results = llm.generate([prompt.token_ids for prompt in job.prompts], params, show_progress=False)
    seconds = time.perf_counter() - started_at
    return Speed("crossdock LLM.generate", sum(len(result.outputs[0].token_ids) for result in results), seconds)


def serve_and_load(job: Job, server: Server, cache: Path) -> Speed:
    served = servers.measure(server, job.requests, cache / f"{server.name.replace(' ', '-')}.log")
    report = served.report
    return Speed(
        server.name,
        report.output_tokens,
        report.duration_seconds,
        report.ttft.p50,
        report.tpot.p50,
        served.ready_seconds,
    )


def alone(work: Callable[..., Speed], *arguments: object) -> Speed:
    """Run in a fresh process, so that no candidate inherits another's memory, threads or warm caches."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def draw_prompts(tokenizer_file: Path, num_prompts: int, num_tokens: int) -> tuple[Prompt, ...]:
    """Random English words of a token each; text and ids of a prompt say exactly the same."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    words = sorted(token[1:] for token in tokenizer.get_vocab() if token[0] == "Ġ" and token[1:].isalpha())
    plain = [word for word in words if word.isascii() and word.islower() and len(word) > 3]

    def draws() -> Iterator[Prompt]:
        source = random.Random(0)
        while True:
            text = "".join(f" {word}" for word in source.choices(plain, k=num_tokens))
            token_ids = tuple(tokenizer.encode(text).ids)
            if len(token_ids) == num_tokens:
                yield Prompt(text, token_ids)

    return tuple(islice(draws(), num_prompts))


def exported(cache: Path) -> Exports:
    """The demo model for the others, written once into ``cache``."""
    source = resolve("demo")
    folder, gguf = cache / "demo-float32", cache / "demo-float32.gguf"
    cache.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors").exists() or not gguf.exists():
        from crossdock.benchmarks.model_export import export_float32_gguf, export_folder

        print(f"writing the demo model in float32 to {cache}", flush=True)
        export_folder(source.path, folder)
        export_float32_gguf(source.path, gguf)
    return Exports(folder, gguf, min(load_text(source.path).eos_ids))


def as_table(speeds: list[Speed]) -> str:
    """Ratios are to the first row."""
    head = f"{'':<36}{'tokens/s':>10}{'ratio':>8}{'TTFT ms':>10}{'TPOT ms':>10}{'ready s':>9}"
    return "\n".join([head, *(table_row(speed, speeds[0]) for speed in speeds)])


def table_row(speed: Speed, first: Speed) -> str:
    def cell(value: float | None, scale: float, width: int) -> str:
        return f"{'-' if value is None else f'{value * scale:.1f}':>{width}}"

    ratio = speed.tokens_per_second / first.tokens_per_second
    latencies = cell(speed.ttft_seconds, 1000, 10) + cell(speed.tpot_seconds, 1000, 10)
    return f"{speed.name:<36}{speed.tokens_per_second:>10.1f}{ratio:>8.2f}{latencies}{cell(speed.ready_seconds, 1, 9)}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Environment = Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Its virtual environment.")]


@app.command()
def main(
    num_requests: Annotated[int, typer.Option("--requests", help="All arrive at once.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; llama.cpp has float32 only.")] = "float32",
    ours: Annotated[str, typer.Option(help="Which of loop, llm, mixed and pd to measure.")] = CANDIDATES,
    vllm: Environment = None,
    transformers_serve: Environment = None,
    llama_cpp_python: Environment = None,
    llama_server: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="llama.cpp's binary.")] = None,
    threads: Annotated[int, typer.Option(help="Compute threads of each candidate; 0: one a core.")] = 0,
    rounds: Annotated[int, typer.Option(help="Measure everything so often and show the medians.")] = 1,
    cache: Annotated[Path, typer.Option(help="Folder for exported models and logs.")] = Path("~/.cache/crossdock"),
    json: Annotated[Path | None, typer.Option(help="Write all measurements here.")] = None,
) -> None:
    """Output tokens a second on this CPU: transformers.generate in a loop, crossdock offline and served, and others."""
    cache = cache.expanduser()
    exports = exported(cache)
    num_threads = threads or len(os.sched_getaffinity(0))
    prompts = draw_prompts(exports.folder / "tokenizer.json", num_requests, prompt_tokens)
    job = Job(prompts, output_tokens, dtype, num_threads)
    peers = [
        vllm and servers.vllm(vllm, exports, dtype, num_threads),
        llama_server and servers.llama_server(llama_server, exports, num_requests, num_threads),
        llama_cpp_python and servers.llama_cpp_python(llama_cpp_python, exports, num_threads),
        transformers_serve and servers.transformers_serve(transformers_serve, exports, dtype, num_requests),
    ]
    candidates = our_candidates(ours.split(","), job, exports, cache)
    candidates += [partial(serve_and_load, job, peer, cache) for peer in peers if peer]
    measured = [[measure() for measure in candidates] for _ in range(rounds)]
    print(as_table([median(speeds) for speeds in zip(*measured, strict=True)]))
    if json:
        json.write_bytes(orjson.dumps(measured, option=orjson.OPT_INDENT_2))


def our_candidates(names: list[str], job: Job, exports: Exports, cache: Path) -> list[Callable[[], Speed]]:
    """Raises ``typer.BadParameter`` for a name that is none of ours."""
    known: dict[str, Callable[[], Speed]] = {
        "loop": partial(alone, generate_one_by_one, job, exports.folder),
        "llm": partial(alone, generate_offline, job),
        "mixed": partial(serve_and_load, job, servers.crossdock("crossdock mixed", job.dtype, "--mixed=1"), cache),
        "pd": partial(serve_and_load, job, servers.crossdock("crossdock 1P1D", job.dtype), cache),
    }
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"{sorted(unknown)} is none of {sorted(known)}")
    return [known[name] for name in names]


def median(speeds: Sequence[Speed]) -> Speed:
    return sorted(speeds, key=attrgetter("tokens_per_second"))[len(speeds) // 2]


if __name__ == "__main__":
    app()
