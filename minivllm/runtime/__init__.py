"""Requests in, tokens and text out: sampling, tokenization, stopping, scheduling and the engine."""
