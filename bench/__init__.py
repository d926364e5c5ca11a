"""Benchmarks and experiments: run them as modules from the checkout, `python -m bench....`."""
