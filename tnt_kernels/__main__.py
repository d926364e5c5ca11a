"""``python -m tnt_kernels``: prints the page to paste into a bug report."""

import sys

import torch

from tnt_kernels import backends, triton


def main() -> None:
    """Prints the page."""
    print(backends())
    why = triton.missing()  # not whether the GPU is too old: its first call says it
    if why is not None and torch.cuda.is_available():
        warning = f"on the GPU all operators use the reference: {why}"
        print(f"\nwarning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
