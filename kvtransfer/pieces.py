"""A push in pieces, each of which goes through a staging buffer on either side."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from ..core.messages import Peer, ProbeSent, Push
from ..core.part import TransferFailed
from .pool_bytes import PASSED, Mark
from .transport import BlockCopy, NotReachable

WAIT_SECONDS = 0.5

RAMP_BYTES = 128 << 20
"""Of the smallest piece that is made of a larger push: over NVLink it takes as long as the launch of the next one."""


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


@dataclass(slots=True, eq=False)
class PackingPieces:
    """`Copying`: done when all pieces have been packed, so that their sources are free.

    A piece has ``max_blocks`` at most, a span ``span_bytes``; the digest of a probe speaks of all its blocks, so they
    stay together. ``is_end``: it brings the last layers of its blocks. ``packed`` is behind the copy of the last piece
    that was taken.
    """

    to: Peer
    header: Push | ProbeSent
    copy: BlockCopy
    max_blocks: int
    span_bytes: int
    is_end: bool
    progress: Callable[[], None]
    num_taken: int = 0
    packed: Mark = PASSED

    @property
    def num_left(self) -> int:
        """Blocks that no piece has taken."""
        return len(self.copy.sources) - self.num_taken

    def take(self, bytes_on_their_way: int, others_wait: bool) -> tuple[Push | ProbeSent, BlockCopy]:
        """The next piece, and what is said of it; ``others_wait``: they are pushed behind this one."""
        if isinstance(self.header, ProbeSent):
            self.drop()
            return self.header, self.copy
        is_last = self.is_end and not others_wait
        num_bytes = next_bytes(bytes_on_their_way, self.num_left * self.span_bytes, is_last)
        num_blocks = min(max(1, num_bytes // self.span_bytes), self.max_blocks)
        piece = slice(self.num_taken, self.num_taken + num_blocks)
        copy = BlockCopy(self.copy.sources[piece], self.copy.destinations[piece], self.copy.layers)
        self.num_taken += len(copy.sources)
        return replace(self.header, blocks=copy.destinations), copy

    def drop(self) -> None:
        """Nobody takes what is left."""
        self.num_taken = len(self.copy.sources)

    @property
    def is_done(self) -> bool:
        return not self.num_left and self.packed.is_passed

    @property
    def wakes(self) -> bool:
        """A buffer that becomes free does, the end of a copy into one does not."""
        return self.packed.is_passed

    def wait(self) -> None:
        """The buffers may be with a peer that has stopped, of whose death this worker must hear."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.is_done:
            if time.monotonic() > end:
                self.drop()
                raise TransferFailed("there was no free buffer in time")
            self.progress()


def next_bytes(bytes_on_their_way: int, bytes_left: int, is_last: bool) -> int:
    """How large the next piece should be, so that the link neither waits for the first to be packed nor the receiver
    for the last to be brought to its blocks: as large as what is on its way, and half of what is left at the end of a
    transfer; a push before it is followed by others, for whose blocks nobody waits yet.

    A copy beside the link is twice as fast as the link, so what is twice as large is packed in time.
    """
    most = bytes_left // 2 if is_last else bytes_left
    return max(RAMP_BYTES, min(bytes_on_their_way, most))
