"""Benchmarks: needles, questions, fidelity, memory, speed."""
