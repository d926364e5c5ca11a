"""Benchmarks of the operators and of whole optimizer steps; `pytest bench --benchmark-only`."""
