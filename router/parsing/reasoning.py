"""Models that think before they answer: what stands between ``<think>`` and ``</think>`` is reasoning.

DeepSeek-R1, Qwen3 and their kin. Some chat templates open the thought in the prompt: the output has only its end then.
"""

from .deltas import ParsedText, TextParser
from .markers import unfinished

BEGIN = "<think>"
END = "</think>"
SPACE = " \t\r\n"


class ThinkParser:
    """Reasoning is told apart from the answer, which ``answer`` reads; space around either is dropped.

    ``is_open`` says that the prompt has begun the thought. Else an answer without a thought is an answer from its first
    character.
    """

    def __init__(self, answer: TextParser, is_open: bool) -> None:
        self._answer = answer
        self._is_open = is_open
        self._state = self._begin
        self._waiting = ""
        self._is_ended = False

    def feed(self, text: str) -> ParsedText:
        self._waiting += text
        return self._state()

    def flush(self) -> ParsedText:
        self._is_ended = True
        return self._state() + self._answer.flush()

    def _begin(self) -> ParsedText:
        text = self._waiting.lstrip(SPACE)
        if len(text) < len(BEGIN) and BEGIN.startswith(text) and not self._is_ended:
            return ParsedText()
        if text.startswith(BEGIN) or self._is_open:
            self._waiting = text.removeprefix(BEGIN)
            self._state = self._skip_space
        else:
            self._state = self._read_answer
        return self._state()

    def _skip_space(self) -> ParsedText:
        self._waiting = self._waiting.lstrip(SPACE)
        if not self._waiting:
            return ParsedText()
        self._state = self._think
        return self._state()

    def _think(self) -> ParsedText:
        end = self._waiting.find(END)
        if end >= 0:
            reasoning = self._waiting[:end].rstrip(SPACE)
            self._waiting = self._waiting[end + len(END) :]
            self._state = self._skip_space_before_answer
            return ParsedText(reasoning) + self._state()
        border = len(self._waiting) if self._is_ended else unfinished(self._waiting, END)
        shown = self._waiting[:border] if self._is_ended else self._waiting[:border].rstrip(SPACE)
        self._waiting = self._waiting[len(shown) :]
        return ParsedText(shown)

    def _skip_space_before_answer(self) -> ParsedText:
        self._waiting = self._waiting.lstrip(SPACE)
        if not self._waiting:
            return ParsedText()
        self._state = self._read_answer
        return self._state()

    def _read_answer(self) -> ParsedText:
        text, self._waiting = self._waiting, ""
        return self._answer.feed(text)
