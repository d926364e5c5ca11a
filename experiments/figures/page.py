"""The page: a table of verdicts, then every figure with its claims, numbers and origin."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stage_runs import PASSED, Outcome
from experiments.figures.claims import CLAIMS, Claim
from experiments.figures.document import (
    Block,
    Bullets,
    Code,
    Heading,
    Inline,
    Link,
    Mark,
    Paragraph,
    Picture,
    Span,
    Table,
    html_page,
    markdown,
)
from experiments.figures.evidence import Record
from experiments.figures.stages import Stage
from experiments.figures.subjects import SUBJECTS, Subject
from experiments.figures.verdicts import (
    CANNOT_TELL,
    CONTRADICTS,
    MARGIN,
    NOT_RUN,
    SUPPORTS,
    Verdict,
    by_chance,
)

PAGE = "figures.md"

# The word of a verdict in the table.
_WORDS = {
    SUPPORTS: "supports",
    CONTRADICTS: "contradicts",
    CANNOT_TELL: "cannot tell",
    NOT_RUN: "not run",
}
# A protocol's entries that say nothing of the scale, or stand elsewhere on the page.
_LONG = 360


@dataclass(frozen=True)
class Judged:
    """A claim and what one record says of it; without a record, why there is none."""

    claim: Claim
    record: Record | None
    verdict: Verdict


def judge_all(
    records: Sequence[Record], stages: Sequence[Stage], outcomes: Sequence[Outcome]
) -> list[Judged]:
    """Every claim with every record that is of it; with none, once, as not run."""
    matching = {subject.name: _matching(subject, records) for subject in SUBJECTS}
    judged = []
    for claim in CLAIMS:
        own = matching[claim.subject]
        if not own:
            why = _why_not_run(claim.subject, stages, outcomes)
            judged.append(Judged(claim, None, Verdict(NOT_RUN, why)))
        judged += [Judged(claim, record, _judged(claim, record)) for record in own]
    return judged


def build_page(
    records: Sequence[Record],
    folder: Path,
    stages: Sequence[Stage],
    outcomes: Sequence[Outcome],
    unread: Mapping[str, str],
) -> list[Block]:
    """The page's blocks.

    Args:
        records: what was found.
        folder: where the page goes.
        stages: all that there are, where some were run; none for a page of records.
        outcomes: how those that were run ended.
        unread: files that are no records, with the reason.
    """
    judged = judge_all(records, stages, outcomes)
    blocks: list[Block] = [
        Heading(1, "The paper's figures, and what these runs say of its claims", "top"),
        Paragraph(_introduction(bool(stages))),
        Paragraph(f"{_counts(judged)} {by_chance([one.verdict for one in judged])}"),
        _verdict_table(judged),
    ]
    blocks += _stages_section(stages, outcomes, unread)
    for subject in SUBJECTS:
        own = [one for one in judged if one.claim.subject == subject.name]
        blocks += _section(subject, own, stages, outcomes)
        blocks.append(Paragraph(Link("Back to the verdicts", "top")))
    return blocks


def write_page(blocks: Sequence[Block], folder: Path) -> Path:
    """Writes figures.md and figures.html; a reader sees old ones or new ones, never a half.

    Returns:
        The path of figures.md.
    """
    path = folder / PAGE
    texts = {path.with_suffix(".html"): html_page(blocks), path: markdown(blocks, folder)}
    for target, text in texts.items():
        partial = target.with_name(target.name + ".part")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    return path


def _matching(subject: Subject, records: Sequence[Record]) -> list[Record]:
    found = []
    for record in records:
        try:
            if subject.matches(record):
                found.append(record)
        except (KeyError, TypeError, ValueError):
            continue  # of an older form: no run of this subject that could be read
    return found


def _judged(claim: Claim, record: Record) -> Verdict:
    try:
        return claim.judge(record)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return Verdict(CANNOT_TELL, f"the record cannot be read: {error!r}")


def _why_not_run(name: str, stages: Sequence[Stage], outcomes: Sequence[Outcome]) -> str:
    outcome = next((o for o in outcomes if o.stage == name), None)
    if outcome is not None:
        return f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
    if any(stage.name == name for stage in stages):
        return "not run: its stage was not asked for"
    return "not run: no stage for it" if stages else "not run: no record of it"


def _introduction(run: bool) -> str:
    scale = (
        "All experiments were scaled down to run on two cores in 40 minutes: fewer epochs, fewer "
        "seeds, subsets. "
        if run
        else "Made from records that were there. "
    )
    return (
        f"{scale}Paper: Ren & Goldfarb, Tensor Normal Training for Deep Learning Models, NeurIPS "
        "2021. A verdict is of these runs, at their scale. Differences are between runs of the "
        "same seed (the same start and batches); one counts where the 95 % confidence interval of "
        "its mean, by Student's t, leaves out zero: from 2, 3 and 5 seeds that takes 12.7, 4.3 and "
        "2.8 standard errors. Times of steps are judged by quartiles, complexities by exponents. "
        "Judged are runs with the settings of the paper's tables; others stand beside them. “At "
        f"least as good” leaves a margin of {100 * MARGIN:g} % of the other's loss unless another "
        "is given. One seed, or a scale too small for the claim (for the paper's own experiments "
        "fewer than 600 steps), gives “cannot tell”. Numbers after ± are standard errors "
        "in verdicts, standard deviations over seeds in tables. Figures have the "
        "paper's numbers, tables those of their labels in its LaTeX source."
    )


def _counts(judged: Sequence[Judged]) -> str:
    numbers = [
        f"{sum(j.verdict.outcome == outcome for j in judged)} {word}"
        for outcome, word in _WORDS.items()
    ]
    return f"Verdicts: {', '.join(numbers)}."


def _verdict_table(judged: Sequence[Judged]) -> Table:
    several = _several(judged)
    rows: list[list[Inline]] = []
    for one in judged:
        row: list[Inline] = [
            Link(one.claim.text, f"claim-{one.claim.name}"),
            one.claim.where,
            _mark(one.verdict.outcome),
        ]
        if several:
            row.append(Code(one.record.path.name) if one.record else "")
        rows.append(row)
    return Table(["claim", "where", "this run", *(["record"] if several else [])], rows)


def _several(judged: Sequence[Judged]) -> bool:
    """Whether some claim is judged by more than one record."""
    return len({one.claim.name for one in judged}) < len(judged)


def _stages_section(
    stages: Sequence[Stage], outcomes: Sequence[Outcome], unread: Mapping[str, str]
) -> list[Block]:
    blocks: list[Block] = []
    if stages:
        by_name = {outcome.stage: outcome for outcome in outcomes}
        rows: list[list[Inline]] = []
        for stage in stages:
            outcome = by_name.get(stage.name)
            status = outcome.status if outcome else "not asked for"
            word: Inline = status if status == PASSED else _mark(status)
            took = f"{outcome.seconds / 60:.1f}" if outcome and outcome.seconds else ""
            said = outcome.message if outcome else ""
            rows.append([stage.name, stage.does, word, f"{stage.minutes:g}", took, said])
        header = ["stage", "", "", "minutes expected", "taken", ""]
        blocks += [Heading(2, "Stages", "stages"), Table(header, rows)]
    if unread:
        items: list[Inline] = [(Code(name), f": {reason}") for name, reason in unread.items()]
        blocks += [Paragraph("Not read:"), Bullets(items)]
    return blocks


def _section(
    subject: Subject,
    judged: Sequence[Judged],
    stages: Sequence[Stage],
    outcomes: Sequence[Outcome],
) -> list[Block]:
    blocks: list[Block] = [Heading(2, subject.title, subject.name)]
    if subject.note:
        blocks.append(Paragraph(subject.note))
    records = list(dict.fromkeys(one.record.path for one in judged if one.record))
    by_path = {one.record.path: one.record for one in judged if one.record}
    outcome = next((o for o in outcomes if o.stage == subject.name), None)
    if records and outcome is not None and outcome.status != PASSED:
        text = f". {outcome.message}. What follows was recorded before, or until then."
        blocks.append(Paragraph((Mark(outcome.status.capitalize(), outcome.status), text)))
    for path in records:
        blocks += _record_blocks(subject, by_path[path])
    stage = next((s for s in stages if s.name == subject.name), None)
    if not records:
        why = judged[0].verdict.why if judged else "nothing is claimed of it"
        blocks.append(Paragraph((Mark("Not run", NOT_RUN), f". {why}.")))
        if stage is not None:
            blocks.append(Paragraph(("Its command: ", Code(stage.shown()))))
    claims = list(dict.fromkeys(one.claim.name for one in judged))
    for name in claims:
        own = [one for one in judged if one.claim.name == name]
        claim = own[0].claim
        blocks.append(Heading(3, claim.text, f"claim-{name}"))
        blocks.append(Paragraph(f"Claimed in: {claim.where}."))
        for one in own:
            where: tuple[Span, ...] = ()
            if one.record and len(own) > 1:
                where = (" by ", Code(one.record.path.name))
            spans = (_mark(one.verdict.outcome), *where, f": {one.verdict.why}.")
            blocks.append(Paragraph(spans))
    return blocks


def _record_blocks(subject: Subject, record: Record) -> list[Block]:
    pictures = [Picture(path, f"{subject.title} ({path.name})") for path in record.pictures()]
    blocks: list[Block] = [*pictures]
    if not pictures:
        blocks.append(Paragraph(("No picture beside ", Code(record.path.name), ".")))
    blocks.append(Paragraph(("Settings: ", _settings(record))))
    try:
        blocks.append(subject.table(record))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        blocks.append(Paragraph(f"The record cannot be read: {error!r}."))
    blocks.append(Bullets([_origin(origin) for origin in record.origins]))
    return blocks


def _settings(record: Record) -> str:
    """What the runs of a record share, and its seeds and epochs."""
    parts = [f"{name.replace('_', ' ')} {_value(value)}" for name, value in record.protocol.items()]
    parts = [part for part in parts if len(part) <= _LONG]
    for name in ("epochs", "seed"):
        values = {_settings_of(run).get(name) for run in record.runs} - {None}
        if values and name not in record.protocol:
            parts.append(f"{name} {_value(sorted(values))}")
    return "; ".join(parts)


def _settings_of(run: Mapping[str, Any]) -> Mapping[str, Any]:
    key: Mapping[str, Any] = run["key"]
    nested: Mapping[str, Any] = key.get("settings", key)
    return nested


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_value(item) for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _origin(origin: Mapping[str, Any]) -> Inline:
    """Command, commit, date and machine."""
    machine, versions = origin["machine"], origin["versions"]
    commit = (origin["commit"] or "unknown")[:12] + (" with changes" if origin["dirty"] else "")
    threads = origin["threads"]["torch"]
    where = machine["gpu"] or machine["cpu"]
    return (
        Code(origin["command"]),
        f", commit {commit}, {origin['date'][:10]}, {where}, {machine['cores']} cores, "
        f"{threads} threads, torch {versions['torch']}",
    )


def _mark(outcome: str) -> Mark:
    return Mark(outcome, outcome)
