"""Asks a running router how its workers are, and says what is wrong."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec

from ..core.messages import PROTOCOL_VERSION
from ..core.version import VERSION
from .findings import Finding, Report, Trial, problem, warning
from .host_check import SLOW_BYTES_PER_SECOND

ANSWER_SECONDS = 10.0
SILENT_SECONDS = 2.5


class TriedTransport(msgspec.Struct, frozen=True):
    name: str
    bytes_per_second: float
    latency_seconds: float
    error: str
    detail: str


class FleetLink(msgspec.Struct, frozen=True):
    to: str
    transport: str
    error: str
    tried: list[TriedTransport]


class FleetWorker(msgspec.Struct, frozen=True):
    name: str
    role: str
    is_accepting: bool
    seconds_since_heard: float
    transports: list[str]
    links: list[FleetLink]


class FleetRefusal(msgspec.Struct, frozen=True):
    name: str
    reason: str
    seconds_ago: float


class FleetStatus(msgspec.Struct, frozen=True):
    """What of ``/status.json`` is read here."""

    version: str
    protocol: int
    model: str
    is_ready: bool
    reasons: list[str]
    workers: list[FleetWorker]
    refused: list[FleetRefusal]


def check_fleet(url: str, api_key: str | None) -> Report:
    facts = [("router", url)]
    try:
        status = _ask(url, api_key)
    except (OSError, ValueError) as error:
        to_do = "check the address, that `crossdock serve` or `crossdock router` runs there, and its --public-path"
        return Report(facts, [], [problem(f"{url} does not tell its status: {error}", to_do)])
    roles = ", ".join(f"{worker.role} {worker.name}" for worker in status.workers) or "none"
    facts += [("version", status.version), ("model", status.model), ("workers", roles)]
    return Report(facts, list(_trials(status)), list(judge_fleet(status)))


def _ask(url: str, api_key: str | None) -> FleetStatus:
    """Raises ``OSError``, ``ValueError``."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("a URL starts with http:// or https://")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/status.json", headers=headers)
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        return msgspec.json.decode(response.read(), type=FleetStatus)


def _trials(status: FleetStatus) -> Iterator[Trial]:
    """All that was tried of each pair; the transport that is used comes with a star."""
    for worker in status.workers:
        for link in worker.links:
            pair = f"{worker.name} to {link.to}"
            for tried in link.tried:
                star = "*" if tried.name == link.transport else ""
                yield Trial(
                    transport=tried.name + star,
                    memory=pair,
                    bytes_per_second=tried.bytes_per_second,
                    latency_seconds=tried.latency_seconds,
                    detail=tried.detail,
                    error=tried.error,
                )
            if not link.tried:
                yield Trial(transport=link.transport or "-", memory=pair, error=link.error or "not told")


def judge_fleet(status: FleetStatus) -> Iterator[Finding]:
    for reason in status.reasons:
        yield problem(f"no request is taken: {reason}", _advice_on_readiness(reason))
    if (status.version, status.protocol) != (VERSION, PROTOCOL_VERSION):
        here, there = f"{VERSION} (protocol {PROTOCOL_VERSION})", f"{status.version} (protocol {status.protocol})"
        yield warning(f"the router is Crossdock {there}, this is {here}", "install one version everywhere")
    for refusal in status.refused:
        what = f"worker {refusal.name} was refused {refusal.seconds_ago:.0f} s ago: {refusal.reason}"
        yield (warning if status.is_ready else problem)(what, advice_on_mismatch(refusal.reason))
    for worker in status.workers:
        yield from _judge_worker(worker)


def _judge_worker(worker: FleetWorker) -> Iterator[Finding]:
    name = f"{worker.role} worker {worker.name}"
    if not worker.is_accepting:
        yield warning(f"{name} takes no new requests", "it is being stopped; start another one if it is needed")
    if worker.seconds_since_heard > SILENT_SECONDS:
        what = f"{name} was last heard of {worker.seconds_since_heard:.1f} s ago"
        yield warning(what, "look at its log, and whether its host is overloaded")
    for link in worker.links:
        pair = f"{worker.name} to {link.to}"
        if link.error:
            yield warning(f"no KV can go from {pair}: {link.error}", _advice_on_link(worker, link))
            continue
        for tried in link.tried:
            is_used = tried.name == link.transport
            if is_used and tried.bytes_per_second < SLOW_BYTES_PER_SECOND:
                what = f"{pair} is slow: {tried.bytes_per_second / 1e9:.2f} GB/s over {tried.name}"
                yield warning(what, "run `crossdock doctor` on both hosts: it tells which transports work and why not")
            elif is_used and "UCX took TCP" in tried.detail:
                yield warning(f"{pair}: {tried.detail.partition('; ')[2]}", "then start the workers again")


def _advice_on_readiness(reason: str) -> str:
    if "shutting down" in reason:
        return "it ends when its open requests have; start it again"
    if "transport" in reason:
        return "see the pairs and their errors; a pair that has just met is still being probed"
    role = "prefill" if "prefills" in reason else "decode"
    return f"start one: crossdock worker MODEL --router tcp://ROUTER:5570 --role {role}; its log says why it ended"


def advice_on_mismatch(reason: str) -> str:
    """What makes two workers alike in the field that differs."""
    if "protocol version" in reason:
        return "install one version of Crossdock everywhere"
    if "model" in reason or "weights" in reason:
        return "give router and workers the same model in the same revision"
    flags = {"dtype": "--dtype", "block_size": "--block-size", "num_layer_groups": "--layer-groups"}
    wanted = [flag for word, flag in flags.items() if word in reason]
    return f"start all workers with the same {' and '.join(wanted) or 'model'}"


def _advice_on_link(worker: FleetWorker, link: FleetLink) -> str:
    if "differs" in link.error:
        return advice_on_mismatch(link.error)
    if "in common" in link.error:
        has = ", ".join(worker.transports) or "none"
        return f"{worker.name} has {has}: give both the same --transports, and GPUs or none; tcp always works"
    return f"run `crossdock doctor` on both hosts; {link.to} must be reachable by the name in its --host"
