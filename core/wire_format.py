"""Messages as bytes: msgpack, each a map with its ``type``."""

from typing import Any

import msgspec

from .messages import (
    PROTOCOL_VERSION,
    Abort,
    Attached,
    CacheEvents,
    CacheSnapshot,
    Cancel,
    ChannelEnded,
    ChannelInvite,
    Commit,
    Envelope,
    Heartbeat,
    Hello,
    Inquiry,
    Link,
    MalformedMessage,
    Message,
    NotHeld,
    Offer,
    OtherProtocol,
    Peers,
    PieceSent,
    PrefillTask,
    ProbeDone,
    ProbeGrant,
    ProbeRequest,
    ProbeSent,
    ProbeVerdict,
    PromptLogprobs,
    Push,
    Refused,
    Rejected,
    Renew,
    RequestFailed,
    Reservation,
    Revoke,
    SnapshotRequest,
    Tokens,
    WhoAreYou,
)

AnyMessage = (
    Hello | Heartbeat | WhoAreYou | Peers | Link | Refused
    | PrefillTask | Tokens | PromptLogprobs | RequestFailed | Abort | Inquiry | NotHeld
    | Offer | Reservation | Push | Renew | Commit | Attached | Rejected | Cancel | Revoke
    | ProbeRequest | ProbeGrant | ProbeSent | ProbeVerdict | ProbeDone
    | ChannelInvite | PieceSent | ChannelEnded
    | CacheEvents | SnapshotRequest | CacheSnapshot
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(message: Message | Envelope) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Raises `MalformedMessage` for anything but one well-formed message."""
    try:
        message = _message_decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from None
    assert isinstance(message, Message)
    return message


def decode_envelope(payload: bytes) -> Envelope:
    """Raises `MalformedMessage`, and `OtherProtocol` for an envelope of another version."""
    try:
        envelope = _envelope_decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from None
    if envelope.protocol != PROTOCOL_VERSION:
        raise OtherProtocol(envelope)
    return envelope
