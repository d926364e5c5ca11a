"""``python -m tnt_kernels``: prints the page to paste into a bug report; ``tune`` measures."""

import argparse
import sys
from pathlib import Path

import torch

from tnt_kernels import backends, triton


def main() -> None:
    """Prints the page, or measures."""
    parser = argparse.ArgumentParser(prog="python -m tnt_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    tune = commands.add_parser("tune", help="measure on the GPU for which sizes to use cuBLAS")
    tune.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    tune.add_argument("--out", type=Path, help="a file for a second copy of the table")
    tune.add_argument("--seconds", type=float, default=50.0, help="when to stop; default 50")
    options = parser.parse_args()
    if options.command == "tune":
        _tune(options.device, options.out, options.seconds)
        return
    print(backends())
    why = triton.missing()  # not whether the GPU is too old: its first call says it
    if why is not None and torch.cuda.is_available():
        warning = f"on the GPU all operators use the reference: {why}"
        print(f"\nwarning: {warning}", file=sys.stderr)


def _tune(device: torch.device, out: Path | None, seconds: float) -> None:
    """Measures; ends the process with 2 where nothing can be measured, with 1 if nothing was."""
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        why: str | None = f"there is no GPU {device}"
    else:
        why = triton.missing(device)
    if why is not None:
        print(f"nothing to measure: {why}", file=sys.stderr)
        sys.exit(2)
    from tnt_kernels.triton.tune import tune  # it imports Triton

    with torch.cuda.device(device):
        if not tune(device, out, seconds):
            sys.exit(1)


if __name__ == "__main__":
    main()
