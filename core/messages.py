"""Every message that crosses a process border: typed, versioned, validated on arrival.

How they are written is in `wire_format`, which rejects what is unknown or malformed; receivers count it and go on.
Delivery may be late, repeated or missing, so every handler is idempotent. Durations travel, never clock readings.
"""

from enum import StrEnum
from typing import NewType

import msgspec

from .kv_layout import KvLayout
from .request import Request, RequestId, TokenLogprobs, TransferId
from .sequence import FinishReason

PROTOCOL_VERSION = 5
"""`Envelope` and `Refused` keep their form in all versions, so that a process hears why another will not have it."""

Incarnation = NewType("Incarnation", str)
LeaseId = NewType("LeaseId", int)


class MalformedMessage(Exception):
    """Bytes from a socket that are no message of this protocol."""


class OtherProtocol(MalformedMessage):
    """A message in another version of the protocol, of which only its envelope can be read."""

    def __init__(self, envelope: "Envelope") -> None:
        super().__init__(f"protocol version {envelope.protocol}, this process speaks {PROTOCOL_VERSION}")
        self.envelope = envelope


class Role(StrEnum):
    """Which parts of a worker take new work."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Peer(msgspec.Struct, frozen=True):
    """A process as others address it. The address is trusted only together with the incarnation."""

    address: str
    incarnation: Incarnation


class Envelope(msgspec.Struct, frozen=True):
    """First frame of every message. ``to`` is empty where the sender does not know the receiver yet."""

    sender: Peer
    to: str = ""
    protocol: int = PROTOCOL_VERSION


class Message(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"
):
    """Root of all messages."""


# --- what a worker says of itself --------------------------------------------------------------


class TransportCard(msgspec.Struct, frozen=True):
    """How peers may reach this worker's pool over one transport; ``address`` means what the transport says."""

    name: str
    address: str


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is; core/compatibility.py says in what two of them must agree to exchange KV.

    ``model`` stands for the model's configuration, ``weights`` for their revision (`ModelFingerprint`).
    """

    role: Role
    model: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_layer_groups: int
    weights: str = ""
    transports: tuple[TransportCard, ...] = ()

    def max_choices(self, num_prompt_tokens: int) -> int:
        """So many choices of one request over such a prompt can run here side by side."""
        if num_prompt_tokens % self.layout.block_size == 0:
            return self.max_num_seqs
        return min(self.max_num_seqs, 1 + self.num_blocks - self.layout.num_blocks_for(num_prompt_tokens))


class PoolBooks(msgspec.Struct, frozen=True):
    """``free + cached + leased + quarantined`` is always the number of blocks of the pool."""

    free: int
    cached: int
    leased: int
    quarantined: int


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's state at one moment, and its counters since it started (``total_*``)."""

    books: PoolBooks
    is_accepting: bool = True
    num_queued_prompt_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_arriving: int = 0
    num_kept_for_decode: int = 0
    resident_bytes: int = 0
    total_steps: int = 0
    total_preemptions: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_output_tokens: int = 0
    total_transfers: int = 0
    total_transfer_failures: int = 0
    total_blocks_pushed: int = 0
    total_blocks_skipped: int = 0
    total_bytes_pushed: int = 0
    total_messages_rejected: int = 0


class Hello(Message, frozen=True, tag="hello"):
    """Worker to router, once a second until it is answered with `Peers`."""

    card: WorkerCard


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Worker to router, once a second. A router that does not know the sender answers `WhoAreYou`."""

    load: WorkerLoad


class WhoAreYou(Message, frozen=True, tag="who_are_you"):
    """Router to worker: introduce yourself again (the router is new, or had declared the worker dead)."""


class PeerInfo(msgspec.Struct, frozen=True):
    peer: Peer
    card: WorkerCard


class Peers(Message, frozen=True, tag="peers"):
    """Router to worker, at every change, as the answer to each `Hello` and every few seconds: all live workers.

    Whoever is missing is dead: everything agreed with that incarnation is void at once.
    """

    workers: list[PeerInfo]


class TriedTransport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a probe found of one transport; ``error`` is empty when it works. ``detail`` is what the transport tells."""

    name: str
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    error: str = ""
    detail: str = ""


class Link(Message, frozen=True, tag="link"):
    """Prefill worker to router: the outcome of probing one decode worker; ``error`` is empty when it works.

    The figures are those of ``transport``, which was chosen among ``tried``.
    """

    to: Incarnation
    transport: str
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    error: str = ""
    tried: tuple[TriedTransport, ...] = ()


class Refused(Message, frozen=True, tag="refused"):
    """You can't join, or get no KV from me, and why: another model, layout or protocol.

    Router to worker, and decode worker to prefill worker.
    """

    reason: str


# --- a request on its way ----------------------------------------------------------------------


class PrefillTask(Message, frozen=True, tag="prefill_task"):
    """Router to prefill worker: compute this prompt; ``decode`` (maybe the same worker) goes on from there.

    A request with forks stands for all its choices: each has its first token drawn from the same logits, its own
    `TokenDelta`, `RequestFailed` and `Abort`, under its own id.
    """

    request: Request
    transfer_id: TransferId
    decode: Peer


class StageTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long a request was in the stages (core/stages.py) that end with the first token of a worker.

    The prefill worker tells ``queue_seconds`` and ``prefill_seconds``; the decode worker ``queue_seconds``, and
    ``transfer_seconds`` where KV travelled: from the computed prompt to the whole of it here.
    """

    queue_seconds: float
    prefill_seconds: float | None = None
    transfer_seconds: float | None = None


class TokenDelta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One token of one request. ``index`` counts the output from 0; ``token_id`` is ``None`` only when a
    request ends without a further token. ``cached_tokens`` comes with index 0 from the prefill worker, and so does
    ``pooled``, the vector of a request with pooling as little-endian float32; ``times`` with the first token of each
    worker.
    """

    request_id: RequestId
    index: int
    token_id: int | None = None
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    pooled: bytes = b""
    times: StageTimes | None = None


class Tokens(Message, frozen=True, tag="tokens"):
    """Worker to router: everything one step yielded."""

    deltas: list[TokenDelta]


class PromptLogprobs(Message, frozen=True, tag="prompt_logprobs"):
    """Worker to router, before the first token: ``logprobs[i]`` belongs to prompt position ``start + i``.

    Told once for all choices, under the id of one of them.
    """

    request_id: RequestId
    start: int
    logprobs: list[TokenLogprobs]


class RequestFailed(Message, frozen=True, tag="request_failed"):
    """Worker to router: this request ends here without its result; the other leg has been told.

    ``is_retryable`` says that the fault lies in the pair or the moment, not in the request.
    """

    request_id: RequestId
    transfer_id: TransferId
    reason: str
    is_retryable: bool


class Abort(Message, frozen=True, tag="abort"):
    """Router to worker: forget this request and free all it holds. Unknown ids are fine."""

    request_id: RequestId


class Inquiry(Message, frozen=True, tag="inquiry"):
    """Router to worker: nothing was heard of these requests for long; which do you not hold?"""

    request_ids: list[RequestId]


class NotHeld(Message, frozen=True, tag="not_held"):
    """Worker to router: of an `Inquiry` those that are not here, because they never came or have ended."""

    request_ids: list[RequestId]


# --- a transfer --------------------------------------------------------------------------------


class Offer(Message, frozen=True, tag="offer"):
    """Prefill to decode, when the first chunk starts.

    ``block_hashes`` are those of the prompt's full blocks, one after the other, which the sender knows and would take
    the receiver 0.25 ms a prompt of 8,192 tokens (`BlockTables.believe`); empty if the sender makes none.
    """

    transfer_id: TransferId
    request: Request
    router: Peer
    block_hashes: bytes = b""


class Reservation(Message, frozen=True, tag="reservation"):
    """Decode to prefill: push prompt block ``first_missing + i`` to pool block ``blocks[i]``.

    The lease runs ``lease_seconds`` from its arrival and is renewed by every push and `Renew`.
    """

    transfer_id: TransferId
    lease_id: LeaseId
    generation: int
    first_missing: int
    blocks: list[int]
    lease_seconds: float


class Push(Message, frozen=True, tag="push"):
    """Prefill to decode: ``num_groups`` layer groups from ``group`` on of ``blocks`` (pool blocks of the receiver).

    Over ``tcp`` the bytes come as the payload of this message: for each block the span of the groups' layers. Over a
    transport that writes into the pool itself they are already there and the payload is empty.
    """

    transfer_id: TransferId
    lease_id: LeaseId
    generation: int
    group: int
    blocks: list[int]
    transport: str
    num_groups: int = 1


class Renew(Message, frozen=True, tag="renew"):
    """Prefill to decode: still computing, keep the lease."""

    transfer_id: TransferId
    lease_id: LeaseId
    generation: int


class Commit(Message, frozen=True, tag="commit"):
    """Prefill to decode: every byte has been pushed, go on from these first tokens, one a choice of the request.

    ``None`` stands for a choice that goes no further. ``num_block_groups`` is the number of (block, layer group) pairs
    that must have landed. Sampler state needs no field: a draw depends on the seed and the output index alone,
    penalties and grammars on the tokens. ``checksums``, one a layer group, are over all bytes that must have landed;
    empty if the sender makes none. ``exposed_seconds`` have passed since the prompt was computed.
    """

    transfer_id: TransferId
    lease_id: LeaseId
    generation: int
    num_block_groups: int
    first_token_ids: list[int | None]
    checksums: list[int] = []
    exposed_seconds: float = 0.0


class Attached(Message, frozen=True, tag="attached"):
    """Decode to prefill: the request is mine now; release your blocks."""

    transfer_id: TransferId


class Rejected(Message, frozen=True, tag="rejected"):
    """Decode to prefill: this transfer is over without result (stale lease, wrong counts, no such request)."""

    transfer_id: TransferId
    reason: str


class Cancel(Message, frozen=True, tag="cancel"):
    """Prefill to decode: I gave up and write no more; also the answer to `Revoke`."""

    transfer_id: TransferId
    reason: str


class Revoke(Message, frozen=True, tag="revoke"):
    """Decode to prefill: the lease is ended; stop writing and answer `Cancel`.

    The blocks stay quarantined till then.
    """

    transfer_id: TransferId
    reason: str


# --- probing a pair ----------------------------------------------------------------------------


class ProbeRequest(Message, frozen=True, tag="probe_request"):
    """Prefill to decode: this is who I am; lend me ``num_blocks`` blocks for random bytes, or say `Refused`."""

    probe_id: str
    card: WorkerCard
    num_blocks: int


class ProbeGrant(Message, frozen=True, tag="probe_grant"):
    """Decode to prefill: these blocks, maybe fewer than wanted. Comes again if the probe was not heard of for long."""

    probe_id: str
    blocks: list[int]


class ProbeSent(Message, frozen=True, tag="probe_sent"):
    """Prefill to decode: the first ``num_blocks`` lent blocks hold bytes with this BLAKE2b digest.

    They were sent over ``transport``. Over ``tcp`` the bytes are the payload, whole blocks in the order of the grant.
    """

    probe_id: str
    trial: int
    transport: str
    num_blocks: int
    digest: bytes


class ProbeVerdict(Message, frozen=True, tag="probe_verdict"):
    """Decode to prefill; ``check_seconds`` went into comparing and is no part of the transfer's time."""

    probe_id: str
    trial: int
    is_correct: bool
    check_seconds: float = 0.0


class ProbeDone(Message, frozen=True, tag="probe_done"):
    """Prefill to decode: take the lent blocks back."""

    probe_id: str


# --- a channel for bulk between two workers (kvtransfer/nccl.py) -------------------------------


class ChannelInvite(Message, frozen=True, tag="channel_invite"):
    """Sending to receiving side: join me under ``unique_id``; it replaces my channels with lower numbers.

    ``code`` can only be made with the cluster's key.
    """

    channel: int
    unique_id: bytes
    code: bytes


class PieceSent(Message, frozen=True, tag="piece_sent"):
    """Sending to receiving side: the channel's transfer number ``number``, from 0, brings the bytes of ``message``."""

    channel: int
    number: int
    num_bytes: int
    message: Push | ProbeSent


class ChannelEnded(Message, frozen=True, tag="channel_ended"):
    """Either side to the other: I have let go of the channel to which ``inviter`` had invited."""

    channel: int
    inviter: Incarnation
    reason: str


# --- the prefix cache, told to the router ------------------------------------------------------


class CacheEvents(Message, frozen=True, tag="cache_events"):
    """Worker to router: hashes stored and evicted since the last one; a gap in ``number`` asks for a snapshot."""

    number: int
    stored: list[bytes] = []
    evicted: list[bytes] = []


class SnapshotRequest(Message, frozen=True, tag="snapshot_request"):
    """Router to worker: I missed events."""


class CacheSnapshot(Message, frozen=True, tag="cache_snapshot"):
    """Worker to router: all hashes held when event ``number`` had been applied."""

    number: int
    hashes: list[bytes]
