"""What crosses a process border comes out as it went in, and nothing else gets through."""

from contextlib import suppress
from types import UnionType
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.core import messages as m
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import MalformedMessage, Message, OtherProtocol, Peer
from crossdock.core.request import Fork, Request, RequestId, SamplingParams, TokenLogprobs, TransferId, pack_ids
from crossdock.core.sequence import FinishReason
from crossdock.core.wire_format import AnyMessage, decode, decode_envelope, encode

PEER = Peer("tcp://127.0.0.1:1234", m.Incarnation("life"))
REQUEST_ID, TRANSFER_ID, LEASE_ID = RequestId("r1"), TransferId("t1"), m.LeaseId(7)
PARAMS = SamplingParams(max_tokens=5, seed=3, stop=("a",), logit_bias={4: -1.5}, stop_token_ids=(1, 2))
FORKS = (Fork(RequestId("r2"), 4), Fork(RequestId("r3"), 5, "00-1-2-01"))
REQUEST = Request(
    request_id=REQUEST_ID, prompt=pack_ids([1, 2, 3]), params=PARAMS, salt=b"tenant", priority=-1, forks=FORKS
)
LOGPROBS = TokenLogprobs(-0.5, [1, 2], [-0.5, -1.25])
CARD = m.WorkerCard(
    role=m.Role.PREFILL,
    model="tiny@1",
    layout=KvLayout(2, 1, 8, 16, "float32"),
    num_blocks=8,
    max_model_len=128,
    max_num_seqs=64,
    vocab_size=100,
    num_layer_groups=2,
    transports=(m.TransportCard("tcp", ""), m.TransportCard("shm", "segment")),
)
PROBE_SENT = m.ProbeSent(probe_id="p", trial=1, transport="tcp", num_blocks=2, digest=b"\0" * 16)
SAMPLES: list[Message] = [
    m.Hello(card=CARD),
    m.Heartbeat(load=m.WorkerLoad(books=m.PoolBooks(1, 2, 3, 4), num_running=5)),
    m.WhoAreYou(),
    m.Peers(workers=[m.PeerInfo(PEER, CARD)]),
    m.Link(
        to=PEER.incarnation,
        transport="shm",
        bytes_per_second=5e9,
        latency_seconds=1e-5,
        tried=(m.TriedTransport("shm", 5e9, 1e-5, detail="x"), m.TriedTransport("tcp", error="no")),
    ),
    m.Refused(reason="another model"),
    m.PrefillTask(request=REQUEST, transfer_id=TRANSFER_ID, decode=PEER),
    m.Tokens(
        deltas=[
            m.TokenDelta(REQUEST_ID, 0, 42, logprobs=LOGPROBS, cached_tokens=16),
            m.TokenDelta(REQUEST_ID, 1, None, FinishReason.STOP),
        ]
    ),
    m.PromptLogprobs(request_id=REQUEST_ID, start=1, logprobs=[LOGPROBS]),
    m.RequestFailed(request_id=REQUEST_ID, transfer_id=TRANSFER_ID, reason="lost", is_retryable=True),
    m.Abort(request_id=REQUEST_ID),
    m.Inquiry(request_ids=[REQUEST_ID]),
    m.NotHeld(request_ids=[REQUEST_ID]),
    m.Offer(transfer_id=TRANSFER_ID, request=REQUEST, router=PEER),
    m.Reservation(
        transfer_id=TRANSFER_ID, lease_id=LEASE_ID, generation=1, first_missing=2, blocks=[5, 3], lease_seconds=10.0
    ),
    m.Push(transfer_id=TRANSFER_ID, lease_id=LEASE_ID, generation=1, group=0, blocks=[5], transport="tcp"),
    m.Renew(transfer_id=TRANSFER_ID, lease_id=LEASE_ID, generation=1),
    m.Commit(
        transfer_id=TRANSFER_ID, lease_id=LEASE_ID, generation=1, num_block_groups=4, first_token_ids=[42, None, 0]
    ),
    m.Attached(transfer_id=TRANSFER_ID),
    m.Rejected(transfer_id=TRANSFER_ID, reason="stale lease"),
    m.Cancel(transfer_id=TRANSFER_ID, reason="aborted"),
    m.Revoke(transfer_id=TRANSFER_ID, reason="lease ended"),
    m.ProbeRequest(probe_id="p", card=CARD, num_blocks=2),
    m.ProbeGrant(probe_id="p", blocks=[1, 2]),
    PROBE_SENT,
    m.ProbeVerdict(probe_id="p", trial=1, is_correct=True, check_seconds=0.5),
    m.ProbeDone(probe_id="p"),
    m.ChannelInvite(channel=1, unique_id=b"u" * 128, code=b"c" * 16),
    m.PieceSent(channel=1, number=0, num_bytes=4096, message=PROBE_SENT),
    m.ChannelEnded(channel=1, inviter=m.Incarnation("a"), reason="no progress"),
    m.CacheEvents(number=3, stored=[b"a" * 16], evicted=[b"b" * 16]),
    m.SnapshotRequest(),
    m.CacheSnapshot(number=3, hashes=[b"a" * 16]),
]
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)


def types_of(union: UnionType) -> set[type]:
    return set(get_args(union))


@each_sample
def test_a_message_comes_out_as_it_went_in(sample: Message) -> None:
    assert decode(encode(sample)) == sample


def test_every_message_is_tried_here() -> None:
    assert {type(sample) for sample in SAMPLES} == types_of(AnyMessage)


def test_every_subclass_of_message_can_be_received() -> None:
    assert set(Message.__subclasses__()) == types_of(AnyMessage)


def test_the_wire_form_is_a_map_that_names_its_type() -> None:
    assert msgspec.msgpack.decode(encode(m.Abort(request_id=REQUEST_ID))) == {"type": "abort", "request_id": "r1"}


def test_defaults_do_not_travel() -> None:
    delta = m.TokenDelta(REQUEST_ID, 1, 42)
    expected = {"type": "tokens", "deltas": [{"request_id": "r1", "index": 1, "token_id": 42}]}
    assert msgspec.msgpack.decode(encode(m.Tokens(deltas=[delta]))) == expected


@each_sample
def test_an_unknown_field_is_refused(sample: Message) -> None:
    fields = msgspec.msgpack.decode(encode(sample))
    with pytest.raises(MalformedMessage, match="unknown field `extra`"):
        decode(msgspec.msgpack.encode({**fields, "extra": 1}))


@each_sample
def test_every_cut_of_a_message_is_refused(sample: Message) -> None:
    encoded = encode(sample)
    for length in range(len(encoded)):
        with pytest.raises(MalformedMessage):
            decode(encoded[:length])


@each_sample
def test_a_field_of_another_kind_is_refused(sample: Message) -> None:
    fields = msgspec.msgpack.decode(encode(sample))
    for name in fields:
        with pytest.raises(MalformedMessage):
            decode(msgspec.msgpack.encode({**fields, name: {"no": "such thing"}}))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    for read in (decode, decode_envelope):
        with suppress(MalformedMessage):
            assert isinstance(read(data), Message | m.Envelope)


@given(st.sampled_from(SAMPLES), st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_a_message(sample: Message, position: int, flip: int) -> None:
    damaged = bytearray(encode(sample))
    damaged[position % len(damaged)] ^= flip
    with suppress(MalformedMessage):
        assert isinstance(decode(bytes(damaged)), Message)


def test_nesting_without_end_is_refused() -> None:
    for start in (b"", b"\x82\xa6deltas", b"\x82\xa1x"):
        for read in (decode, decode_envelope):
            with pytest.raises(MalformedMessage):
                read(start + b"\x91" * 100_000)


def test_a_layout_that_can_not_be_is_refused() -> None:
    encoded = encode(m.Hello(card=CARD)).replace(b"float32", b"float99")
    with pytest.raises(MalformedMessage, match="float99"):
        decode(encoded)


def test_an_envelope_says_who_sends_and_who_is_meant() -> None:
    envelope = m.Envelope(PEER, "other life")
    assert decode_envelope(encode(envelope)) == envelope
    assert (envelope.protocol, m.Envelope(PEER).to) == (m.PROTOCOL_VERSION, "")


def test_another_protocol_version_is_named() -> None:
    envelope = m.Envelope(PEER, protocol=999)
    with pytest.raises(OtherProtocol, match=f"protocol version 999, this process speaks {m.PROTOCOL_VERSION}") as error:
        decode_envelope(encode(envelope))
    assert error.value.envelope == envelope


def test_what_is_said_across_versions_keeps_its_form() -> None:
    envelope = {"sender": {"address": PEER.address, "incarnation": "life"}, "to": "x", "protocol": m.PROTOCOL_VERSION}
    assert msgspec.msgpack.decode(encode(m.Envelope(PEER, "x"))) == envelope
    assert msgspec.msgpack.decode(encode(m.Refused(reason="why"))) == {"type": "refused", "reason": "why"}


def test_messages_do_not_change_and_do_not_share_their_defaults() -> None:
    first, second = m.CacheEvents(number=1), m.CacheEvents(number=2)
    first.stored.append(b"a")
    assert second.stored == []
    field = "number"
    with pytest.raises(AttributeError):
        setattr(first, field, 5)


def test_roles_say_what_they_take() -> None:
    assert [(role.value, role.prefills, role.decodes) for role in m.Role] == [
        ("prefill", True, False),
        ("decode", False, True),
        ("mixed", True, True),
    ]
