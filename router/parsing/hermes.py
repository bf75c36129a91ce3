"""Calls as Hermes and Qwen models write them: ``<tool_call>`` an object with name and arguments ``</tool_call>``.

https://github.com/NousResearch/Hermes-Function-Calling
"""

from .call_parser import CallParser

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesCalls(CallParser):
    """An end marker that is missing is forgiven."""

    def begin(self) -> bool:
        return self.say_until(BEGIN, self.read_object)

    def after_call(self) -> bool:
        self._spelled = ""
        if not self.skip_space():
            return False
        if self.may_become(END):
            return False
        if not self.take(END):
            self._space = self._spelled
        return self.go(self.begin)
