"""Prefill and decoding: the order in which layers run, and what they attend to."""
