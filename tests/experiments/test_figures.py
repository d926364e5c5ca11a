"""The page of figures: from made-up records, its HTML, and its driver on tiny stages."""

import argparse
import base64
import doctest
import html.parser
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up_records import (
    FULL,
    TIMES,
    autoencoders,
    complexity,
    cosines,
    idealized,
    language,
    losses,
    networks,
    search,
    sensitivity,
    steps,
)

import experiments.figures.__main__ as command
from bench.stage_runs import FAILED, PASSED, TIMED_OUT, exit_status
from bench.stage_runs import NOT_RUN as STAGE_NOT_RUN
from experiments.figures import stages as stages_module
from experiments.figures.claims import CLAIMS
from experiments.figures.document import Code, Heading, Link, Paragraph, Table, html_page, markdown
from experiments.figures.driver import run_stages
from experiments.figures.evidence import Record, load_folder
from experiments.figures.page import build_page, judge_all, write_page
from experiments.figures.stages import DATA, STAGES, Stage, checked_data, chosen
from experiments.figures.verdicts import CANNOT_TELL, CONTRADICTS, NOT_RUN, SUPPORTS

pytestmark = pytest.mark.usefixtures("one_thread")

# A picture of one pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


# The page.


class Balanced(html.parser.HTMLParser):
    """Raises where a tag is not closed, and gathers text, names, links and pictures."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.names: list[str] = []
        self.targets: list[str] = []
        self.pictures: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.names += [given["id"] or ""] if "id" in given else []
        self.targets += [given["href"] or ""] if "href" in given else []
        self.pictures += [given["src"] or ""] if tag == "img" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def save(made: Record, folder: Path, name: str, picture: bool = True) -> None:
    (folder / f"{name}.json").write_text(json.dumps(made.content))
    if picture:
        (folder / f"{name}.png").write_bytes(PNG)


def test_page_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {
        "cosine": cosines({"tnt": 0.75}),
        "mnist": autoencoders(losses(5.0)),
        "resnet32": networks(FULL, images=100),
        "idealized": idealized(0.1),
        "step-times": steps(TIMES),
        "complexity": complexity(2.0),
        "search": search(15.0),
        "sensitivity": sensitivity(0.01, 0.5),
    }
    for name, one in made.items():
        save(one, tmp_path, name)
    (tmp_path / "below").mkdir()
    save(language(1.8), tmp_path / "below", "table", picture=False)
    (tmp_path / "below" / "table-width64-steps400.png").write_bytes(PNG)
    (tmp_path / "broken.json").write_text("{")
    assert command.main(["--records", str(tmp_path)]) == 0
    page = parsed((tmp_path / "figures.html").read_text())
    text = (tmp_path / "figures.md").read_text()
    for claim in CLAIMS:
        assert claim.text in page.text
        assert f"claim-{claim.name}" in page.names
        assert f'<a id="claim-{claim.name}"></a>' in text
    assert len(page.names) == len(set(page.names))
    assert {target.removeprefix("#") for target in page.targets} <= set(page.names)
    assert len(page.pictures) == len(made) + 1
    wanted = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert set(page.pictures) == {wanted}
    assert "script" not in page.tags
    assert "(below/table-width64-steps400.png)" in text
    assert "a <fast> CPU" in page.text
    assert "a \\<fast\\> CPU" in text
    assert "commit 0123456789ab, 2026-01-02" in page.text
    assert "not run: no record of it" in page.text
    assert "broken.json: broken.json is not the record of an experiment's runs" in page.text
    assert "at AdamW's seconds, the slower run cut mid-schedule" in page.text
    assert "chance alone turns 5 % into a verdict" in page.text
    assert "Tuning was not equal" in page.text
    assert str(tmp_path) not in text + page.text
    assert "figures.md" in capsys.readouterr().out


def test_record_beside_another_is_judged_by_itself(tmp_path: Path) -> None:
    save(autoencoders(losses(5.0)), tmp_path, "one", picture=False)
    save(autoencoders(losses(15.0)), tmp_path, "two", picture=False)
    records, _ = load_folder(tmp_path)
    judged = [j for j in judge_all(records, (), ()) if j.claim.name == "mnist-epochs"]
    assert [j.verdict.outcome for j in judged] == [SUPPORTS, CONTRADICTS]
    page = parsed(html_page(build_page(records, tmp_path, (), (), {})))
    assert "two.json" in page.text
    assert "No picture beside one.json" in page.text


def test_record_of_an_older_form_is_said_to_be_unreadable(tmp_path: Path) -> None:
    made = idealized(0.1)
    content = {**made.content, "protocol": {"constants": {}, "recorded_at": [1]}}
    records = [Record(tmp_path / "old.json", content)]
    judged = [j for j in judge_all(records, (), ()) if j.claim.subject == "idealized"]
    assert judged[0].verdict.outcome == CANNOT_TELL
    assert "cannot be read" in judged[0].verdict.why
    assert "cannot be read" in parsed(html_page(build_page(records, tmp_path, (), (), {}))).text


def test_markup_in_text_is_text() -> None:
    blocks = [
        Heading(1, "a < b_c", "top"),
        Paragraph(("*x* ", Code("a|b <i>"), Link("[y]", "top"))),
        Table(["|"], [["a|b"]]),
    ]
    page = parsed(html_page(blocks))
    assert "i" not in page.tags
    assert "*x* a|b <i>[y]" in page.text
    text = markdown(blocks, Path())
    assert "\\*x\\* `a/b <i>`[\\[y\\]](#top)" in text
    assert "| a\\|b |" in text


def test_no_half_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_page([Heading(1, "old", "top")], tmp_path)

    def interrupted(path: Path, text: str, **more: Any) -> None:
        path.write_bytes(text[:5].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_page([Heading(1, "new", "top")], tmp_path)
    assert "old" in (tmp_path / "figures.md").read_text()
    assert "old" in (tmp_path / "figures.html").read_text()


# The driver.


def fake(name: str, code: str, needs: str | None = None, limit: float | None = None) -> Stage:
    start = "import json, os, subprocess, sys, time\nout = sys.argv[1]\n"
    return Stage(name, f"does {name}", 0.5, ("-c", start + code, "{out}", "{data}"), needs, limit)


NOTHING: dict[str, Path | None] = dict.fromkeys(DATA)
HANGING = (
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "open(out + '.child', 'w').write(str(child.pid)); print('waiting', flush=True)\n"
    "time.sleep(300)"
)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_stage_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    made = json.dumps(dict(idealized(0.1).content))
    said: list[str] = []
    stages = [
        fake("mnist", "print('reason'); sys.exit(3)"),
        fake("cosine", HANGING, limit=0.05),
        fake("faces", "print('never')", needs="faces"),
        fake("digits", "os.kill(os.getpid(), 11)"),
        fake("idealized", f"open(out, 'w').write({made!r})"),
    ]
    outcomes = run_stages(stages, tmp_path, NOTHING, 600, said.append, tick=1.0)
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == [FAILED, TIMED_OUT, STAGE_NOT_RUN, FAILED, PASSED]
    assert exit_status(outcomes) == 1
    assert exit_status(outcomes[2:3]) == 0
    assert not is_running(int((tmp_path / "cosine.json.child").read_text()))
    assert any("cosine: 0:01 elapsed" in line for line in said)
    assert any(line.startswith("[5/5] idealized") and "to go" in line for line in said)
    assert "    | reason" in said
    records, unread = load_folder(tmp_path, [stage.file for stage in stages])
    assert unread == {}
    page = parsed(html_page(build_page(records, tmp_path, stages, outcomes, unread)))
    assert "exit status 3; its last line: reason" in page.text
    assert "ended after 3 s; its last line: waiting" in page.text
    assert "no folder with FACES" in page.text
    assert "ended by signal 11" in page.text
    judged = {j.claim.name: j.verdict for j in judge_all(records, stages, outcomes)}
    assert judged["idealized-bound"].outcome == SUPPORTS
    assert judged["mnist-epochs"].outcome == NOT_RUN
    assert judged["search-lower"].why == "not run: no stage for it"


def test_what_a_failed_stage_had_recorded_is_shown_as_that(tmp_path: Path) -> None:
    made = json.dumps(dict(idealized(0.1).content))
    stages = [fake("idealized", f"open(out, 'w').write({made!r}); print('late'); sys.exit(2)")]
    outcomes = run_stages(stages, tmp_path, NOTHING, 600, lambda line: None)
    records, unread = load_folder(tmp_path, ["idealized.json"])
    page = parsed(html_page(build_page(records, tmp_path, stages, outcomes, unread)))
    assert "Failed. exit status 2; its last line: late. What follows was recorded" in page.text
    judged = {j.claim.name: j.verdict for j in judge_all(records, stages, outcomes)}
    assert judged["idealized-bound"].outcome == SUPPORTS


def test_no_time_is_left(tmp_path: Path) -> None:
    stages = [fake("idealized", "print()"), fake("digits", "print()")]
    outcomes = run_stages(stages, tmp_path, NOTHING, 0.5, lambda line: None)
    assert {outcome.status for outcome in outcomes} == {STAGE_NOT_RUN}


def test_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = json.dumps(dict(idealized(0.1).content))
    stages = (fake("idealized", f"open(out, 'w').write({made!r})"), fake("digits", "sys.exit(1)"))
    monkeypatch.setattr(command, "STAGES", stages)
    monkeypatch.setattr(stages_module, "STAGES", stages)
    assert command.main(["--out-dir", str(tmp_path), "--stage", "idealized"]) == 0
    text = parsed((tmp_path / "figures.html").read_text()).text
    assert "not asked for" in text
    assert command.main(["--out-dir", str(tmp_path), "--minutes", "5"]) == 1
    (tmp_path / "digits.json").write_text("{}")
    assert command.main(["--out-dir", str(tmp_path), "--stage", "idealized"]) == 0
    text = parsed((tmp_path / "figures.html").read_text()).text
    assert "digits.json is not the record of an experiment's runs" in text
    assert "0:00 elapsed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage", "mnist", "nothing"], "must be one or several of idealized, digits"),
        (["--mnist", "not/there"], "--mnist: must be a folder, got not/there"),
        (["--text", "."], "--text: must be a file, got ."),
        (["--minutes", "0"], "must be positive and finite"),
        (["--minutes", "x"], "must be positive and finite"),
        (["--records", "not/there"], "--records: must be a folder"),
        (["--records", ".", "--stage", "mnist"], "--stage: runs something"),
        (["--stage", "mnist", "--out-dir", "/proc/nowhere"], "--out-dir: cannot write there"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_folder_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--records", str(tmp_path)])
    assert "holds no record of an experiment" in capsys.readouterr().err


# The stages.


def test_examples() -> None:
    failed, _ = doctest.testmod(stages_module)
    assert failed == 0


def test_stages_fit_their_time() -> None:
    assert sum(stage.minutes for stage in STAGES) <= command.MINUTES
    assert [stage.name for stage in chosen(None)] == [stage.name for stage in STAGES]
    assert {stage.needs for stage in STAGES} == {None, *DATA}


class ArgumentsRead(Exception):
    """A command has read its arguments, and nothing more is wanted of it."""


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_stages_commands_take_their_arguments(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def read(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
        given = parse(parser, arguments)
        assert given.out == tmp_path / stage.file
        raise ArgumentsRead

    python, module, *arguments = stage.arguments(tmp_path, {name: tmp_path for name in DATA})
    assert python == "-m"
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    with pytest.raises(ArgumentsRead):
        importlib.import_module(module).main(arguments)


def test_data_are_looked_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "CHECKOUT", tmp_path)
    assert checked_data("mnist", None) is None
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    assert checked_data("mnist", None) == tmp_path / "data" / "mnist"
    stage = next(stage for stage in STAGES if stage.needs == "text")
    assert "give TEXT=, or put it at data/text/input.txt" in (stage.lacks(NOTHING) or "")
    assert stage.lacks({**NOTHING, "text": tmp_path}) is None
    assert "TEXT" in stage.shown()
