"""What parsers make of a model's text, and the promise of every parser."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; calls of one answer are numbered from 0, and no two answers share an id."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call that has begun: a piece of the JSON text that the model writes."""

    index: int
    text: str


CallDelta = CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What one piece of text has settled; where it settles several things, they come in this order."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __add__(self, later: "ParsedText") -> "ParsedText":
        return ParsedText(self.reasoning + later.reasoning, self.content + later.content, self.calls + later.calls)


class TextParser(Protocol):
    """Reads one answer, in pieces.

    What all pieces together give does not depend on how the text is cut. Nothing is shown of a marker before it is
    whole, and what only looked like one is content. What a parser has given is never taken back.
    """

    def feed(self, text: str) -> ParsedText: ...

    def flush(self) -> ParsedText:
        """What was held back, once nothing more can follow."""
        ...


class PlainText:
    """The parser of answers that are content from the first character to the last."""

    def feed(self, text: str) -> ParsedText:
        return ParsedText(content=text)

    def flush(self) -> ParsedText:
        return ParsedText()


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A finished call. ``arguments`` is the JSON text as the model wrote it, which need not be valid."""

    id: str
    name: str
    arguments: str


def whole_calls(deltas: Iterable[CallDelta]) -> list[WholeCall]:
    """The calls of one answer, from all deltas of it."""
    starts: dict[int, CallStart] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        match delta:
            case CallStart(index):
                starts[index] = delta
                arguments[index] = []
            case CallArguments(index, text):
                arguments[index].append(text)
    return [WholeCall(start.id, start.name, "".join(arguments[index])) for index, start in starts.items()]
