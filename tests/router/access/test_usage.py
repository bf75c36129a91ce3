"""What keys have used, on disk: exact, shared, and there after a kill."""

import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from crossdock.router.access.usage import UsageError, UsageLog
from crossdock.router.access.usage_report import Column, UsageRow, read_usage
from crossdock.router.token_usage import TokenUsage

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC).timestamp()
DAY = 86_400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


def test_what_was_told_is_added_up_by_day_key_and_model(path: Path) -> None:
    now = NOON
    log = UsageLog(path, clock=lambda: now)
    log.add("alice", "toy", TokenUsage(10, 4, 5))
    log.add("alice", "toy", TokenUsage(1, 0, 0))
    log.add("bob", "toy", TokenUsage(7, 7, 7))
    now = NOON + DAY
    log.add("alice", "other", TokenUsage(100, 0, 100))
    log.close()
    assert read_usage(path, [Column.KEY]) == [
        UsageRow(("alice",), 3, 111, 4, 105),
        UsageRow(("bob",), 1, 7, 7, 7),
    ]
    assert read_usage(path, [Column.DAY, Column.MODEL]) == [
        UsageRow(("2026-05-04", "toy"), 3, 18, 11, 12),
        UsageRow(("2026-05-05", "other"), 1, 100, 0, 100),
    ]
    assert read_usage(path, [Column.MODEL, Column.MODEL], since=date(2026, 5, 5)) == [
        UsageRow(("other",), 1, 100, 0, 100)
    ]


def test_two_servers_and_a_reader_share_one_file(path: Path) -> None:
    logs = [UsageLog(path, clock=lambda: NOON) for _ in range(2)]

    def tell(log: UsageLog) -> None:
        for _ in range(200):
            log.add("alice", "toy", TokenUsage(3, 1, 2))
            time.sleep(0.001)

    telling = [threading.Thread(target=tell, args=(log,)) for log in logs for _ in range(2)]
    for thread in telling:
        thread.start()
    while any(thread.is_alive() for thread in telling):
        read_usage(path, [Column.KEY])
    for log in logs:
        log.close()
    assert read_usage(path, [Column.KEY]) == [UsageRow(("alice",), 800, 2400, 800, 1600)]


def test_a_disk_that_fails_for_a_while_loses_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = UsageLog(path, clock=lambda: NOON)
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE usage RENAME TO away")
    log.add("alice", "toy", TokenUsage(1, 1, 1))
    while "usage cannot be written" not in caplog.text:
        time.sleep(0.02)
    log.add("alice", "toy", TokenUsage(1, 1, 1))
    connection.execute("ALTER TABLE away RENAME TO usage")
    connection.close()
    log.close()
    assert read_usage(path, [Column.KEY]) == [UsageRow(("alice",), 2, 2, 2, 2)]
    assert caplog.text.count("usage cannot be written") == 1


SCRIPT = """
import sys, time
from pathlib import Path
from crossdock.router.access.usage import UsageLog
from crossdock.router.token_usage import TokenUsage
log = UsageLog(Path(sys.argv[1]))
for _ in range(1000):
    log.add("alice", "toy", TokenUsage(2, 1, 3))
time.sleep(1)
print("now", flush=True)
time.sleep(60)
"""


def test_after_a_kill_at_most_the_last_second_is_missing(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.kill()
    process.communicate()
    assert read_usage(path, [Column.KEY]) == [UsageRow(("alice",), 1000, 2000, 1000, 3000)]


def test_a_file_that_is_no_usage_database_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="unable to open database file"):
        read_usage(path, [Column.KEY])
    path.write_text("something else, of some length" * 100)
    with pytest.raises(UsageError, match="file is not a database"):
        UsageLog(path)
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(UsageError, match="is of version 7, not 1"):
        UsageLog(path)
    with pytest.raises(UsageError, match="cannot use"):
        UsageLog(path.parent / "nowhere" / "usage.db")
