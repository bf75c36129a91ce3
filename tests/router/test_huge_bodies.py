"""A body may be megabytes of mistakes: they cost no more than the first of them."""

import pytest
from pydantic import ValidationError

from crossdock.router.openai_api import ChatCompletionRequest
from crossdock.router.openai_errors import of_validation

HELLO = {"role": "user", "content": "hi"}
MANY = range(5000)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [1 for _ in MANY]}, "messages.0"),
        ({"messages": [{} for _ in MANY]}, "messages.0.role"),
        ({"messages": [HELLO, {"role": "user", "content": [1 for _ in MANY]}]}, "messages.1.content.0"),
        ({"messages": [{**HELLO, **{f"x{n}": 1 for n in MANY}}]}, "messages.0.x0"),
        ({"messages": [{**HELLO, "role": "assistant", "tool_calls": [1 for _ in MANY]}]}, "messages.0.tool_calls.0"),
        ({f"x{n}": 1 for n in MANY}, "x0"),
        ({"metadata": {f"x{n}": 1 for n in MANY}}, "metadata"),
        ({"logit_bias": {f"x{n}": "y" for n in MANY}}, "logit_bias"),
        ({"stop": [1 for _ in MANY]}, "stop"),
        ({"stop_token_ids": ["x" for _ in MANY]}, "stop_token_ids"),
    ],
)
def test_of_thousands_of_faults_a_few_are_looked_at_and_one_is_told(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ValidationError) as faults:
        ChatCompletionRequest.model_validate({"messages": [HELLO], **fields})
    assert faults.value.error_count() <= 20
    error = of_validation(faults.value.errors())
    assert (error.status, error.param) == (400, param)
    assert len(error.message) < 300
