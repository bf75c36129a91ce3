"""The router: HTTP and text on one side, workers and tokens on the other. It imports `core` only.

How a request passes through, from the client to the workers and back:

====================  ================================================================================
``server``            the process: listening socket, signals, drain
``app``               what all endpoints share, and the app that they make together
``*_routes``          the endpoints; ``openapi`` describes them, ``openai_answers`` their answers
``access``            the door: keys, limits, tenants, usage, TLS, request ids, deadlines
``openai_api``        the bodies of requests; ``openai_errors`` the answers that are no result
``prepare``           a body becomes choices in tokens (``prompts``, ``sampling``, ``chat_template``)
``tools``             what the model may call; ``conversation`` tells it, ``answer_grammar`` holds it to that
``offline``           the same door for `LLM`, which has no bodies
``text``              the model's text: ``tokenizer``, ``gguf_tokenizer``, ``detokenizer``
``placement``         which pair of workers: a pure decision over ``fleet`` and ``prefix_map``
``ledger``            one entry a choice: its attempts, its legs, its tokens in order
``dispatcher``        the control plane: messages to and from workers, failures, retries
``streams``           one request's events on their way to its client
``output``            tokens become text (``stop_strings``); ``wire_format`` puts it into OpenAI's form
``parsing``           reasoning and tool calls are told apart from the text, as ``chat_syntax`` has settled
``responses``         the Responses API: items, events, conversations that are kept
``tokenization``      ``/tokenize`` and ``/detokenize``
``pages``             what a browser is shown; ``status`` its numbers, ``history`` those of the last minutes
``metrics``           what Prometheus reads
``telemetry``         ``access_log`` and ``tracing``, which tell of a request by its ``summary``
====================  ================================================================================
"""
