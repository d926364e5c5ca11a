"""Benchmarks of the operators: ``python -m tnt_kernels bench``, and what other benchmarks share."""
