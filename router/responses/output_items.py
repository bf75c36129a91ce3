"""What a model says becomes output items, and the events that tell of them while they grow.

The order of the events of an item, and their members, are those of
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import orjson

from ..output import OutputDelta, TokenEntry
from ..parsing.deltas import CallArguments, CallDelta, CallStart
from ..wire_format import Json, token_logprobs
from .items import Status


class EventLog:
    """Server-sent events, numbered from 0."""

    def __init__(self) -> None:
        self._num_events = 0

    def event(self, name: str, **members: object) -> bytes:
        return self.written(name.encode(), orjson.dumps(members))

    def written(self, name: bytes, members: bytes) -> bytes:
        """``members`` is an object in JSON that is not empty."""
        number = self._num_events
        self._num_events += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (name, name, number, members[1:])


class OpenItem(ABC):
    """An output item that grows by pieces of text; what its methods return are events."""

    id_prefix: ClassVar[str]
    growth: ClassVar[str]
    """The events of its text, without ``.delta`` and ``.done``."""

    def __init__(self, log: EventLog, output_index: int, unique: str) -> None:
        self.id = self.id_prefix + unique
        self._log = log
        self._output_index = output_index
        self._pieces: list[str] = []
        self._delta_name = f"{self.growth}.delta".encode()
        self._delta_start = orjson.dumps(self.place)[:-1] + b',"delta":'

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    @abstractmethod
    def place(self) -> Json:
        """Where its text grows, as events say it."""

    @abstractmethod
    def item(self, status: Status) -> Json:
        """As it is now; while in progress it shows nothing of its text."""

    @abstractmethod
    def whole_text(self) -> bytes:
        """The events that tell its text once more, when it is complete."""

    def open(self) -> bytes:
        item = self.item("in_progress")
        return self._log.event("response.output_item.added", output_index=self._output_index, item=item)

    def grow(self, text: str, more: bytes = b"") -> bytes:
        """``more`` are further members of the event, each after a comma."""
        self._pieces.append(text)
        return self._log.written(self._delta_name, b"%b%b%b}" % (self._delta_start, orjson.dumps(text), more))

    def close(self, status: Status) -> bytes:
        told = self.whole_text()
        item = self.item(status)
        return told + self._log.event("response.output_item.done", output_index=self._output_index, item=item)


class TextItem(OpenItem):
    """An item whose text is the one part of its content."""

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self._output_index, "content_index": 0}

    @abstractmethod
    def part(self) -> Json: ...

    def open(self) -> bytes:
        return super().open() + self._log.event("response.content_part.added", **self.place, part=self.part())

    def whole_text(self) -> bytes:
        done = self._log.event(f"{self.growth}.done", **self.place, **self._done_members())
        return done + self._log.event("response.content_part.done", **self.place, part=self.part())

    def _done_members(self) -> Json:
        return {"text": self.text}


class Message(TextItem):
    id_prefix = "msg_"
    growth = "response.output_text"

    def __init__(self, log: EventLog, output_index: int, unique: str) -> None:
        super().__init__(log, output_index, unique)
        self._logprobs: list[Json] = []

    def say(self, text: str, entries: Sequence[TokenEntry]) -> bytes:
        logprobs = token_logprobs(entries)
        self._logprobs += logprobs
        return self.grow(text, b',"logprobs":' + orjson.dumps(logprobs))

    def part(self) -> Json:
        return {"type": "output_text", "annotations": [], "logprobs": self._logprobs, "text": self.text}

    def item(self, status: Status) -> Json:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _done_members(self) -> Json:
        return {"text": self.text, "logprobs": self._logprobs}


class Reasoning(TextItem):
    id_prefix = "rs_"
    growth = "response.reasoning_text"

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: Status) -> Json:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class Call(OpenItem):
    id_prefix = "fc_"
    growth = "response.function_call_arguments"

    def __init__(self, log: EventLog, output_index: int, unique: str, start: CallStart) -> None:
        super().__init__(log, output_index, unique)
        self.start = start

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self._output_index}

    def item(self, status: Status) -> Json:
        call = {"call_id": self.start.id, "name": self.start.name, "arguments": self.text}
        return {"id": self.id, "type": "function_call", "status": status, **call}

    def whole_text(self) -> bytes:
        return self._log.event(f"{self.growth}.done", **self.place, arguments=self.text)


class OutputItems:
    """The output of one response, fed with all its deltas; `items` are those that are complete.

    One item is open at a time. Log-probabilities come with the text of messages, as soon as it shows: those of
    reasoning, calls and their markers are left out.
    """

    def __init__(self, log: EventLog, new_id: Callable[[], str]) -> None:
        self.items: list[Json] = []
        self._log = log
        self._new_id = new_id
        self._open: OpenItem | None = None
        self._held_back: list[TokenEntry] = []
        """Of tokens whose text has not shown."""

    def feed(self, delta: OutputDelta) -> bytes:
        events = self._think(delta.reasoning) if delta.reasoning else b""
        if delta.text or self._open is None or isinstance(self._open, Message):
            self._held_back += delta.entries
        if delta.text:
            events += self._say(delta.text)
        return events + b"".join(map(self._call, delta.calls))

    def end(self, status: Status) -> bytes:
        """The last open item has this status; an answer of no tokens that show is an empty message."""
        events = b"" if self.items or self._open else self._begin(Message(self._log, 0, self._new_id()))
        if self._held_back and isinstance(self._open, Message):
            events += self._say("")
        return events + self._close(status)

    def _think(self, text: str) -> bytes:
        self._held_back = []
        if isinstance(self._open, Reasoning):
            return self._open.grow(text)
        item = Reasoning(self._log, self._next_index, self._new_id())
        return self._begin(item) + item.grow(text)

    def _say(self, text: str) -> bytes:
        entries, self._held_back = self._held_back, []
        if isinstance(self._open, Message):
            return self._open.say(text, entries)
        item = Message(self._log, self._next_index, self._new_id())
        return self._begin(item) + item.say(text, entries)

    def _call(self, delta: CallDelta) -> bytes:
        self._held_back = []
        match delta:
            case CallStart():
                return self._begin(Call(self._log, self._next_index, self._new_id(), delta))
            case CallArguments(index, text):
                assert isinstance(self._open, Call) and self._open.start.index == index, "calls come one by one"
                return self._open.grow(text)

    @property
    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: OpenItem) -> bytes:
        closed = self._close("completed")
        self._open = item
        return closed + item.open()

    def _close(self, status: Status) -> bytes:
        if self._open is None:
            return b""
        self.items.append(self._open.item(status))
        closed, self._open = self._open.close(status), None
        return closed
