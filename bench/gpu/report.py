"""The stage ``report``: what was measured as one Markdown page, one JSON record and plots.

Made of the stages' raw numbers alone, so that it can be made again anywhere. Where nothing was
measured nothing is written.
"""

from __future__ import annotations

import sys

from bench.gpu.record import Record, gather, lines_of, something_measured
from bench.gpu.report_sections import (
    ceilings_section,
    checks_section,
    header_section,
    not_measured_section,
    operator_sections,
    step_section,
    targets_section,
    training_section,
)
from bench.gpu.stage_process import Job, SomethingIsMissing, run
from tools.measuring.records import write_json


def page(record: Record) -> str:
    """The whole page."""
    lines = [
        *header_section(record),
        *targets_section(record),
        *ceilings_section(record),
        *operator_sections(record),
        *step_section(record),
        *training_section(record),
        *not_measured_section(record),
        *checks_section(record),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write_report(job: Job) -> bool:
    """Writes ``gpu.json``, ``gpu.md`` and, with matplotlib, the plots."""
    record = gather(job.folder)
    if not something_measured(record):
        raise SomethingIsMissing(f"nothing was measured, there is nothing to report: {job.folder}")
    job.results.mkdir(parents=True, exist_ok=True)
    write_json(job.results / "gpu.json", record)
    text = page(record)
    (job.results / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    try:
        from bench.gpu import plots
    except ModuleNotFoundError as error:
        print(f"no plots: {error.name} is not installed")
    else:
        plots.plot_ratios(lines_of(record, "kernels", "kernels"), job.results / "gpu_ratios.png")
        plots.plot_steps(lines_of(record, "step", "step"), job.results / "gpu_step.png")
    print(f"wrote {job.results}")
    return True


if __name__ == "__main__":
    sys.exit(run(write_report))
