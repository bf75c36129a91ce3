"""Which part of which block goes where when the two sides cut a model differently. Pure.

A worker of ``pipeline * tensor`` ranks cuts its layers into ``pipeline`` ranges and the KV heads of each into
``tensor`` ranges; with more ranks than heads a head lies on several. Rank ``p * tensor + t`` holds range ``p`` of the
layers, cut ``t`` of the heads. In a block of a rank the elements are ``[layer][K,V][kv head][token][head dim]``
(core/kv_layout.py), so that a run of tokens of one head is contiguous, and so are several heads where the runs are
whole blocks on both sides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Cut:
    """How a worker's ranks share a model; ``block_size`` is in tokens."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        """Raises ``ValueError`` where the ranks would hold unequal shares of the heads, or none of the layers."""
        larger, smaller = max(self.tensor, self.num_kv_heads), min(self.tensor, self.num_kv_heads)
        if larger % smaller:
            raise ValueError(f"{self.num_kv_heads} KV heads can't be shared equally by {self.tensor} ranks")
        if self.pipeline > self.num_layers:
            raise ValueError(f"{self.num_layers} layers are too few for {self.pipeline} ranks")

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.tensor

    def layers(self, rank: int) -> range:
        stage = rank // self.tensor
        return range(self.num_layers * stage // self.pipeline, self.num_layers * (stage + 1) // self.pipeline)

    def heads(self, rank: int) -> range:
        place = rank % self.tensor
        first = place * self.num_kv_heads // self.tensor
        return range(first, first + max(1, self.num_kv_heads // self.tensor))

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same head."""
        return max(1, self.tensor // self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Share:
    """Layers and heads that rank ``source`` sends to rank ``destination``, counted in the model."""

    source: int
    destination: int
    layers: range
    heads: range


def shares(sender: Cut, receiver: Cut) -> list[Share]:
    """Every layer of every head of every receiving rank, each from one rank that holds it.

    Of several that hold the same head each serves as many receivers as the others, or one more.
    """
    assert (sender.num_layers, sender.num_kv_heads) == (receiver.num_layers, receiver.num_kv_heads), "one model"
    pairs = product(range(sender.num_ranks), range(receiver.num_ranks))
    return [share for source, destination in pairs if (share := _share(sender, receiver, source, destination))]


def _share(sender: Cut, receiver: Cut, source: int, destination: int) -> Share | None:
    replica = source % sender.tensor % sender.num_replicas
    if destination % receiver.tensor % sender.num_replicas != replica:
        return None
    layers = _common(sender.layers(source), receiver.layers(destination))
    heads = _common(sender.heads(source), receiver.heads(destination))
    return Share(source, destination, layers, heads) if layers and heads else None


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


@dataclass(frozen=True, slots=True)
class TokenRun:
    """``num_tokens`` tokens from slot ``source_slot`` of the sequence's block ``source`` on; likewise where they go."""

    source: int
    source_slot: int
    destination: int
    destination_slot: int
    num_tokens: int


def token_runs(first: int, num_tokens: int, sender_block: int, receiver_block: int) -> Iterator[TokenRun]:
    """Tokens ``first .. num_tokens`` of a sequence, in runs that cross no border of a block on either side."""
    token = first
    while token < num_tokens:
        end = min(
            (token // sender_block + 1) * sender_block, (token // receiver_block + 1) * receiver_block, num_tokens
        )
        yield TokenRun(
            token // sender_block, token % sender_block, token // receiver_block, token % receiver_block, end - token
        )
        token = end


@dataclass(frozen=True, slots=True)
class ByteRun:
    """``num_bytes`` from ``source`` bytes behind the start of a sender's block to ``destination`` of a receiver's."""

    source: int
    destination: int
    num_bytes: int


def byte_runs(sender: Cut, receiver: Cut, share: Share, run: TokenRun, token_bytes: int) -> list[ByteRun]:
    """The bytes of one token run of a share, as few and as long as the layouts allow.

    ``token_bytes`` are those of one token of one head, K or V.
    """
    runs: list[ByteRun] = []
    for layer, half, head in product(share.layers, range(2), share.heads):
        source = _offset(sender, share.source, layer, half, head, run.source_slot) * token_bytes
        destination = _offset(receiver, share.destination, layer, half, head, run.destination_slot) * token_bytes
        num_bytes = run.num_tokens * token_bytes
        last = runs[-1] if runs else None
        if last and (last.source + last.num_bytes, last.destination + last.num_bytes) == (source, destination):
            runs[-1] = ByteRun(last.source, last.destination, last.num_bytes + num_bytes)
        else:
            runs.append(ByteRun(source, destination, num_bytes))
    return runs


def _offset(cut: Cut, rank: int, layer: int, half: int, head: int, slot: int) -> int:
    """Tokens of one head before this one in a block of ``rank``."""
    layers, heads = cut.layers(rank), cut.heads(rank)
    line = ((layer - layers.start) * 2 + half) * len(heads) + head - heads.start
    return line * cut.block_size + slot
