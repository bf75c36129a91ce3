"""The command ``crossdock bench``: load from a model of traffic or a trace, latencies and goodput as the answer."""

import math
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from tqdm import tqdm

from .load import Endpoint, LoadSpec, first_model, run_load
from .report import LoadReport, Outcome, Targets, as_json, as_table
from .traces import read_records, requests_of
from .workload import Lengths, LoadRequest, PromptSource, arriving_at_rate, random_requests

Tokens = Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Tokens of a request, drawn evenly if a range.")]


def bench(
    url: Annotated[str, typer.Argument(help="The endpoint; any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name of the model; the first that the endpoint lists if unset.")] = "",
    num_requests: Annotated[int, typer.Option("--requests", "-n", help="How many; of a trace the first.")] = 100,
    rate: Annotated[float, typer.Option(help="Arrivals a second, as a Poisson process; 0: all at once.")] = 0.0,
    concurrency: Annotated[
        int, typer.Option(help="At most so many at a time, the next when one ends (a closed loop); 0: no limit.")
    ] = 0,
    prompt_tokens: Tokens = "256",
    output_tokens: Tokens = "128",
    shared_tokens: Annotated[int, typer.Option(help="How many tokens all prompts have in common at the start.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Replay a Mooncake (.jsonl) or Azure (.csv) trace.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Replay the trace so many times as fast.")] = 1.0,
    max_len: Annotated[int, typer.Option(help="Leave out requests of the trace with more tokens in all; 0: none.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Chat endpoint with prompts of words, not token ids.")] = False,
    vocab_size: Annotated[int, typer.Option(help="Token ids are drawn below this.")] = 32_000,
    ttft_ms: Annotated[float, typer.Option(help="Target of goodput: time to the first token.")] = math.inf,
    tpot_ms: Annotated[float, typer.Option(help="Target of goodput: time per output token.")] = math.inf,
    gpus: Annotated[int, typer.Option(help="GPUs behind the endpoint, for goodput a GPU.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same load.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0,
    extra: Annotated[
        str, typer.Option(help="JSON object of further fields for every request.")
    ] = '{"ignore_eos": true, "temperature": 0}',
    api_key: Annotated[str, typer.Option(help="Sent as a bearer token.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the report here as JSON too; - for standard output.")] = None,
) -> None:
    """Put an OpenAI-compatible endpoint under load; show TTFT, TPOT, ITL, throughput and goodput."""
    source = PromptSource(0 if chat else vocab_size)
    if trace:
        requests = from_trace(trace, num_requests, max_len, speed, source, seed)
    else:
        lengths = parsed_lengths(prompt_tokens), parsed_lengths(output_tokens)
        requests = random_requests(num_requests, *lengths, source, shared_tokens, seed)
        requests = arriving_at_rate(requests, rate, seed) if rate else requests
    endpoint = Endpoint(url, model or listed_model(url, api_key), api_key, chat, parsed_fields(extra))
    targets = Targets(ttft_ms / 1000, tpot_ms / 1000)
    report = watched(LoadSpec(endpoint, tuple(requests), concurrency or None, timeout, targets, gpus))
    show(report, json)
    raise typer.Exit(int(report.num_failed == report.num_requests))


def parsed_lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from None


def parsed_fields(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise typer.BadParameter(f"{text!r} is no JSON object: {error}") from None


def listed_model(url: str, api_key: str) -> str:
    try:
        return first_model(url, api_key)
    except OSError as error:
        raise typer.BadParameter(f"no model to be had from {url}: {error}") from None


def from_trace(
    path: Path, num_requests: int, max_len: int, speed: float, source: PromptSource, seed: int
) -> list[LoadRequest]:
    try:
        records = read_records(path)
    except (msgspec.MsgspecError, KeyError) as error:
        raise typer.BadParameter(f"{path} is no trace: {error}") from None
    fitting = [record for record in records if not max_len or record.input_length + record.output_length <= max_len]
    return requests_of(fitting[:num_requests], source, speed, seed)


def watched(spec: LoadSpec) -> LoadReport:
    """Run with a progress bar, if a person is looking."""
    with tqdm(total=len(spec.requests), unit="request", disable=not sys.stderr.isatty()) as bar:

        def advance(_: Outcome) -> None:
            bar.update()

        return run_load(spec, advance)


def show(report: LoadReport, json: Path | None) -> None:
    if json == Path("-"):
        sys.stdout.buffer.write(as_json(report))
        return
    print(as_table(report))
    if json:
        json.write_bytes(as_json(report))
