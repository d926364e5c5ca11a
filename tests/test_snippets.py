"""Every Python snippet of README.md and docs/ runs as it stands.

The snippets of a page share one namespace, in their order. It begins with the names of ``COMMON``.
A comment ``<!-- hidden ... -->`` in a page holds code that readers need not see.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch._functorch.config as functorch_config
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What snippets take for granted: a classifier, its loss, batches; a stand-in for a trainer.
COMMON = """
from types import SimpleNamespace as Trainer
import torch
from torch import nn
from torch.nn import functional as F
from tnt_optim import TNT
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
criterion = F.cross_entropy
loader = [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(3)]
x, y = loader[0]
args, data = None, loader
opt = TNT(model.parameters())
"""

_PIECE = re.compile(
    r"<!-- hidden\n(?P<hidden>.*?)-->"
    r"|^ *```python[^\n]*\n(?P<code>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)


class Piece(NamedTuple):
    """A snippet of a page, or hidden code."""

    page: Path
    line: int  # of the first line of the code
    code: str
    shown: bool  # False: hidden


def pieces(page: Path) -> list[Piece]:
    """All snippets and hidden code of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _PIECE.finditer(text):
        part = "hidden" if match["hidden"] else "code"
        line = text.count("\n", 0, match.start(part)) + 1
        code = textwrap.dedent(match[part])
        found.append(Piece(page, line, code, part == "code"))
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


ALL = [piece for page in PAGES for piece in pieces(page)]
SHOWN = [piece for piece in ALL if piece.shown]


def test_snippets_are_found() -> None:
    """As many as there are fences of Python."""
    fences = sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert len(SHOWN) == fences > 0


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Ends a process group that a page has started; puts back the setting that one changes."""
    with functorch_config.patch(donated_buffer=functorch_config.donated_buffer):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


# Without a GPU, autocast and GradScaler turn themselves off; torch.compile imports old code.
@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("piece", SHOWN, ids=[f"{name(p.page)}:{p.line}" for p in SHOWN])
def test_snippet(piece: Piece, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs with what stands above it on the page, and hidden code below it."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    exec(COMMON, namespace)
    for part in pieces(piece.page):
        if part.shown and part.line > piece.line:
            break
        # Empty lines in front: a traceback has the page's line.
        exec(compile("\n" * (part.line - 1) + part.code, part.page, "exec"), namespace)
