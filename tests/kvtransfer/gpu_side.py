"""One side of a transfer between pools of GPUs, in this process or in one of its own that does as it is told.

A process is told in lines of JSON, and answers each with one: what went wrong, or nothing. Without a GPU the driver is
the stand-in of `host_driver`, and the kernels run in Triton's interpreter.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from crossdock.core.kv_layout import KvLayout, LayerGroup
from crossdock.core.messages import Incarnation, LeaseId, Peer, Push, TransportCard
from crossdock.core.part import TransferFailed
from crossdock.core.request import TransferId
from crossdock.kvtransfer.transport import BlockCopy, NotReachable, Transport

from ..model.gpu import HAS_GPU, gpu_stream
from . import host_driver

from crossdock.kernels.kv_copy import LINK  # isort: skip  (triton: not before `gpu` has set it up)
from crossdock.kvtransfer.cuda_ipc import CudaIpcTransport  # isort: skip
from crossdock.kvtransfer.device_pool import DevicePool  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = (
    KvLayout(num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    if HAS_GPU
    else KvLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
)
NUM_BLOCKS = 256 if HAS_GPU else 12
NUM_GROUPS = 3
KEY = b"key"
T = TransferId("t")


class Order(msgspec.Struct, kw_only=True):
    """``verb`` is open, push, flood (push for ever) or forget; ``to`` names the peer."""

    verb: str
    to: str
    card: TransportCard | None = None
    num_blocks: int = NUM_BLOCKS
    group: int = 0
    sources: list[int] = []
    destinations: list[int] = []


def random_bytes(seed: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
    """``[num_blocks, num_layers, layer_bytes]``"""
    shape = (num_blocks, LAYOUT.num_layers, LAYOUT.layer_bytes)
    return np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape))), np.uint8).reshape(shape)


def peer(name: str) -> Peer:
    return Peer(f"control of {name}", Incarnation(name))


def push_header(group: int, blocks: list[int], transport: str) -> Push:
    return Push(transfer_id=T, lease_id=LeaseId(4), generation=2, group=group, blocks=blocks, transport=transport)


class Side:
    """A pool of random bytes on the first GPU, or on the last if it is to be the ``far`` one, and its transport."""

    def __init__(
        self, name: str, transport: str, seed: int, is_far: bool = False, num_blocks: int = NUM_BLOCKS
    ) -> None:
        self.me = peer(name)
        stream = gpu_stream(torch.cuda.device_count() - 1 if is_far else 0)
        num_bytes = num_blocks * LAYOUT.block_bytes
        if HAS_GPU:
            torch.cuda.set_device(stream.device)
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=stream.device)
        else:
            memory = host_driver.allocate(num_bytes)
        self.pool = DevicePool(memory.view(num_blocks, -1), LAYOUT, NUM_GROUPS, stream, staging_bytes=1 << 20)
        self.fill(random_bytes(seed, num_blocks))
        self.transport = self._transport(transport)

    def _transport(self, name: str) -> Transport:
        if name.startswith("cuda_ipc"):
            transport = CudaIpcTransport(self.pool)
            transport.shape = LINK if name.endswith("kernel") else transport.shape
            return transport
        from crossdock.kvtransfer.ucx import UcxTransport

        return UcxTransport(self.pool, self.me, KEY, patience_seconds=30.0)

    def fill(self, content: np.ndarray) -> None:
        self.pool.write(range(len(content)), self.pool.all_layers, content.tobytes())

    @property
    def content(self) -> np.ndarray:
        blocks = range(self.pool.num_blocks)
        read = self.pool.read(blocks, self.pool.all_layers)
        return np.frombuffer(read, np.uint8).reshape(len(blocks), LAYOUT.num_layers, LAYOUT.layer_bytes)

    def group(self, number: int) -> LayerGroup:
        return self.pool.groups[number]

    def obey(self, order: Order) -> None:
        """Raises `NotReachable`, `TransferFailed`."""
        to = peer(order.to)
        match order.verb:
            case "open":
                assert order.card is not None, "a peer is opened by its card"
                self.transport.open(to, order.card, order.num_blocks)
            case "forget":
                self.transport.forget(to)
            case "push" | "flood":
                self._push(to, order)
            case _:
                raise ValueError(f"what is {order.verb}?")

    def _push(self, to: Peer, order: Order) -> None:
        copy = BlockCopy(order.sources, order.destinations, self.group(order.group))
        while True:
            header = push_header(order.group, order.destinations, self.transport.card.name)
            copying = self.transport.push(to, header, copy)
            while copying is not None and not copying.is_done:
                self.progress()
            if order.verb == "push":
                return
            answer("another one")

    def progress(self) -> None:
        if self.transport.inbox is not None:
            assert self.transport.inbox.receive() is None, "nobody sends anything here"
        time.sleep(0.0005)


class SideProcess:
    """A `Side` in a process of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.card = msgspec.json.decode(self.line(), type=TransportCard)

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def say(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()

    def do(self, order: Order) -> str:
        """The answer: what went wrong, or nothing."""
        self.say(order)
        return msgspec.json.decode(self.line(), type=str)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def side_process(name: str, transport: str, seed: int) -> Iterator[SideProcess]:
    program = f"import sys; sys.path.append({str(ROOT)!r}); from tests.kvtransfer.gpu_side import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", program, name, transport, str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield SideProcess(process)
        finally:
            process.kill()


def main() -> None:
    """Tell the card, then do as told until the orders end."""
    name, transport, seed = sys.argv[1:]
    if not HAS_GPU:
        host_driver.stand_in()
    side = Side(name, transport, int(seed))
    answer(side.transport.card)
    for order in orders(side):
        try:
            side.obey(order)
        except (NotReachable, TransferFailed) as error:
            answer(str(error))
        else:
            answer("")


def orders(side: Side) -> Iterator[Order]:
    """What comes on standard input; what UCX has under way goes on meanwhile."""
    while True:
        while not select.select([sys.stdin], [], [], 0.0)[0]:
            side.progress()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        yield msgspec.json.decode(line, type=Order)


def answer(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
