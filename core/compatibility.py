"""What two processes must agree in before KV goes from one to the other.

The router asks here when a worker registers, and both workers of a pair when they meet: they do not trust it alone.
"""

from dataclasses import fields
from operator import attrgetter

from .kv_layout import KvLayout
from .messages import PROTOCOL_VERSION, WorkerCard

MUST_BE_EQUAL = ("model", "weights", "num_layer_groups", *(f"layout.{field.name}" for field in fields(KvLayout)))
"""Of `WorkerCard`. A layer group is told by its number, so both sides must cut the layers alike."""

Sides = tuple[str, str]
"""How a message calls the one and the other, so that it is clear to both."""
HERE_AND_THERE: Sides = ("here", "there")


def mismatch(here: WorkerCard, there: WorkerCard, sides: Sides = HERE_AND_THERE) -> str:
    """Every field in which two workers differ that must be equal, with both values; empty if there is none."""
    values = ((name, attrgetter(name)(here), attrgetter(name)(there)) for name in MUST_BE_EQUAL)
    return "; ".join(difference(name, mine, other, sides) for name, mine, other in values if mine != other)


def protocol_mismatch(there: int, sides: Sides = HERE_AND_THERE) -> str:
    """Why a process that speaks this version can't be understood."""
    return difference("protocol version", PROTOCOL_VERSION, there, sides)


def difference(name: str, here: object, there: object, sides: Sides) -> str:
    return f"{name} differs: {here} {sides[0]}, {there} {sides[1]}"
