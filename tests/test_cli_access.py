"""`crossdock keys` and `crossdock usage`, and how flags become configuration."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from crossdock.cli import app
from crossdock.cli_flags import door, engine, traces, transfer, with_flags_of, worker_flags
from crossdock.core.config import DoorConfig, EngineConfig, TraceConfig, TransferConfig
from crossdock.router.access.key_file import read_keys
from crossdock.router.access.keys import KeyRing
from crossdock.router.access.usage import UsageLog
from crossdock.router.token_usage import TokenUsage


def run(*arguments: str | Path) -> list[str]:
    """Lines of a command that ends well."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def test_a_key_is_shown_once_and_listed_by_its_name_until_it_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    [key] = run("keys", "add", "alice", "--api-keys", path, "--requests-per-minute", "60", "--tenant", "team")
    run("keys", "add", "bob", "--api-keys", path, "--priority", "3", "--most-urgent", "-2")
    head, alice, bob = run("keys", "list", "--api-keys", path)
    assert head.split()[:4] == ["name", "id", "tenant", "priority"]
    assert alice.split()[:8] == ["alice", key.split("-")[2], "team", "0", "0", "60", "-", "-"]
    assert bob.split()[2:8] == ["bob", "3", "-2", "-", "-", "-"]
    assert key not in f"{head}{alice}{path.read_text()}"
    assert (found := KeyRing(read_keys(path)).find(key)) is not None
    assert found.name == "alice"
    assert "there is a key named 'bob' already" in refused("keys", "add", "bob", "--api-keys", path)
    assert run("keys", "revoke", "alice", "--api-keys", path) == []
    assert "there is no key named 'alice'" in refused("keys", "revoke", "alice", "--api-keys", path)
    assert KeyRing(read_keys(path)).find(key) is None


def test_usage_is_a_table_or_json(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    for day, key, num_output in ((3, "alice", 5), (4, "alice", 7), (4, "bob", 1000)):
        log = UsageLog(path, clock=datetime(2026, 5, day, tzinfo=UTC).timestamp)
        log.add(key, "toy", TokenUsage(10, 4, num_output))
        log.close()
    assert run("usage", "--usage-db", path) == [
        "key    requests  prompt tokens  cached tokens  output tokens",
        "alice         2             20              8             12",
        "bob           1             10              4           1000",
    ]
    rows = run("usage", "--usage-db", path, "--by", "day", "--by", "model", "--since", "2026-05-04", "--json")
    assert [json.loads(row) for row in rows] == [
        {
            "day": "2026-05-04",
            "model": "toy",
            "requests": 2,
            "prompt_tokens": 20,
            "cached_tokens": 8,
            "output_tokens": 1007,
        }
    ]
    assert "cannot read the usage database" in refused("usage", "--usage-db", tmp_path / "none.db")


def test_the_flags_of_a_group_stand_in_for_one_parameter_and_may_come_from_the_environment() -> None:
    seen: list[DoorConfig] = []
    small = typer.Typer(context_settings={"auto_envvar_prefix": "CROSSDOCK"})

    @small.callback()
    def main() -> None:
        """Makes the one command a named one."""

    @small.command()
    @with_flags_of(door, into="config")
    def serve(model: str, *, config: DoorConfig, port: Annotated[int, typer.Option()] = 1) -> None:
        assert (model, port) == ("demo", 2)
        seen.append(config)

    environment = {"CROSSDOCK_SERVE_PORT": "2", "CROSSDOCK_API_KEY": "letmein", "CROSSDOCK_SERVE_API_KEYS": "k.jsonl"}
    flags = ["--cors-origin", "https://a.example", "--cors-origin", "*", "--max-body-size", "1K"]
    result = CliRunner().invoke(small, ["serve", "demo", *flags], env=environment)
    assert result.exit_code == 0, result.output
    assert seen == [
        DoorConfig(
            api_keys=Path("k.jsonl"), api_key="letmein", cors_origins=("https://a.example", "*"), max_body_bytes=1024
        )
    ]


def test_what_workers_are_told_is_what_the_server_was_told() -> None:
    told = (
        EngineConfig(
            "cpu", "bfloat16", "dummy", block_size=32, kv_bytes=1 << 30, num_blocks=9, gpu_memory_utilization=0.5,
            max_model_len=77, max_num_seqs=3, chunk_tokens=99, num_layer_groups=5, prefix_cache=False, num_threads=7,
        ),
        TransferConfig(("tcp", "shm"), checksums=True),
        TraceConfig("http://localhost:4318/v1/traces", "spans.jsonl"),
    )  # fmt: skip
    seen = []
    small = typer.Typer()

    @small.command()
    @with_flags_of(engine, into="engine")
    @with_flags_of(transfer, into="transfer")
    @with_flags_of(traces, into="traces")
    def worker(*, engine: EngineConfig, transfer: TransferConfig, traces: TraceConfig) -> None:
        seen.append((engine, transfer, traces))

    for configs in (told, (EngineConfig(), TransferConfig(), TraceConfig())):
        result = CliRunner().invoke(small, worker_flags(*configs))
        assert result.exit_code == 0, result.output
        assert seen.pop() == configs


def test_flags_may_come_from_a_file_and_give_way_to_the_others(tmp_path: Path) -> None:
    path, usage_db = tmp_path / "crossdock.toml", tmp_path / "usage.db"
    log = UsageLog(usage_db, clock=lambda: 0.0)
    log.add("alice", "toy", TokenUsage(1, 0, 1))
    log.close()
    path.write_text(f'[usage]\nusage-db = "{usage_db}"\nby = ["day", "model"]\njson = true\n')
    [row] = run("--config", path, "usage")
    assert list(json.loads(row))[:2] == ["day", "model"]
    assert run("--config", path, "usage", "--by", "key")[0].startswith('{"key": "alice"')


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[usage]\nbye = 1", "usage has no flag --bye"),
        ("[serves]", "[serves] in"),
        ("[keys]", "[keys] in"),
        ("usage = 1", "[usage] in"),
        ("[usage", "cannot read"),
        ("[serve]\nport = 'x'", "Invalid value for '--port'"),
    ],
)
def test_a_file_with_what_no_command_has_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "crossdock.toml"
    path.write_text(text)
    assert reason in refused("--config", path, "serve", "demo")


def test_without_flags_the_door_is_as_the_configuration_says() -> None:
    assert door() == DoorConfig()


@pytest.mark.parametrize("flag", ["--tls-key", "--tls-client-ca"])
def test_flags_that_mean_nothing_alone_are_refused(flag: str) -> None:
    assert "need --tls-cert" in refused("router", "demo", flag, "some.pem")
