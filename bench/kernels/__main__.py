"""``python -m bench.kernels``: all kernel benchmarks, the complexity table, and their page.

Writes ``kernels.json``, ``complexity.json``, ``kernels.md`` and the plots into one folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from bench.kernels import complexity, report
from tools.measuring.parameter_sets import DEFAULT_SETS, PARAMETER_SETS, QUICK_SETS


def main() -> int:
    """Runs what the command line asks for; returns 0 where every candidate passed its checks."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sets, fewer and smaller runs")
    parser.add_argument("--sets", help=f"some of {', '.join(PARAMETER_SETS)}, comma-separated")
    parser.add_argument("--select", help="only benchmarks that match, as pytest's -k")
    parser.add_argument("--output", type=Path, help="folder to write to")
    parser.add_argument("--no-complexity", action="store_true", help="leave the table out")
    options = parser.parse_args()
    sets = options.sets or ",".join(QUICK_SETS if options.quick else (*DEFAULT_SETS, "vgg16_conv"))
    unknown = set(sets.split(",")) - set(PARAMETER_SETS)
    if unknown:
        parser.error(f"--sets must be of {', '.join(PARAMETER_SETS)}, got {sorted(unknown)}")
    # One round of roots takes half a minute on the larger set.
    select = options.select or ("not (inverse_root and mnist_ae)" if options.quick else None)
    folder = options.output or Path("build/bench" if options.quick else "bench/results")
    arguments = [
        str(Path(__file__).parent),
        "--quiet",
        *("-p", "no:cacheprovider"),
        f"--kernel-sets={sets}",
        f"--kernel-seconds={0.3 if options.quick else 2.0}",
        f"--kernel-limit-size={2048 if options.quick else 4096}",
        f"--kernel-record={folder / 'kernels.json'}",
        "--benchmark-columns=median,iqr,rounds",
        "--benchmark-sort=fullname",
        *(["-k", select] if select else []),
    ]
    status = int(pytest.main(arguments))
    if not options.no_complexity:
        complexity.measure_all(folder / "complexity.json", options.quick)
    print(report.write(folder).read_text(encoding="utf-8"))
    return status


if __name__ == "__main__":
    sys.exit(main())
