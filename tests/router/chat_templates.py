"""Chat templates in the manner of the families that call tools and think, written short for tests."""

END = "{{ '\n' }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
OFFER = "{% if tools %}TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}{{ '\n' }}{% endif %}"
TURN = "{% for m in messages %}{{ m.role }}:{{ m.content }}"
CALLS = "{% for call in m.tool_calls or [] %}"
NINE = "|length != 9 %}{{ raise_exception('nine!') }}{% endif %}"

PLAIN = TURN + END
QWEN = OFFER + TURN + CALLS + "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}" + END
QWEN_THINKING = QWEN + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
DEEPSEEK = TURN + END + "{{ '<think>\n' }}"
LLAMA = OFFER + TURN + CALLS + "<|python_tag|>{{ call.function | tojson }}{% endfor %}" + END
MISTRAL = (
    OFFER
    + TURN
    + "{% if m.tool_call_id is defined and m.tool_call_id"
    + NINE
    + "{% if m.tool_calls %}[TOOL_CALLS] ["
    + CALLS
    + "{% if call.id"
    + NINE
    + "{{ call | tojson }}{% endfor %}]{% endif %}"
    + END
)
MISTRAL_ARGS = OFFER + TURN + CALLS + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ '{}' }}{% endfor %}" + END
UNREADABLE = OFFER + TURN + CALLS + "<invoke>{{ call | tojson }}</invoke>{% endfor %}" + END
