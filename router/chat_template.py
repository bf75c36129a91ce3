"""Chat templates, rendered as Hugging Face's ``apply_chat_template`` does, without importing transformers.

Source of the conventions (whitespace control, the functions a template may call, how a final message is continued):
https://huggingface.co/docs/transformers/chat_templating and transformers/utils/chat_template_utils.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .detokenizer import UnsupportedTokenizer

ChatMessage = dict[str, object]
"""One message as a template sees it: ``role``, ``content`` (a string) and whatever else it may carry."""

ToolOffer = dict[str, object]
"""One function as a template sees it: ``{"type": "function", "function": {…}}``, as OpenAI has it."""

_END_MARK = "<<crossdock: the final message ends here>> "
"""Ends in a space, so that a template which trims the message can be told from one which does not."""


class _NoContent(str):
    """Empty text that a template's ``is none`` takes for none, and everything else for text."""

    __slots__ = ()


NO_CONTENT = _NoContent()
"""The content of a message without any: most templates want a string there, and some look for none."""


class CallArguments(dict[str, object]):
    """Arguments of a call: an object to templates that want one, JSON as it was given to those that add it to text."""

    __slots__ = ("_text",)

    def __init__(self, members: Mapping[str, object], text: str) -> None:
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What a template may raise on data that it was not written for."""


class TemplateRefused(ValueError):
    """These messages cannot be rendered; the text is the template's own where it has one."""


class ChatTemplate:
    """One compiled template.

    ``special_tokens`` are its variables ``bos_token``, ``eos_token``, …; `variables` are the names of all it looks at.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises `UnsupportedTokenizer` when the source is no valid template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedTokenizer(
                f"the chat template has a syntax error in line {error.lineno}: {error}"
            ) from None

    def knows(self, word: str) -> bool:
        """Whether the template's source mentions the word, such as a role or a field of a message."""
        return word in self.source

    @cached_property
    def shows_system(self) -> bool:
        """Whether there may be a system message before that of a user. Some templates refuse it, some drop it."""
        mark = _END_MARK.strip()
        try:
            return mark in self.render([{"role": "system", "content": mark}, {"role": "user", "content": "hi"}])
        except TemplateRefused:
            return False

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = {},
        tools: Sequence[ToolOffer] | None = None,
    ) -> str:
        """Raises `TemplateRefused`. ``variables`` override the special tokens; never the names used here."""
        assert not (add_generation_prompt and continue_final_message), "refused at the door"
        variables = {**variables, "tools": tools}
        if continue_final_message:
            return self._render_unfinished(messages, variables)
        return self._render(messages, add_generation_prompt, variables)

    def _render(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": list(messages),
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TEMPLATE_FAULTS as error:
            raise TemplateRefused(f"the chat template refused the messages: {error}") from None

    def _render_unfinished(self, messages: Sequence[ChatMessage], variables: Mapping[str, object]) -> str:
        """The rendering up to the end of the final message's content: a mark put there is found again and cut at."""
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise TemplateRefused("continue_final_message needs a final message with text content")
        marked = [*messages[:-1], {**messages[-1], "content": content + _END_MARK}]
        rendered = self._render(marked, add_generation_prompt=False, variables=variables)
        before, mark, after = rendered.rpartition(_END_MARK.strip())
        if not mark or content.strip() not in rendered:
            raise TemplateRefused("continue_final_message: the chat template does not show the whole final message")
        return before if after.startswith(" ") else before.rstrip()


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what to train on; for rendering its content stands for itself."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.tests["none"] = lambda value: value is None or isinstance(value, _NoContent)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
