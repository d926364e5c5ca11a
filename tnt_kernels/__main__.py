"""``python -m tnt_kernels``: the page to paste into a bug report."""

from tnt_kernels import backends

print(backends())
