"""``python -m tnt_kernels``: prints the page to paste into a bug report."""

import sys

from tnt_kernels import backends
from tnt_kernels.backends import slow_on_gpu

print(backends())
warning = slow_on_gpu()
if warning is not None:
    print(f"\nwarning: {warning}", file=sys.stderr)
