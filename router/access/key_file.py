"""The file of API keys: a JSON object a line, each a `KeyRecord`. Whoever reads it never sees half a change."""

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from .keys import KeyRecord

OWNER_ONLY = 0o600


class KeyFileError(ValueError):
    """What is wrong with a keys file, or with a change to it."""


def read_keys(path: Path) -> list[KeyRecord]:
    """Raises `KeyFileError` for a file that is not there or not whole."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise KeyFileError(f"cannot read the keys file {path}: {error.strerror}") from None
    records = [_record(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for field in ("name", "id"):
        counted = Counter(getattr(record, field) for record in records)
        if twice := sorted(value for value, num in counted.items() if num > 1):
            raise KeyFileError(f"the keys file {path} has two keys with the {field} {twice[0]!r}")
    return records


def _record(path: Path, number: int, line: bytes) -> KeyRecord:
    try:
        return msgspec.json.decode(line, type=KeyRecord)
    except (msgspec.DecodeError, ValueError) as error:
        raise KeyFileError(f"line {number} of the keys file {path} is no key: {error}") from None


def add_key(path: Path, record: KeyRecord) -> None:
    """Make the file if there is none; raises `KeyFileError` if the name is taken or no record may be like this."""
    try:
        msgspec.convert(msgspec.structs.asdict(record), KeyRecord)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"no key can be made: {error}") from None
    with _changing(path) as records:
        if any(known.name == record.name for known in records):
            raise KeyFileError(f"there is a key named {record.name!r} already")
        records.append(record)


def revoke_key(path: Path, name: str) -> None:
    """Raises `KeyFileError` if no key has this name."""
    with _changing(path) as records:
        kept = [record for record in records if record.name != name]
        if len(kept) == len(records):
            raise KeyFileError(f"there is no key named {name!r} in {path}")
        records[:] = kept


@contextmanager
def _changing(path: Path) -> Iterator[list[KeyRecord]]:
    """The records, written back at the end as they are then; one process at a time."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        records = read_keys(path) if path.exists() else []
        yield records
        _replace(path, records)
    finally:
        os.close(folder)


def _replace(path: Path, records: Sequence[KeyRecord]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY), "wb") as file:
        file.writelines(msgspec.json.encode(record) + b"\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


class FileChanges:
    """Tells whether files are others than at the last look."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    def are_there(self) -> bool:
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def _look(self) -> "list[tuple[int, int] | None]":
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # between two versions, or gone: whoever reads it says so
    return found.st_mtime_ns, found.st_ino
