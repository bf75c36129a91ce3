"""From the body of a request to the choices that workers are asked for.

Pure: what it needs of the world, the limits of the workers and random seeds, are arguments. Whatever cannot be served
is refused here with an `ApiError` that names the field, so that nothing behind this door meets an id outside the
vocabulary or a request longer than the pool.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ..core.messages import WorkerCard
from ..core.request import SamplingParams
from .answer_grammar import answer_grammar
from .grammar import WantedGrammar, wanted_grammar
from .openai_api import ChatCompletionRequest, CompletionFields, CompletionRequest
from .openai_errors import ApiError
from .output import PLAIN, Choice, OutputSyntax, PreparedPrompt
from .prompts import chat_prompt, prompts_of
from .sampling import check_ids, choice_seed, sampling_params
from .text import TextModel
from .tools import answer_syntax, thought_begun
from .wire_format import ChatFormat, CompletionFormat, WireFormat

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of ``/v1/completions`` where the client says nothing, as at OpenAI."""

MAX_PROMPT_SCORES = 1 << 20
"""Log-probabilities of prompt tokens in one answer, which repeats them in each choice: some 60 MB of JSON."""

CONTEXT_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for prompts that are too long for the model."""

DrawSeed = Callable[[], int]
"""A source of random seeds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the workers allow: tokens of prompt and output together, ids below ``vocab_size``, choices of a request.

    ``roomiest`` are the cards of the pair that holds the most choices over one prompt.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    max_choices: int
    roomiest: tuple[WorkerCard, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """``choices`` are in the order of their index: all of the first prompt, then all of the second, …

    ``format`` makes the writer of the answer; see `MakeFormat`. ``num_best`` is how many choices of each prompt are
    shown, the best, where that is not all. ``repeats_usage`` has every streamed chunk tell the usage so far.
    """

    model_name: str
    choices: tuple[Choice, ...]
    is_stream: bool
    includes_usage: bool
    format: "MakeFormat"
    priority: int | None = None
    cache_salt: str | None = None
    num_best: int | None = None
    repeats_usage: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """A prompt counts once, however many choices it has."""
        return sum({id(choice.prompt): len(choice.prompt.token_ids) for choice in self.choices}.values())

    @property
    def most_tokens(self) -> int:
        """Prompts and outputs are never more."""
        return self.num_prompt_tokens + sum(choice.params.max_tokens or 0 for choice in self.choices)


MakeFormat = Callable[[PreparedRequest, str, int, str], WireFormat]
"""Of the request, a unique string for the id, the time (seconds since 1970) and the fingerprint of what computes."""


def prepare_chat(body: ChatCompletionRequest, text: TextModel, limits: Limits, draw_seed: DrawSeed) -> PreparedRequest:
    """Raises `ApiError`. Without ``max_tokens`` the output may fill the model."""
    check_model(body.model, limits.model_name)
    _check_number("n", body.num_generated, limits)
    prompt = chat_prompt(body, text)
    params = replace(
        sampling_params(body, text, limits.vocab_size),
        grammar=_admitted(answer_grammar(body, text, thought_begun(body, text, prompt)), text),
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    params = fitted(params, prompt, limits.max_model_len, limits, "messages")
    check_room("n", body.num_generated, prompt, limits)
    choices = choices_of(body, prompt, params, draw_seed, syntax=answer_syntax(body, text, prompt))
    return _prepared(body, choices, limits, ChatFormat)


def prepare_completion(
    body: CompletionRequest, text: TextModel, limits: Limits, draw_seed: DrawSeed
) -> PreparedRequest:
    """Raises `ApiError`."""
    check_model(body.model, limits.model_name)
    num_shown, num_generated = body.n or 1, body.num_generated
    is_ranked = num_generated > num_shown
    params = replace(
        sampling_params(body, text, limits.vocab_size),
        grammar=_admitted(wanted_grammar(body), text),
        max_tokens=body.max_tokens,
        logprobs=0 if body.logprobs is None and is_ranked else body.logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
    )
    prompts = prompts_of(body.prompt, "prompt", text, limits.vocab_size)
    field = "best_of" if is_ranked else "n"
    _check_number(field, len(prompts) * num_generated, limits)
    choices: list[Choice] = []
    for prompt in prompts:
        fit = fitted(params, prompt, DEFAULT_COMPLETION_TOKENS, limits, "prompt")
        check_room(field, num_generated, prompt, limits)
        made = choices_of(body, prompt, fit, draw_seed, first=len(choices), echo=bool(body.echo))
        choices += [dataclasses.replace(choice, shows_logprobs=body.logprobs is not None) for choice in made]
    return _prepared(body, choices, limits, CompletionFormat, num_shown if is_ranked else None)


def _admitted(wanted: WantedGrammar | None, text: TextModel) -> str:
    """The grammar, compiled once to see that it does; empty for none."""
    return text.grammars.admit(wanted.grammar, wanted.field) if wanted else ""


def check_model(model: str | None, served: str) -> None:
    """Raises `ApiError` for another model than the one served."""
    if model is not None and model != served:
        raise ApiError.unknown_model(model)


def _check_number(field: str, num_choices: int, limits: Limits) -> None:
    if num_choices > limits.max_choices:
        raise ApiError.invalid(field, f"{num_choices} choices are asked for, the most is {limits.max_choices}.")


def _check_scores(choices: Sequence[Choice]) -> None:
    asked = [(len(choice.prompt.token_ids), choice.params.prompt_logprobs) for choice in choices]
    num_scores = sum(num_tokens * (1 + num_top) for num_tokens, num_top in asked if num_top is not None)
    if num_scores > MAX_PROMPT_SCORES:
        message = f"{num_scores} log-probabilities of prompt tokens are asked for, the most is {MAX_PROMPT_SCORES}."
        raise ApiError.invalid("prompt_logprobs", message)


def check_room(field: str, num_choices: int, prompt: PreparedPrompt, limits: Limits) -> None:
    """Raises `ApiError` for more choices than any pair can hold, who share the prompt but write each for itself."""
    num_prompt = len(prompt.token_ids)
    most = max(0, min((card.max_choices(num_prompt) for card in limits.roomiest), default=num_choices))
    if num_choices > most:
        message = f"{num_choices} choices over {num_prompt} prompt tokens are asked for, the workers hold {most}."
        raise ApiError.invalid(field, message)


def fitted(
    params: SamplingParams, prompt: PreparedPrompt, default_max_tokens: int, limits: Limits, field: str
) -> SamplingParams:
    """With ``max_tokens`` settled; raises `ApiError` where prompt and output do not fit the model."""
    num_prompt = len(prompt.token_ids)
    if num_prompt == 0:
        raise ApiError.invalid(field, f"Invalid '{field}': the prompt is empty, it has no tokens.")
    check_ids(field, prompt.token_ids, limits.vocab_size)
    room = limits.max_model_len - num_prompt
    max_tokens = max(1, min(default_max_tokens, room)) if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise ApiError.invalid(
            field,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the {field}, {max_tokens} in the completion).",
            CONTEXT_EXCEEDED,
        )
    if params.min_tokens > max_tokens:
        raise ApiError.invalid(
            "min_tokens", f"Invalid 'min_tokens': {params.min_tokens} is more than 'max_tokens', which is {max_tokens}."
        )
    return replace(params, max_tokens=max_tokens)


def choices_of(
    body: CompletionFields,
    prompt: PreparedPrompt,
    params: SamplingParams,
    draw_seed: DrawSeed,
    first: int = 0,
    echo: bool = False,
    syntax: OutputSyntax = PLAIN,
) -> list[Choice]:
    """The choices to generate of one prompt, numbered from ``first``; with a seed equal prompts get equal choices."""
    seed = draw_seed() if body.seed is None else body.seed
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return [
        Choice(
            first + k,
            prompt,
            replace(params, seed=choice_seed(seed, k)),
            stop,
            echo,
            bool(body.stream),
            syntax,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )
        for k in range(body.num_generated)
    ]


def _prepared(
    body: CompletionFields, choices: Sequence[Choice], limits: Limits, format: MakeFormat, num_best: int | None = None
) -> PreparedRequest:
    _check_scores(choices)
    options = body.stream_options
    return PreparedRequest(
        limits.model_name,
        tuple(choices),
        bool(body.stream),
        options is not None and bool(options.include_usage),
        format,
        body.priority,
        body.cache_salt,
        num_best,
        options is not None and bool(options.continuous_usage_stats),
    )
