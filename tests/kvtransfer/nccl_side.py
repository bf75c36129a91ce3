"""One side of channels, in this process or in one of its own: on a GPU each where there are two, else with the stub.

A process is ``send ADDRESS`` (push random blocks to the same blocks there, for ever) or ``receive``; it first tells the
address of its own transport.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import Incarnation, LeaseId, Peer, Push, TransportCard
from crossdock.core.request import TransferId
from crossdock.kvtransfer.nccl import NcclTransport
from crossdock.kvtransfer.nccl_library import NcclLibrary
from crossdock.kvtransfer.pool_bytes import PoolBytes, PoolMemory
from crossdock.kvtransfer.transport import BlockCopy, LinkDown

from .stub_network import stub_network, stub_path


def has_two_gpus() -> bool:
    if not Path("/dev/nvidiactl").exists():
        return False
    import torch

    return torch.cuda.device_count() > 1


ROOT = Path(__file__).resolve().parents[2]
HAS_PAIR = has_two_gpus()
LAYOUT = (
    KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    if HAS_PAIR
    else KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
)
NUM_BLOCKS = 256 if HAS_PAIR else 64
STAGING_BYTES = 16 * LAYOUT.block_bytes
PATIENCE_SECONDS = 2.0 if HAS_PAIR else 1.0
SEED = 3


def content() -> np.ndarray:
    """``[NUM_BLOCKS, block_bytes]``, the same in all processes."""
    num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
    return np.frombuffer(np.random.default_rng(SEED).bytes(num_bytes), np.uint8).reshape(NUM_BLOCKS, -1)


def nothing() -> None: ...


class Side:
    """The sender's pool is full of `content`, on the first GPU; the receiver's is empty, on the last."""

    def __init__(self, is_sender: bool) -> None:
        self.me = Peer("control", Incarnation(f"{'p' if is_sender else 'd'}{os.getpid()}"))
        mailbox = Mailbox("127.0.0.1", 0, self.me.incarnation)
        self.transport: NcclTransport
        self.pool = self._gpu_pool(is_sender, mailbox) if HAS_PAIR else self._host_pool(mailbox)
        if is_sender:
            self.pool.write(range(NUM_BLOCKS), self.pool.all_layers, content().tobytes())
        self.num_landed = 0
        self.landed: set[int] = set()

    def _host_pool(self, mailbox: Mailbox) -> PoolMemory:
        memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
        pool = PoolBytes(memory, NUM_BLOCKS, LAYOUT, 1, STAGING_BYTES)
        network = stub_network(stub_path())
        self.transport = NcclTransport(pool, network, mailbox, b"key", PATIENCE_SECONDS, nothing)
        return pool

    def _gpu_pool(self, is_sender: bool, mailbox: Mailbox) -> PoolMemory:
        import torch

        from crossdock.kvtransfer.device_pool import DevicePool
        from crossdock.kvtransfer.nccl_gpu import PATIENCE_LEASES, nccl_over
        from crossdock.model.device_stream import CudaStream

        device = torch.device("cuda", 0 if is_sender else torch.cuda.device_count() - 1)
        torch.cuda.set_device(device)
        tensor = torch.zeros(NUM_BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        pool = DevicePool(tensor, LAYOUT, 1, CudaStream(device), STAGING_BYTES)
        lease_seconds = PATIENCE_SECONDS / PATIENCE_LEASES
        self.transport = nccl_over(NcclLibrary(), pool, mailbox, b"key", lease_seconds, nothing)
        return pool

    def push(self, to: Peer, blocks: list[int]) -> None:
        """Raises `LinkDown`."""
        header = Push(
            transfer_id=TransferId("t"), lease_id=LeaseId(0), generation=0, group=0, blocks=blocks, transport="nccl"
        )
        self.transport.push(to, header, BlockCopy(blocks, blocks, self.pool.all_layers))

    def turn(self) -> None:
        while (delivery := self.transport.inbox.receive()) is not None:
            assert isinstance(delivery.message, Push)
            self.pool.land(delivery.message, delivery.payload)
            self.landed.update(delivery.message.blocks)
            self.num_landed += 1
        time.sleep(0)

    def holds_what_landed(self) -> bool:
        read = self.pool.read(range(NUM_BLOCKS), self.pool.all_layers)
        here = np.frombuffer(read, np.uint8).reshape(NUM_BLOCKS, -1)
        expected = np.zeros_like(here)
        expected[list(self.landed)] = content()[list(self.landed)]
        return bool(np.array_equal(here, expected))


def peer_of(process: "subprocess.Popen[str]", is_sender: bool) -> Peer:
    return Peer("control", Incarnation(f"{'p' if is_sender else 'd'}{process.pid}"))


@contextmanager
def side_process(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", TransportCard]]:
    program = f"import sys; sys.path.append({str(ROOT)!r}); from tests.kvtransfer.nccl_side import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process, TransportCard("nccl", process.stdout.readline().strip())
        finally:
            process.kill()


def main() -> None:
    how, *address = sys.argv[1:]
    side = Side(is_sender=how == "send")
    sys.stdout.write(f"{side.transport.card.address}\n")
    sys.stdout.flush()
    if how == "send":
        push_for_ever(side, *address)
    while True:
        side.turn()


def push_for_ever(side: Side, incarnation: str, address: str) -> None:
    to = Peer("control", Incarnation(incarnation))
    while True:
        side.transport.open(to, TransportCard("nccl", address), NUM_BLOCKS)
        with suppress(LinkDown):
            side.push(to, random.sample(range(NUM_BLOCKS), random.randrange(1, NUM_BLOCKS)))
        for _ in range(20):
            side.turn()
