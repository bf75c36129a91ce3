"""API keys and the file that knows them."""

import threading
from pathlib import Path

import pytest

from crossdock.core.config import DoorConfig
from crossdock.router.access.access import Access
from crossdock.router.access.caller import Caller, KeyLimits
from crossdock.router.access.key_file import FileChanges, KeyFileError, add_key, read_keys, revoke_key
from crossdock.router.access.keys import KeyRecord, KeyRing, new_key, record_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def test_a_key_finds_its_caller_and_no_other_text_does() -> None:
    alice, bob = new_key(), new_key()
    ring = KeyRing([record_of("alice", alice), record_of("bob", bob)])
    assert [found and found.name for found in map(ring.find, (alice, bob))] == ["alice", "bob"]
    id_of_alice = alice.rsplit("-", 1)[0] if alice.count("-") == 3 else alice[: alice.index("-", 6)]
    for wrong in (alice + "x", alice[:-1], bob[:18] + alice[18:], id_of_alice, new_key(), "", "sk-xd-", "é", "\udcff"):
        assert ring.find(wrong) is None


def test_a_key_of_somebody_else_s_making_works_too() -> None:
    ring = KeyRing([record_of("default", "hunter2"), record_of("alice", alice := new_key())])
    assert ring.find("hunter2") == Caller("default", tenant="default", most_urgent=0)
    assert ring.find("hunter3") is None
    assert ring.find(alice) == Caller("alice", tenant="alice", most_urgent=0)


def test_keys_are_long_and_never_alike() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {len("sk-xd-") + 12 + 1 + 43}


def test_the_file_holds_no_key_and_only_its_owner_may_read_it(path: Path) -> None:
    key = new_key()
    add_key(path, record_of("alice", key))
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.split("-", 3)[3] not in text
    assert record_of("alice", key).digest != record_of("alice", key).digest
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_record_says_what_its_key_may_do(path: Path) -> None:
    record = KeyRecord(
        name="alice", id="", salt="", digest="", tenant="team", priority=5, requests_per_minute=3, tokens_per_minute=9
    )
    add_key(path, record.sealed(key := new_key()))
    caller = KeyRing(read_keys(path)).find(key)
    assert caller == Caller("alice", "team", priority=5, most_urgent=5, limits=KeyLimits(3, 9, None))


def test_a_name_that_would_break_a_list_is_refused(path: Path) -> None:
    for name in ("", "a b", "a\n", "x" * 65, "-x"):
        with pytest.raises(KeyFileError, match="no key can be made"):
            add_key(path, record_of(name, new_key()))
    assert not path.exists()


def test_names_are_taken_once_and_a_revoked_one_is_free_again(path: Path) -> None:
    add_key(path, record_of("alice", new_key()))
    with pytest.raises(KeyFileError, match="there is a key named 'alice' already"):
        add_key(path, record_of("alice", new_key()))
    revoke_key(path, "alice")
    with pytest.raises(KeyFileError, match="there is no key named 'alice'"):
        revoke_key(path, "alice")
    add_key(path, record_of("alice", new_key()))
    assert [record.name for record in read_keys(path)] == ["alice"]


def test_keys_added_at_the_same_time_are_all_there(path: Path) -> None:
    adding = [threading.Thread(target=add_key, args=(path, record_of(f"n{n}", new_key()))) for n in range(20)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert {record.name for record in read_keys(path)} == {f"n{n}" for n in range(20)}


SEAL = f'"salt":"{"ab" * 16}","digest":"{"cd" * 32}"'


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        f'{{"name":"a b","id":"",{SEAL}}}',
        f'{{"name":"a\\n","id":"",{SEAL}}}',
        f'{{"name":"a","id":"",{SEAL},"requests_per_minute":0}}',
        f'{{"name":"a","id":"",{SEAL},"requests_per_minutes":1}}',
        f'{{"name":"a","id":"","salt":"{"xy" * 16}","digest":"{"cd" * 32}"}}',
        f'{{"name":"a","id":"","salt":"abc","digest":"{"cd" * 32}"}}',
        f'{{"name":"a","id":"","salt":"{"ab" * 17}","digest":"{"cd" * 32}"}}',
        "\xff",
    ],
)
def test_a_line_that_is_no_key_is_told_by_its_number(path: Path, line: str) -> None:
    add_key(path, record_of("alice", new_key()))
    path.write_bytes(path.read_bytes() + line.encode("latin-1"))
    with pytest.raises(KeyFileError, match=r"line 2 of the keys file .* is no key"):
        read_keys(path)


def test_two_lines_with_one_name_or_no_file_at_all_are_no_keys(path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot read the keys file"):
        read_keys(path)
    add_key(path, record_of("alice", new_key()))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(KeyFileError, match="two keys with the name 'alice'"):
        read_keys(path)


def test_a_key_of_the_file_may_not_pass_for_the_one_beside_it(path: Path) -> None:
    add_key(path, record_of("default", new_key()))
    Access(DoorConfig(api_keys=path), "toy")
    with pytest.raises(KeyFileError, match="the keys file names a key 'default'"):
        Access(DoorConfig(api_keys=path, api_key="letmein"), "toy")


def test_a_changed_file_is_noticed_once(path: Path) -> None:
    changes = FileChanges(path)
    assert not changes.are_there()
    add_key(path, record_of("alice", new_key()))
    assert changes.are_there()
    assert not changes.are_there()
    path.unlink()
    assert changes.are_there()
