"""Benchmarks of the operators and of the optimizer step: ``python -m bench.kernels``.

One file for each operator, the optimizer's step, and the complexity table of Ren & Goldfarb 2021
(Table 2). Every one holds its candidates against ``tnt_kernels.reference`` before it times them.
"""
