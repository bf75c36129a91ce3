"""Decode: takes in KV that arrives, runs continuous batching, a token a step for every running request."""
