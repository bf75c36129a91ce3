"""A push in pieces, each of which goes through a staging buffer on either side."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from ..core.messages import Peer, ProbeSent, Push
from ..core.part import TransferFailed
from .transport import BlockCopy, NotReachable

WAIT_SECONDS = 0.5

Pieces = deque[tuple[Push | ProbeSent, BlockCopy]]


@dataclass(frozen=True, slots=True)
class StagedAddress:
    """Of a transport that stages; ``staging_bytes`` is the most that one piece may bring to ``address``."""

    staging_bytes: int
    address: str

    def __str__(self) -> str:
        return f"{self.staging_bytes}@{self.address}"

    @classmethod
    def parse(cls, text: str, block_bytes: int) -> "StagedAddress":
        """Raises `NotReachable`."""
        staging_bytes, _, address = text.partition("@")
        if not (staging_bytes.isascii() and staging_bytes.isdecimal()):
            raise NotReachable("this is no address of staging buffers")
        if int(staging_bytes) < block_bytes:
            raise NotReachable("the peer's staging buffers are smaller than a block")
        return cls(int(staging_bytes), address)


def split_push(header: Push | ProbeSent, copy: BlockCopy, max_blocks: int) -> Pieces:
    """At most ``max_blocks`` blocks each; the digest of a probe speaks of all its blocks, so they stay together."""
    if isinstance(header, ProbeSent):
        return deque([(header, copy)])
    return deque((replace(header, blocks=piece.destinations), piece) for piece in copy.split(max_blocks))


@dataclass(slots=True, eq=False)
class PackingPieces:
    """`Copying`: done when all pieces are packed, so that their sources are free."""

    to: Peer
    pieces: Pieces
    progress: Callable[[], None]
    wakes = True

    @property
    def is_done(self) -> bool:
        return not self.pieces

    def wait(self) -> None:
        """The buffers may be with a peer that has stopped, of whose death this worker must hear."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.is_done:
            if time.monotonic() > end:
                self.pieces.clear()
                raise TransferFailed("there was no free buffer in time")
            self.progress()
