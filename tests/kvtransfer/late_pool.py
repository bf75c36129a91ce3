"""Stands in for a pool on a slow device: a copy runs when a test lets it, or when somebody waits for it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossdock.core.kv_layout import LayerGroup
from crossdock.core.messages import Push
from crossdock.core.part import Payload
from crossdock.kvtransfer.pool_bytes import Mark, PoolBytes


@dataclass(frozen=True, slots=True)
class LateMark:
    pool: "LatePool"
    count: int

    @property
    def is_passed(self) -> bool:
        return self.pool.num_run >= self.count

    def synchronize(self) -> None:
        self.pool.run(self.count - self.pool.num_run)

    def delay(self, stream: object) -> None:
        self.synchronize()


class LatePool(PoolBytes):
    num_run = 0
    is_late = True
    """Otherwise it is like any pool of the host."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._launched: deque[Callable[[], object]] = deque()
        self.beside_link: list[bool] = []
        """Of each `pack` and `land`: whether other pieces travelled meanwhile."""

    @property
    def num_launched(self) -> int:
        """That have not run."""
        return len(self._launched)

    def run(self, count: int) -> None:
        """The next copies, in the order of their launch."""
        for _ in range(count):
            self._launched.popleft()()
            self.num_run += 1

    def _launch(self, copy: Callable[[], object]) -> None:
        self._launched.append(copy)
        self.beside_link.append(self.is_beside_link)
        if not self.is_late:
            self.run(len(self._launched))

    def mark(self) -> Mark:
        return LateMark(self, self.num_run + len(self._launched))

    def pack(self, blocks: Sequence[int], layers: LayerGroup, staging: Payload) -> None:
        pack = super().pack
        self._launch(lambda: pack(blocks, layers, staging))

    def land(self, header: Push, payload: Payload) -> Mark:
        write = super().write
        self._launch(lambda: write(header.blocks, self.layers_of(header), payload))
        return self.mark()
