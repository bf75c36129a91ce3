"""API keys: ``sk-xd-<id>-<secret>``. Only the id and a salted hash of the whole are kept anywhere.

The id finds the record, so that one hash is computed however many keys there are; the secret has 256 random bits, so
that a fast hash (BLAKE2b) is enough: there is nothing to guess.
"""

import secrets
from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest
from typing import Annotated

import msgspec

from ...core.request import LEAST_URGENT, MOST_URGENT
from .caller import Caller, KeyLimits

PREFIX = "sk-xd"
MAX_NAME_CHARS = 64
DIGEST_BYTES = 32
ONLY_KEY_NAME = "default"
"""The name of the key that is given without a file."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*\Z", max_length=MAX_NAME_CHARS)]
Salt = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * blake2b.SALT_SIZE}}}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * DIGEST_BYTES}}}\Z")]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Priority = Annotated[int, msgspec.Meta(ge=MOST_URGENT, le=LEAST_URGENT)]


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of the keys file. ``tenant`` is the name where none is given; without ``most_urgent`` no request may go
    before the key's own ``priority``."""

    name: Name
    id: str
    salt: Salt
    digest: Digest
    created: str = ""
    tenant: Name | None = None
    priority: Priority = 0
    most_urgent: Priority | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_concurrent: Positive | None = None

    @property
    def caller(self) -> Caller:
        return Caller(
            name=self.name,
            tenant=self.tenant or self.name,
            priority=self.priority,
            most_urgent=self.priority if self.most_urgent is None else self.most_urgent,
            limits=KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent),
        )

    def sealed(self, key: str) -> "KeyRecord":
        """The same for another ``key``."""
        salt = secrets.token_bytes(blake2b.SALT_SIZE)
        return msgspec.structs.replace(self, id=_id_of(key), salt=salt.hex(), digest=_digest(key, salt).hex())


def new_key() -> str:
    return f"{PREFIX}-{secrets.token_hex(6)}-{secrets.token_urlsafe(32)}"


def record_of(name: str, key: str) -> KeyRecord:
    """A record without limits; its caller is its own tenant."""
    return KeyRecord(name=name, id="", salt="", digest="").sealed(key)


class KeyRing:
    """Finds the caller of a key."""

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        self._locks = {record.id: _Lock(record) for record in records}
        self._decoy = _Lock(record_of("decoy", new_key()))
        """Unknown ids take as long as known ones."""

    @property
    def callers(self) -> list[Caller]:
        return [lock.caller for lock in self._locks.values()]

    def find(self, key: str) -> Caller | None:
        lock = self._locks.get(_id_of(key), self._decoy)
        return lock.caller if lock.opens_with(key) and lock is not self._decoy else None


class _Lock:
    def __init__(self, record: KeyRecord) -> None:
        self.caller = record.caller
        self._salt = bytes.fromhex(record.salt)
        self._digest = bytes.fromhex(record.digest)

    def opens_with(self, key: str) -> bool:
        return compare_digest(self._digest, _digest(key, self._salt))


def _id_of(key: str) -> str:
    """Empty for a key of somebody else's making, of which there can be one."""
    parts = key.removeprefix(PREFIX + "-").split("-", 1)
    return parts[0] if key.startswith(PREFIX + "-") and len(parts) == 2 else ""


def _digest(key: str, salt: bytes) -> bytes:
    told = key.encode("utf-8", "replace")
    return blake2b(told, digest_size=DIGEST_BYTES, salt=salt, person=b"crossdock key").digest()
