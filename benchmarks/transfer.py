"""KV from one process to another over each transport: GB/s by length of prompt and number at once, beside the limit.

    python benchmarks/transfer.py                                     # pools in host memory
    python benchmarks/transfer.py --device cuda --transports cuda_ipc,ucx,tcp

Two processes with a pool each, of the shape of Llama-3.1-8B unless told otherwise, linked by `Links` as two workers
are: the probe runs first. A prompt is pushed layer group by layer group from random blocks to random blocks, and its
time ends when the sender hears that everything has landed. Checksums of both sides are compared. The limit is a plain
copy: within the host's memory, or between the two GPUs (within one, if there is only one).
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
import zmq

from crossdock.core.block_pool import BlockPool
from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import (
    Attached,
    Incarnation,
    LeaseId,
    Link,
    PeerInfo,
    Push,
    Role,
    WorkerCard,
)
from crossdock.core.part import Delivery
from crossdock.core.request import TransferId
from crossdock.kvtransfer.links import Links
from crossdock.kvtransfer.pool_bytes import PoolBytes, PoolMemory
from crossdock.kvtransfer.shm import ShmTransport, allocate_shared
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Transport

LAYOUTS = {
    "demo": KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32"),
    "llama-8b": KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"),
}
NUM_GROUPS = 4
KEY = b"benchmark"
LEASE_SECONDS = 10.0
NUM_ROUNDS = 5
TRANSFER = TransferId("t")


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides are made of; the decode side takes the second GPU if there is one."""

    device: str
    layout: KvLayout
    num_blocks: int
    transport: str


@dataclass(frozen=True, slots=True)
class Work:
    num_tokens: int
    num_at_once: int

    @property
    def total_tokens(self) -> int:
        return self.num_tokens * self.num_at_once


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    transport: str
    num_tokens: int
    num_at_once: int
    gigabytes_per_second: float
    milliseconds: float
    limit_gigabytes_per_second: float


class Side:
    """One process: pool, transport, links and mailbox, and a loop like a worker's."""

    def __init__(self, setting: Setting, role: Role) -> None:
        self.mailbox = Mailbox("127.0.0.1", 0, Incarnation(role.value))
        self.setting = setting
        self.memory, transport = self._make(role)
        self.card = WorkerCard(
            role=role,
            model="benchmark",
            layout=setting.layout,
            num_blocks=setting.num_blocks,
            max_model_len=1,
            max_num_seqs=1,
            vocab_size=1,
            num_layer_groups=NUM_GROUPS,
            transports=(transport.card,),
        )
        pool = BlockPool(setting.num_blocks)
        post = self.mailbox.send
        self.links = Links(self.mailbox.peer, self.card, [transport], pool, self.memory, post, LEASE_SECONDS)
        self.poller = zmq.Poller()
        for source in (self.mailbox.poll_socket, *(inbox.poll_socket for inbox in self.links.inboxes)):
            self.poller.register(source, zmq.POLLIN)

    def _make(self, role: Role) -> tuple[PoolMemory, Transport]:
        setting, incarnation = self.setting, self.mailbox.peer.incarnation
        memory: PoolMemory
        if setting.device == "cpu":
            shared = allocate_shared(setting.num_blocks * setting.layout.block_bytes)
            memory = host_pool = PoolBytes(shared.memory, setting.num_blocks, setting.layout, NUM_GROUPS)
            if setting.transport == "shm":
                return memory, ShmTransport(host_pool, shared)
        else:
            from crossdock.kvtransfer.cuda_ipc import CudaIpcTransport
            from crossdock.kvtransfer.device_pool import DevicePool
            from crossdock.model.device_stream import CudaStream

            gpu = torch.device("cuda", (role is Role.DECODE) % torch.cuda.device_count())
            torch.cuda.set_device(gpu)
            num_bytes = setting.num_blocks * setting.layout.block_bytes
            tensor = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=gpu).view(setting.num_blocks, -1)
            memory = device_pool = DevicePool(tensor, setting.layout, NUM_GROUPS, CudaStream(gpu))
            if setting.transport == "cuda_ipc":
                return memory, CudaIpcTransport(device_pool, lambda: None)
        if setting.transport == "ucx":
            from crossdock.kvtransfer.ucx import UcxTransport

            return memory, UcxTransport(memory, self.mailbox.peer, KEY, LEASE_SECONDS)
        return memory, TcpTransport(memory, Mailbox("127.0.0.1", 0, incarnation))

    @property
    def info(self) -> PeerInfo:
        return PeerInfo(self.mailbox.peer, self.card)

    def turn(self, milliseconds: int, take: Callable[[Delivery], None]) -> None:
        self.poller.poll(milliseconds)
        for mailbox in (self.mailbox, *self.links.inboxes):
            while (delivery := mailbox.receive()) is not None:
                if not self.links.handle(delivery, time.monotonic()):
                    take(delivery)
        self.links.sweep(time.monotonic())


def be_decode(setting: Setting, parent: Connection) -> None:
    """Land what comes, and say so when all that was announced is here."""
    side = Side(setting, Role.DECODE)
    parent.send(side.info)
    sender, router = parent.recv()
    side.links.update(router, [sender, side.info], time.monotonic())
    num_awaited = num_landed = 0

    def take(delivery: Delivery) -> None:
        nonlocal num_landed
        if isinstance(delivery.message, Push):
            if len(delivery.payload):
                side.links.land(delivery.message, delivery.payload)
            num_landed += len(delivery.message.blocks)

    while True:
        side.turn(0 if num_awaited else 1, take)
        if num_awaited and num_landed == num_awaited:
            side.mailbox.send(sender.peer, Attached(transfer_id=TRANSFER))
            num_awaited = num_landed = 0
        if parent.poll():
            order = parent.recv()
            if order is None:
                return
            if isinstance(order, int):
                num_awaited = order
            else:
                parent.send(side.memory.checksums(order))


def measure(setting: Setting, works: Sequence[Work], limit: float) -> list[Row]:
    """Be the prefill side; the other one is a child."""
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=be_decode, args=(setting, there), daemon=True)
    child.start()
    side = Side(setting, Role.PREFILL)
    decode: PeerInfo = here.recv()
    router = Mailbox("127.0.0.1", 0, Incarnation("router"))
    here.send((side.info, router.peer))
    side.links.update(router.peer, [side.info, decode], time.monotonic())
    if isinstance(side.memory, PoolBytes):
        side.memory.array[...] = np.frombuffer(random.randbytes(1 << 20), np.uint8)[: side.memory.array.shape[-1]]
    attached: list[Attached] = []
    take = attached_to(attached)
    while (told := router.receive()) is None:
        side.turn(1, take)
    assert isinstance(told.message, Link) and not told.message.error, told.message
    rows = []
    for work in works:
        seconds = median(push_all(side, decode, work, here, attached, take) for _ in range(NUM_ROUNDS))
        num_bytes = blocks_of(setting.layout, work) * setting.layout.block_bytes
        rate = num_bytes / seconds / 1e9
        rows.append(Row(setting.transport, work.num_tokens, work.num_at_once, rate, 1e3 * seconds, limit))
    here.send(None)
    child.join(10)
    side.links.close()
    return rows


def attached_to(attached: list[Attached]) -> Callable[[Delivery], None]:
    def take(delivery: Delivery) -> None:
        if isinstance(delivery.message, Attached):
            attached.append(delivery.message)

    return take


def blocks_of(layout: KvLayout, work: Work) -> int:
    return layout.num_blocks_for(work.num_tokens) * work.num_at_once


def push_all(
    side: Side,
    decode: PeerInfo,
    work: Work,
    child: Connection,
    attached: list[Attached],
    take: Callable[[Delivery], None],
) -> float:
    """Seconds from the first push until all has landed; asserts that it is what was sent."""
    num_blocks = blocks_of(side.setting.layout, work)
    sources = random.sample(range(side.setting.num_blocks), num_blocks)
    destinations = random.sample(range(side.setting.num_blocks), num_blocks)
    child.send(num_blocks * NUM_GROUPS)
    time.sleep(0.01)  # the child has read it
    a_prompt = num_blocks // work.num_at_once
    begun = time.perf_counter()
    for group in range(NUM_GROUPS):
        for first in range(0, num_blocks, a_prompt):
            piece = slice(first, first + a_prompt)
            header = Push(
                transfer_id=TRANSFER,
                lease_id=LeaseId(0),
                generation=0,
                group=group,
                blocks=destinations[piece],
                transport="",
            )
            side.links.push(decode.peer, header, sources[piece])
    while not attached:
        side.turn(0, take)
    seconds = time.perf_counter() - begun
    attached.clear()
    child.send(destinations)
    assert child.recv() == side.memory.checksums(sources), "what landed is not what was sent"
    return seconds


def limit_of(device: str, num_bytes: int = 256 << 20) -> float:
    """GB/s of a plain copy."""
    if device == "cpu":
        source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
        copy: Callable[[], object] = lambda: np.copyto(target, source)  # noqa: E731
    else:
        here = torch.ones(num_bytes, dtype=torch.uint8, device="cuda:0")
        there = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{torch.cuda.device_count() - 1}")

        def copy() -> None:
            there.copy_(here)
            torch.cuda.synchronize()

    seconds = []
    for _ in range(NUM_ROUNDS + 1):
        begun = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - begun)
    return num_bytes / median(seconds[1:]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="KV transfer between two processes, by transport.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=LAYOUTS, default="llama-8b")
    parser.add_argument("--transports", default="")
    parser.add_argument("--tokens", default="64,512,2048,8192")
    parser.add_argument("--at-once", default="1,8")
    parser.add_argument("--max-tokens", type=int, default=8192, help="In the pools, and so on their way at once.")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    layout = LAYOUTS[asked.shape]
    works = [Work(int(n), int(k)) for n in asked.tokens.split(",") for k in asked.at_once.split(",")]
    works = [work for work in works if work.total_tokens <= asked.max_tokens]
    limit = limit_of(asked.device)
    rows = []
    for transport in (asked.transports or {"cpu": "shm,ucx,tcp", "cuda": "cuda_ipc,ucx,tcp"}[asked.device]).split(","):
        setting = Setting(asked.device, layout, layout.num_blocks_for(asked.max_tokens), transport)
        rows += measure(setting, works, limit)
    print(f"{'transport':10}{'tokens':>8}{'at once':>9}{'GB/s':>9}{'ms':>10}{'of the limit':>14}   ({limit:.1f} GB/s)")
    for row in rows:
        share = row.gigabytes_per_second / row.limit_gigabytes_per_second
        print(
            f"{row.transport:10}{row.num_tokens:8}{row.num_at_once:9}{row.gigabytes_per_second:9.2f}"
            f"{row.milliseconds:10.2f}{share:13.0%}"
        )
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
