"""OpenAI's Responses API: conversations made of items, kept here so that a client sends only what is new.

A request becomes one for a chat (``bodies``, ``items``, ``prepare``) and from there goes the way of all completions.
Its answer is written as items, whole or in events (``output_items``, ``format``), and kept for a while (``store``).
https://platform.openai.com/docs/api-reference/responses
"""
