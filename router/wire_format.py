"""Results in OpenAI's wire format: one JSON body, or server-sent events written by hand around the text.

`WireFormat` is what a `Reply` needs of any endpoint; `ChatFormat` and `CompletionFormat` are those of the completions.
Which of them a request needs is settled when it is prepared.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import orjson

from .openai_errors import ApiError
from .output import OutputAssembler, OutputDelta, RankedToken, ScoredToken, TokenEntry
from .parsing.deltas import CallArguments, CallDelta, CallStart, WholeCall, whole_calls
from .token_usage import token_usage

if TYPE_CHECKING:
    from .prepare import PreparedRequest

DONE = b"data: [DONE]\n\n"

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks (OpenAI's own value)."""

Json = dict[str, object]


class WireFormat(ABC):
    """One answer, whose ``id`` the client sees; its deltas are given in order."""

    id: str
    may_leave_loop: ClassVar[bool] = False
    """Whether `body` looks at the assemblers alone, so that a long one can be written in a thread."""

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """What the first events of a choice are preceded by."""

    @abstractmethod
    def chunk(self, index: int, delta: OutputDelta) -> bytes:
        """The events that show one delta, if any."""

    def tell_usage(self, assemblers: Sequence[OutputAssembler]) -> None:
        """The events that follow carry this usage; for formats whose clients can ask for that."""
        raise AssertionError("nobody can ask for it here")

    @abstractmethod
    def ending(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        """The last events of a stream whose choices are all finished."""

    @abstractmethod
    def body(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        """The whole answer; every choice must be finished."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return error.event()


class ChoicesFormat(WireFormat):
    """Completions of some number of choices.

    ``created`` is in seconds since 1970; ``fingerprint`` changes with what computes the results.
    """

    may_leave_loop = True
    id_prefix: ClassVar[str]
    body_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, prepared: "PreparedRequest", unique: str, created: int, fingerprint: str) -> None:
        self.id = self.id_prefix + unique
        self._includes_usage = prepared.includes_usage
        self._head: Json = {
            "id": self.id,
            "object": self.body_object,
            "created": created,
            "model": prepared.model_name,
            "system_fingerprint": fingerprint,
        }
        chunk_head = orjson.dumps({**self._head, "object": self.chunk_object})
        self._chunk_start = b"data: " + chunk_head[:-1] + b',"choices":'
        self._chunk_end = (b',"usage":null' if prepared.includes_usage else b"") + b"}\n\n"

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, delta: OutputDelta) -> bytes:
        """One event; nothing for a delta that shows nothing."""
        if delta.is_empty:
            return b""
        finish = b"null" if delta.finish is None else b'"%b"' % self._finish_reason(delta).encode()
        logprobs = orjson.dumps(self._logprobs(delta.entries)) if delta.entries else b"null"
        return self._event(
            b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (index, self._text_member(delta), logprobs, finish)
        )

    def tell_usage(self, assemblers: Sequence[OutputAssembler]) -> None:
        self._chunk_end = b',"usage":' + orjson.dumps(usage_of(assemblers)) + b"}\n\n"

    def ending(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        return (self._usage_chunk(assemblers) if self._includes_usage else b"") + DONE

    def body(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        shown = self._shown(assemblers)
        choices = [
            {**self._whole_choice(index, assembler.output), **self._scores_of_choice(assembler)}
            for index, assembler in enumerate(shown)
        ]
        usage = usage_of(assemblers)
        return orjson.dumps({**self._head, "choices": choices, "usage": usage, **self._scores_of_prompt(shown[0])})

    def _scores_of_choice(self, assembler: OutputAssembler) -> Json:
        """Of its prompt, where there may be several prompts."""
        return {}

    def _scores_of_prompt(self, assembler: OutputAssembler) -> Json:
        """Of the prompt that all choices have."""
        return {}

    def _shown(self, assemblers: Sequence[OutputAssembler]) -> Sequence[OutputAssembler]:
        return assemblers

    def _whole_choice(self, index: int, output: OutputDelta) -> Json:
        return {
            "index": index,
            **self._message(output),
            "logprobs": self._logprobs(output.entries) if output.entries else None,
            "finish_reason": self._finish_reason(output),
        }

    def _usage_chunk(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        """The last chunk, without choices."""
        return self._chunk_start + b'[],"usage":' + orjson.dumps(usage_of(assemblers)) + b"}\n\n"

    def _event(self, choice: bytes) -> bytes:
        return self._chunk_start + b"[" + choice + b"]" + self._chunk_end

    def _finish_reason(self, delta: OutputDelta) -> str:
        """Of a delta that has one."""
        assert delta.finish is not None, "only what ends has a reason to end"
        return delta.finish

    @abstractmethod
    def _text_member(self, delta: OutputDelta) -> bytes:
        """The member of a streamed choice that holds the text."""

    @abstractmethod
    def _message(self, output: OutputDelta) -> Json:
        """The members of a whole choice that hold the text."""

    @abstractmethod
    def _logprobs(self, entries: Iterable[TokenEntry]) -> Json: ...


class ChatFormat(ChoicesFormat):
    """https://platform.openai.com/docs/api-reference/chat/object

    Reasoning, which OpenAI's endpoint does not show, comes as ``reasoning_content`` and under vLLM's newer name for it.
    """

    id_prefix = "chatcmpl-"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        return self._event(
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        )

    def _finish_reason(self, delta: OutputDelta) -> str:
        return "tool_calls" if delta.ends_in_calls else super()._finish_reason(delta)

    def _text_member(self, delta: OutputDelta) -> bytes:
        if delta.reasoning or delta.calls:
            return b'"delta":' + orjson.dumps(_structured_delta(delta))
        return b'"delta":{"content":%b}' % orjson.dumps(delta.text) if delta.text or delta.entries else b'"delta":{}'

    def _message(self, output: OutputDelta) -> Json:
        """Content is null, as at OpenAI, where the model has said nothing but something else."""
        calls = [_whole_call(call) for call in whole_calls(output.calls)]
        message: Json = {
            "role": "assistant",
            "content": output.text if output.text or not (calls or output.reasoning) else None,
            "refusal": None,
        }
        if output.reasoning:
            message |= _reasoning(output.reasoning)
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def _logprobs(self, entries: Iterable[TokenEntry]) -> Json:
        return {"content": token_logprobs(entries), "refusal": None}

    def _scores_of_prompt(self, assembler: OutputAssembler) -> Json:
        return _prompt_scores(assembler)


class CompletionFormat(ChoicesFormat):
    """https://platform.openai.com/docs/api-reference/completions/object"""

    id_prefix = "cmpl-"
    body_object = chunk_object = "text_completion"

    def __init__(self, prepared: "PreparedRequest", unique: str, created: int, fingerprint: str) -> None:
        super().__init__(prepared, unique, created, fingerprint)
        self._num_best = prepared.num_best

    def _shown(self, assemblers: Sequence[OutputAssembler]) -> Sequence[OutputAssembler]:
        """All, or of each prompt the ``num_best`` whose tokens are likeliest on average, those first."""
        if self._num_best is None:
            return assemblers
        ranked = (sorted(group, key=_mean_logprob, reverse=True) for group in _by_prompt(assemblers))
        return [assembler for group in ranked for assembler in group[: self._num_best]]

    def _scores_of_choice(self, assembler: OutputAssembler) -> Json:
        return _prompt_scores(assembler)

    def _text_member(self, delta: OutputDelta) -> bytes:
        return b'"text":%b' % orjson.dumps(delta.text)

    def _message(self, output: OutputDelta) -> Json:
        return {"text": output.text}

    def _logprobs(self, entries: Iterable[TokenEntry]) -> Json:
        entries = list(entries)
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [_legacy_top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }


def _prompt_scores(assembler: OutputAssembler) -> Json:
    """vLLM's ``prompt_logprobs``, if asked for: of each position an object by token id."""
    if not assembler.choice.shows_prompt_logprobs:
        return {}
    return {
        "prompt_logprobs": [
            ranked and {str(token.token_id): _ranked_token(token) for token in ranked}
            for ranked in assembler.ranked_prompt()
        ]
    }


def _ranked_token(token: RankedToken) -> Json:
    return {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": token.text}


def usage_of(assemblers: Iterable[OutputAssembler]) -> Json:
    used = token_usage(assemblers)
    return {
        "prompt_tokens": used.num_prompt,
        "completion_tokens": used.num_output,
        "total_tokens": used.num_total,
        "prompt_tokens_details": {"cached_tokens": used.num_cached},
        "completion_tokens_details": {"reasoning_tokens": used.num_reasoning},
    }


def _by_prompt(assemblers: Iterable[OutputAssembler]) -> list[list[OutputAssembler]]:
    groups: dict[int, list[OutputAssembler]] = {}
    for assembler in assemblers:
        groups.setdefault(id(assembler.choice.prompt), []).append(assembler)
    return list(groups.values())


def _mean_logprob(assembler: OutputAssembler) -> float:
    return assembler.sum_logprobs / max(1, assembler.num_output)


def _structured_delta(delta: OutputDelta) -> Json:
    made: Json = {}
    if delta.reasoning:
        made |= _reasoning(delta.reasoning)
    if delta.text:
        made["content"] = delta.text
    if delta.calls:
        made["tool_calls"] = _call_entries(delta.calls)
    return made


def _reasoning(text: str) -> Json:
    return {"reasoning_content": text, "reasoning": text}


def _call_entries(calls: Iterable[CallDelta]) -> list[Json]:
    """One entry a call: some clients take the first list of calls as it comes, whatever its indices say."""
    starts: dict[int, CallStart] = {}
    arguments: dict[int, str] = {}
    for call in calls:
        match call:
            case CallStart(index):
                starts[index] = call
                arguments[index] = ""
            case CallArguments(index, text):
                arguments[index] = arguments.get(index, "") + text
    return [_call_entry(index, starts.get(index), text) for index, text in arguments.items()]


def _call_entry(index: int, start: CallStart | None, arguments: str) -> Json:
    if start is None:
        return {"index": index, "function": {"arguments": arguments}}
    function = {"name": start.name, "arguments": arguments}
    return {"index": index, "id": start.id, "type": "function", "function": function}


def _whole_call(call: WholeCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _chat_token(token: ScoredToken | TokenEntry) -> Json:
    assert token.logprob is not None, "only a prompt's first token has none, and a chat shows no prompt"
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.piece)}


def token_logprobs(entries: Iterable[TokenEntry]) -> list[Json]:
    """As chats and responses have them."""
    return [{**_chat_token(entry), "top_logprobs": [_chat_token(token) for token in entry.top]} for entry in entries]


def _legacy_top(entry: TokenEntry) -> dict[str, float] | None:
    """The alternatives and the token itself, by text; of tokens with the same text the likeliest."""
    if entry.logprob is None:
        return None
    top = {token.text: _finite(token.logprob) for token in reversed(entry.top)}
    return top if entry.text in top else {**top, entry.text: _finite(entry.logprob)}
