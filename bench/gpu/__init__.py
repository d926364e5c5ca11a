"""Everything there is to do on a GPU, in one job of less than ten minutes: ``python -m bench.gpu``.

Builds the extension with CUDA, runs the GPU's tests, sanitizes, measures and reports, with whatever
PyTorch and Triton are installed and without a network. Each stage is a process of its own: one that
fails, hangs or lacks a tool is said to, and the others run. What is measured is written as it is
measured.
"""
