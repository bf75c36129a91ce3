"""What is decided at the door: keys, limits and deadlines of one configuration, and what is known of each key."""

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
from .visit import Clock, Deadline, Visit

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_SECONDS = 86_400.0

_log = logging.getLogger("crossdock.router")


class Access:
    """The constructor raises `KeyFileError` for a keys file that cannot be used."""

    def __init__(self, config: DoorConfig, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._changes = FileChanges(*([config.api_keys] if config.api_keys is not None else []))
        self._ring = _key_ring(config)

    def visit(self, method: str, path: str, headers: Mapping[str, str]) -> Visit:
        """A request with these headers (names in lower case) is here; raises `ApiError` for one that may not come in.

        Only requests that make work (``POST``) count towards the limits.
        """
        deadline = self._deadline(headers.get(TIMEOUT_HEADER))
        caller = ANYONE if self._ring is None or path in self._config.public_paths else _caller(self._ring, headers)
        account = self._account(caller) if method == "POST" else None
        return Visit(caller, account, deadline, self._record, self._clock)

    def _account(self, caller: Caller) -> Account | None:
        if caller is ANYONE:
            return None
        if caller.name not in self._accounts:
            self._accounts[caller.name] = Account(caller.limits, self._clock())
        return self._accounts[caller.name]

    def _deadline(self, asked: str | None) -> Deadline | None:
        """The sooner of the client's and the server's own."""
        limits = [self._config.request_timeout_seconds, None if asked is None else _timeout(asked)]
        seconds = min((limit for limit in limits if limit is not None), default=None)
        return None if seconds is None else Deadline(self._clock() + seconds, seconds)

    def _record(self, caller: Caller, used: TokenUsage) -> None:
        pass

    def reload(self) -> None:
        """Look at the keys file, and use it if it has changed; one that is broken changes nothing."""
        if not self._changes.are_there():
            return
        try:
            self._ring = _key_ring(self._config)
        except KeyFileError as error:
            _log.error("the keys stay as they were: %s", error)
            return
        self._follow(self._ring.callers if self._ring is not None else [])

    def _follow(self, callers: list[Caller]) -> None:
        """Accounts get the new limits and keep what was used; those of revoked keys go."""
        _log.info("read %d API keys", len(callers))
        known = {caller.name: caller for caller in callers}
        self._accounts = {name: account for name, account in self._accounts.items() if name in known}
        for name, account in self._accounts.items():
            account.change(known[name].limits, self._clock())


def _key_ring(config: DoorConfig) -> KeyRing | None:
    """``None`` where nobody needs a key."""
    if config.api_keys is None and config.api_key is None:
        return None
    only = [record_of(ONLY_KEY_NAME, config.api_key)] if config.api_key is not None else []
    return KeyRing([*only, *(read_keys(config.api_keys) if config.api_keys is not None else [])])


def _caller(ring: KeyRing, headers: Mapping[str, str]) -> Caller:
    """Raises `ApiError` 401."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    key = key.strip()
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
