"""Who asks, as everything behind the door sees it."""

from dataclasses import dataclass
from hashlib import blake2b

from ...core.block_hash import encode_fields
from ...core.request import MOST_URGENT
from ..openai_errors import ApiError

SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may do at all its clients together; ``None`` is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output."""
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """``priority`` holds where the request says nothing; no request goes before ``most_urgent``.

    Requests of one ``tenant`` share prefixes in the KV cache, those of different tenants never do.
    """

    name: str
    tenant: str | None = None
    priority: int = 0
    most_urgent: int = MOST_URGENT
    limits: KeyLimits = KeyLimits()

    def priority_of(self, asked: int | None) -> int:
        """Raises `ApiError` for more urgency than this caller may ask for."""
        if asked is None:
            return self.priority
        if asked < self.most_urgent:
            raise ApiError.invalid(
                "priority",
                f"Invalid 'priority': {asked} goes before {self.most_urgent}, the first that this key may ask.",
            )
        return asked

    def salt(self, cache_salt: str | None) -> bytes:
        """What separates this request in the prefix cache; ``cache_salt`` separates further, within the tenant."""
        if self.tenant is None and cache_salt is None:
            return b""
        tenant = encode_fields("tenant", self.tenant) if self.tenant is not None else b""
        asked = encode_fields("cache_salt", cache_salt) if cache_salt is not None else b""
        return blake2b(encode_fields(tenant, asked), digest_size=SALT_BYTES).digest()


ANYONE = Caller("anonymous")
"""Whoever comes in without a key."""
