"""``python -m tnt_kernels``: prints the page to paste into a bug report; ``bench`` measures."""

import argparse
import sys
from collections.abc import Sequence

import torch

from tnt_kernels import backends, triton
from tnt_kernels.benchmark import command


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tnt_kernels",
        description="Without a command: print which implementation each operator uses on each "
        "device, and all versions.",
    )
    commands = parser.add_subparsers(title="commands", dest="command")
    bench = commands.add_parser(
        "bench",
        help="time every operator, in about a minute",
        description="Time every operator and what plain PyTorch takes for the same, in turns. Each "
        "result is first checked against float64. It takes about a minute.",
    )
    command.add_options(bench)
    options = parser.parse_args(arguments)
    if options.command != "bench":
        return _print_page()
    try:
        sys.exit(command.run(options, bench))
    except KeyboardInterrupt:
        sys.exit(130)


def _print_page() -> None:
    print(backends())
    why = triton.missing()  # not whether the GPU is too old: its first call says it
    if why is not None and torch.cuda.is_available():
        warning = f"on the GPU all operators use the reference: {why}"
        print(f"\nwarning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
