"""Prefill: computes prompts in chunks, samples the first token, ships the KV to the decode side."""
