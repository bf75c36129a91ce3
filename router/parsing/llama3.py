"""Calls as Llama 3 models write them: the whole answer is one object, or several with ``;`` between them.

https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md. The special token
``<|python_tag|>`` may stand before them, and after prose too.
"""

from .call_parser import CallParser

PYTHON_TAG = "<|python_tag|>"


class Llama3Calls(CallParser):
    """An object that does not open the answer or follow another call is prose, unless the tag stands before it."""

    def begin(self) -> bool:
        if not self.skip_space():
            return self._is_ended and self.fail()
        if self.may_become(PYTHON_TAG):
            return False
        if self._waiting[0] == "{" or self.take(PYTHON_TAG):
            return self.go(self.read_object)
        return self.fail()

    def after_failure(self) -> bool:
        return self.say_until(PYTHON_TAG, self.read_object)

    def after_call(self) -> bool:
        self._spelled = ""
        return self.go(self._read_separator)

    def _read_separator(self) -> bool:
        if not self.skip_space():
            return False
        self.take(";")
        return self.go(self.begin)
