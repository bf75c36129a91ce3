"""A prefill worker that joined like any other and then breaks the rules of a transfer."""

import os
import time
from pathlib import Path
from random import Random
from typing import TypeVar

import zmq

from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import (
    Cancel,
    Commit,
    Envelope,
    Hello,
    Incarnation,
    Message,
    Offer,
    Peer,
    Peers,
    Push,
    Reservation,
    Role,
    WorkerCard,
)
from crossdock.core.request import Request, RequestId, SamplingParams, TransferId, pack_ids
from crossdock.core.wire_format import encode
from crossdock.deploy.model_source import resolve

M = TypeVar("M", bound=Message)

SMALL_LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
NUM_GROUPS = 4
NUM_BLOCKS = 6
ANSWER_SECONDS = 10.0


class Rogue:
    """Speaks to the decode worker of a server for the small model, over its ``tcp`` transport."""

    def __init__(self, model: Path, router_address: str) -> None:
        self._mailbox = Mailbox("127.0.0.1", 0, Incarnation("rogue"))
        self._num_offers = 0
        fingerprint = resolve(str(model)).fingerprint()
        card = WorkerCard(
            role=Role.PREFILL,
            model=fingerprint.model,
            weights=fingerprint.weights,
            layout=SMALL_LAYOUT,
            num_blocks=64,
            max_model_len=1024,
            max_num_seqs=64,
            vocab_size=320,
            num_layer_groups=NUM_GROUPS,
        )
        self._mailbox.send(Peer(router_address, Incarnation("")), Hello(card=card))
        workers = self.hear(Peers).workers
        self.workers = [info.peer for info in workers if info.peer != self._mailbox.peer]
        decode = next(info for info in workers if info.card.role is Role.DECODE)
        bulk = next(transport.address for transport in decode.card.transports if transport.name == "tcp")
        self._decode, self._bulk = decode.peer, Peer(bulk, decode.peer.incarnation)

    def close(self) -> None:
        self._mailbox.close()

    def hear(self, kind: type[M]) -> M:
        """The next message of one kind; all others are let go."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            delivery = self._mailbox.receive()
            if delivery is None:
                self._mailbox.poll_socket.poll(100)
            elif isinstance(delivery.message, kind):
                return delivery.message
        raise AssertionError(f"no {kind.__name__} within {ANSWER_SECONDS:.0f} s")

    def reserved(self) -> Reservation:
        """Offer a prompt of ``NUM_BLOCKS`` blocks that nobody has seen, and be given room for it."""
        self._num_offers += 1
        random = Random(1000 + self._num_offers)
        prompt = pack_ids([random.randrange(319) for _ in range(16 * NUM_BLOCKS)])
        name = f"rogue-{self._num_offers}"
        request = Request(request_id=RequestId(name), prompt=prompt, params=SamplingParams(max_tokens=8, seed=0))
        self.say(Offer(transfer_id=TransferId(name), request=request, router=self._mailbox.peer))
        reservation = self.hear(Reservation)
        assert (reservation.transfer_id, len(reservation.blocks)) == (name, NUM_BLOCKS)
        return reservation

    def say(self, message: Message) -> None:
        self._mailbox.send(self._decode, message)

    def push(self, lease: Reservation, group: int, blocks: list[int], num_missing_bytes: int = 0, age: int = 0) -> None:
        """One layer group of random KV, maybe too short, or under a lease ``age`` generations older."""
        header = Push(
            transfer_id=lease.transfer_id,
            lease_id=lease.lease_id,
            generation=lease.generation - age,
            group=group,
            blocks=blocks,
            transport="tcp",
        )
        num_bytes = len(blocks) * SMALL_LAYOUT.layer_bytes - num_missing_bytes
        self._mailbox.send(self._bulk, header, os.urandom(num_bytes))

    def commit(self, lease: Reservation, num_block_groups: int) -> None:
        self.say(
            Commit(
                transfer_id=lease.transfer_id,
                lease_id=lease.lease_id,
                generation=lease.generation,
                num_block_groups=num_block_groups,
                first_token_ids=[7],
            )
        )

    def cancel(self, lease: Reservation) -> None:
        self.say(Cancel(transfer_id=lease.transfer_id, reason="changed my mind"))


def babble(ports: list[int], num_rounds: int) -> None:
    """Send what is no message of the protocol, in every way we can think of, to all ports."""
    random = Random(3)
    with zmq.Context() as context:
        for port in ports:
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 2000)
                dealer.connect(f"tcp://127.0.0.1:{port}")
                for _ in range(num_rounds):
                    for frames in nonsense(random.randbytes(random.randint(0, 300))):
                        dealer.send_multipart(frames)


def nonsense(noise: bytes) -> list[list[bytes]]:
    stranger = Peer("tcp://127.0.0.1:1", Incarnation("stranger"))
    envelope, message = encode(Envelope(stranger)), encode(Peers(workers=[]))
    return [
        [b""],
        [noise],
        [envelope],
        [noise, noise],
        [envelope, noise],
        [envelope, noise, noise, noise, noise],
        [encode(Envelope(stranger, "somebody else")), message],
        [encode(Envelope(stranger, protocol=999)), message],
    ]


NUM_KINDS_OF_NONSENSE = len(nonsense(b""))
