"""Calls as Mistral's models write them, after the special token ``[TOOL_CALLS]``.

Up to tokenizer v7 a list of objects follows; from v11 on a name, ``[ARGS]`` and the arguments, with the marker before
each call (mistral-common's ``tokens/tokenizers/instruct.py``). v11 has ``[CALL_ID]`` and an id after the name.
"""

import re

from .call_parser import CallParser

BEGIN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"

_WORD = re.compile(r"[\w.-]*")


class MistralCalls(CallParser):
    """Both forms, told apart by the bracket that opens a list."""

    def begin(self) -> bool:
        return self.say_until(BEGIN, self._read_form)

    def _read_form(self) -> bool:
        if not self.skip_space():
            return self._is_ended and self.fail()
        self._is_list = self.take("[")
        return self.go(self.read_object if self._is_list or self._waiting[0] == "{" else self._read_name)

    def after_call(self) -> bool:
        self._spelled = ""
        return self.go(self._read_separator if self._is_list else self.begin)

    def _read_separator(self) -> bool:
        if not self.skip_space():
            return False
        if self.take(","):
            return self.go(self.read_object)
        if not self.take("]"):
            self._space = self._spelled
        return self.go(self.begin)

    def _read_name(self) -> bool:
        name = self._word()
        if name is None:
            return False
        self._name = name
        return self.go(self._read_marks) if name in self._names else self.fail()

    def _read_marks(self) -> bool:
        """What stands between the name and the arguments."""
        if not self.skip_space():
            return self._is_ended and self.fail()
        if self._waiting[0] == "{":
            return self.read_arguments(self._name, self.after_call)
        if self.take(CALL_ID):
            return self.go(self._read_id)
        if self.may_become(ARGS) or self.may_become(CALL_ID):
            return False
        return self.take(ARGS) or self.fail()

    def _read_id(self) -> bool:
        return self._word() is not None and self.go(self._read_marks)

    def _word(self) -> str | None:
        """Skip a name or an id; ``None`` as long as more of it may follow."""
        found = _WORD.match(self._waiting)
        assert found is not None, "a word may be empty"
        if found.end() == len(self._waiting) and not self._is_ended:
            return None
        self.take(found[0])
        return found[0]
