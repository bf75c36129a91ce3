"""What is decided at the door: keys, limits and deadlines of one configuration, and what is known of each key."""

import asyncio
import logging
import time
from collections.abc import Mapping

from ...core.config import DoorConfig
from ..openai_errors import ApiError
from ..token_usage import TokenUsage
from .account import Account
from .caller import ANYONE, Caller
from .key_file import FileChanges, KeyFileError, read_keys
from .keys import ONLY_KEY_NAME, KeyRing, record_of
from .tls import Certificate
from .usage import UsageLog
from .visit import Clock, Deadline, Visit

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_SECONDS = 86_400.0
LOOK_SECONDS = 1.0

_log = logging.getLogger("crossdock.router")


class Access:
    """The constructor raises ``ValueError`` for files that cannot be used (keys, certificate, usage database)."""

    def __init__(self, config: DoorConfig, model_name: str, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._model_name = model_name
        self._clock = clock
        self.certificate = (
            Certificate(config.tls_cert, config.tls_key, config.tls_client_ca) if config.tls_cert is not None else None
        )
        self._accounts: dict[str, Account] = {}
        self._changes = FileChanges(*([config.api_keys] if config.api_keys is not None else []))
        self._ring = _key_ring(config)
        self._usage = UsageLog(config.usage_db) if config.usage_db is not None else None

    def visit(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Visit:
        """A request with these headers (names in lower case) is here; raises `ApiError` for one that may not come in.

        Only requests that make work (``POST``) count towards the limits.
        """
        deadline = self._deadline(headers.get(TIMEOUT_HEADER.encode()))
        caller = ANYONE if self._ring is None or path in self._config.public_paths else _caller(self._ring, headers)
        account = self._account(caller) if method == "POST" else None
        return Visit(caller, account, deadline, self._record, self._clock)

    def _account(self, caller: Caller) -> Account | None:
        if caller is ANYONE:
            return None
        if caller.name not in self._accounts:
            self._accounts[caller.name] = Account(caller.limits, self._clock())
        return self._accounts[caller.name]

    def _deadline(self, asked: bytes | None) -> Deadline | None:
        """The sooner of the client's and the server's own."""
        limits = [self._config.request_timeout_seconds, None if asked is None else _timeout(asked.decode("latin-1"))]
        seconds = min((limit for limit in limits if limit is not None), default=None)
        return None if seconds is None else Deadline(self._clock() + seconds, seconds)

    def _record(self, caller: Caller, used: TokenUsage) -> None:
        if self._usage is not None:
            self._usage.add(caller.name, self._model_name, used)

    async def run(self) -> None:
        """Follow the files until cancelled; what is broken in them changes nothing."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.reload()

    async def reload(self) -> None:
        """Look at the files once; requests go on meanwhile."""
        if (ring := await asyncio.to_thread(self._changed_ring)) is not None:
            self._follow(ring)
        if self.certificate is not None and await asyncio.to_thread(self.certificate.is_renewed):
            self.certificate.renew()

    def close(self) -> None:
        """Write down what has been used."""
        if self._usage is not None:
            self._usage.close()

    def _changed_ring(self) -> KeyRing | None:
        if not self._changes.are_there():
            return None
        try:
            return _key_ring(self._config)
        except KeyFileError as error:
            _log.error("the API keys stay as they were: %s", error)
            return None

    def _follow(self, ring: KeyRing) -> None:
        """Accounts get the new limits and keep what was used; those of revoked keys go."""
        self._ring, callers = ring, ring.callers
        _log.info("read %d API keys", len(callers))
        known = {caller.name: caller for caller in callers}
        self._accounts = {name: account for name, account in self._accounts.items() if name in known}
        for name, account in self._accounts.items():
            account.change(known[name].limits, self._clock())


def _key_ring(config: DoorConfig) -> KeyRing | None:
    """``None`` where nobody needs a key."""
    if config.api_keys is None and config.api_key is None:
        return None
    records = read_keys(config.api_keys) if config.api_keys is not None else []
    if config.api_key is None:
        return KeyRing(records)
    if any(record.name == ONLY_KEY_NAME for record in records):
        raise KeyFileError(f"the keys file names a key {ONLY_KEY_NAME!r}, as the one beside it is named")
    return KeyRing([*records, record_of(ONLY_KEY_NAME, config.api_key)])


def _caller(ring: KeyRing, headers: Mapping[bytes, bytes]) -> Caller:
    """Raises `ApiError` 401."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = headers.get(b"x-api-key", b"")
    key = given.decode("latin-1").strip()
    if not key:
        raise ApiError.unauthorized("No API key was given: send the header 'Authorization: Bearer YOUR_KEY'.")
    caller = ring.find(key)
    if caller is None:
        raise ApiError.unauthorized("Incorrect API key provided.")
    return caller


def _timeout(asked: str) -> float:
    """Raises `ApiError`."""
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:  # also false for nan
        raise ApiError.invalid(
            TIMEOUT_HEADER,
            f"Invalid '{TIMEOUT_HEADER}': {asked[:40]!r} is no number of seconds up to {MAX_TIMEOUT_SECONDS:.0f}.",
        )
    return seconds
