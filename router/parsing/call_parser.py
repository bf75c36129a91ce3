"""What the parsers of all families share: text that waits to be settled, and the reading of one call.

A parser is a machine whose states are methods. Each looks at the text that waits, settles what it can and says whether
the state that is then current should look again; ``False`` waits for more text. Once the text is at its end a state
must settle all that waits.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Container

from .deltas import CallArguments, CallDelta, CallStart, ParsedText
from .json_object import CallHead, ObjectScanner, is_object, is_other_object, read_call, read_head
from .markers import unfinished

SPACE = " \t\r\n"

State = Callable[[], bool]


class CallParser(ABC):
    """Calls of the functions ``names`` are told apart from content.

    What is no call after all, bad JSON or an unknown name, is content as the model wrote it, markers included. When the
    answer is streamed a call has begun before its arguments are complete, so they are passed on as they come and may be
    invalid; else they are looked at first. Space between content and a call is dropped.
    """

    def __init__(self, names: Container[str], is_stream: bool) -> None:
        self._names = names
        self._is_stream = is_stream
        self._waiting = ""
        self._is_ended = False
        self._space = ""
        """The end of the content so far, not shown while a call may follow it."""
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._num_calls = 0
        self._spelled = ""
        """What was read of the call at hand, from its marker on; content if it turns out to be no call."""
        self._scanner = ObjectScanner()
        self._num_scanned = 0
        self._name = self._arguments = ""
        self._then: State = self.after_call
        self._state: State = self.begin

    def feed(self, text: str) -> ParsedText:
        self._waiting += text
        while self._state():
            pass
        parsed = ParsedText(content="".join(self._content), calls=tuple(self._calls))
        self._content, self._calls = [], []
        return parsed

    def flush(self) -> ParsedText:
        self._is_ended = True
        parsed = self.feed("") + ParsedText(content=self._space)
        self._space = ""
        return parsed

    # --- what a family says --------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> bool:
        """The state in which an answer starts."""

    @abstractmethod
    def after_call(self) -> bool:
        """The state that follows the last bracket of a call."""

    def after_failure(self) -> bool:
        """The state that follows what looked like a call and was none."""
        return self.begin()

    # --- steps of a family's states ------------------------------------------------------------

    def go(self, state: State) -> bool:
        self._state = state
        return True

    def say(self, text: str) -> None:
        """Content, but for space at its end."""
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._content.append(shown)
        self._space = text[len(shown) :]

    def say_until(self, marker: str, then: State) -> bool:
        """Content up to a marker, which begins a call."""
        start = self._waiting.find(marker)
        if start >= 0:
            self.say(self._waiting[:start])
            self._spelled = marker
            self._waiting = self._waiting[start + len(marker) :]
            return self.go(then)
        border = len(self._waiting) if self._is_ended else unfinished(self._waiting, marker)
        self.say(self._waiting[:border])
        self._waiting = self._waiting[border:]
        return False

    def skip_space(self) -> bool:
        """True when something else waits; what is skipped counts as part of the call at hand."""
        rest = self._waiting.lstrip(SPACE)
        self._spelled += self._waiting[: len(self._waiting) - len(rest)]
        self._waiting = rest
        return bool(rest)

    def may_become(self, marker: str) -> bool:
        """What waits is a proper beginning of the marker, and more may follow."""
        return not self._is_ended and len(self._waiting) < len(marker) and marker.startswith(self._waiting)

    def take(self, text: str) -> bool:
        """Skip this text if it is what waits."""
        if not self._waiting.startswith(text):
            return False
        self._spelled += text
        self._waiting = self._waiting[len(text) :]
        return True

    def fail(self) -> bool:
        """The call at hand is none."""
        self.say(self._spelled)
        self._spelled = ""
        return self.go(self.after_failure)

    def start_call(self, name: str) -> None:
        """Content is over, and the space at its end with it."""
        self._space = self._spelled = ""
        self._calls.append(CallStart(self._num_calls, f"call_{uuid.uuid4().hex}", name))
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        if text:
            self._calls.append(CallArguments(self._num_calls - 1, text))

    # --- one call, written as an object with name and arguments ----------------------------------

    def read_object(self) -> bool:
        """The state in which an object is expected, after the space before it."""
        if not self.skip_space():
            return self.fail() if self._is_ended else False
        if self._waiting[0] != "{":
            return self.fail()
        self._scanner = ObjectScanner()
        self._num_scanned = 0
        return self.go(self._read_head)

    def _read_head(self) -> bool:
        head = read_head(self._waiting, self._names)
        if head is not None:
            return self._begin_arguments(head)
        if is_other_object(self._waiting, self._names):
            return self.fail()
        end = self._scanner.feed(self._waiting[self._num_scanned :])
        if end is None and not self._is_ended:
            self._num_scanned = len(self._waiting)
            return False
        end = len(self._waiting) if end is None else self._num_scanned + end
        text, self._waiting = self._waiting[:end], self._waiting[end:]
        call = read_call(text, self._names)
        if call is None:
            self._spelled += text
            return self.fail()
        self.start_call(call.name)
        self.add_arguments(call.arguments)
        return self.go(self.after_call)

    def _begin_arguments(self, head: CallHead) -> bool:
        self._spelled += self._waiting[: head.num_chars]
        self._waiting = self._waiting[head.num_chars :]
        return self.read_arguments(head.name, self._end_object)

    def read_arguments(self, name: str, then: State) -> bool:
        """Go to the state that passes on the object which waits."""
        self._scanner = ObjectScanner()
        self._name, self._arguments, self._then = name, "", then
        if self._is_stream:
            self.start_call(name)
        return self.go(self._read_arguments)

    def _read_arguments(self) -> bool:
        end = self._scanner.feed(self._waiting)
        text = self._waiting[:end]
        self._waiting = self._waiting[len(text) :]
        if self._is_stream:
            self.add_arguments(text)
            return end is not None and self.go(self._then)
        self._arguments += text
        if end is None and not self._is_ended:
            return False
        return self._check_arguments(is_whole=end is not None)

    def _check_arguments(self, is_whole: bool) -> bool:
        """Arguments that the end of the answer cuts off are passed on as far as they came, as in a stream."""
        if is_whole and not is_object(self._arguments):
            self._spelled += self._arguments
            return self.fail()
        self.start_call(self._name)
        self.add_arguments(self._arguments)
        return self.go(self._then if is_whole else self.after_call)

    def _end_object(self) -> bool:
        """The rest of the object after its arguments; models that forget its last bracket are forgiven."""
        if not self.skip_space():
            return self._is_ended and self.go(self.after_call)
        if self.take("}") or self._waiting[0] != ",":
            return self.go(self.after_call)
        self._scanner = ObjectScanner()
        self._scanner.feed("{")
        return self.go(self._skip_members)

    def _skip_members(self) -> bool:
        end = self._scanner.feed(self._waiting)
        self._waiting = "" if end is None else self._waiting[end:]
        return (end is not None or self._is_ended) and self.go(self.after_call)
