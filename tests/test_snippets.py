"""Every Python snippet of README.md and docs/ runs as it stands.

The snippets of a page share one namespace, in their order. It begins with the names of ``COMMON``.
A comment ``<!-- hidden ... -->`` in a page holds code that readers need not see.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._functorch.config as functorch_config
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = [page for page in DOCUMENTS if "```python" in page.read_text(encoding="utf-8")]

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
opt = TNT(model.parameters(), likelihood="categorical")
"""

_PIECE = re.compile(
    r"<!-- hidden\n(?P<hidden>.*?)-->"
    r"|^ *```python[^\n]*\n(?P<code>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Ends a process group that a page has started; puts back the setting that one changes."""
    with functorch_config.patch(donated_buffer=functorch_config.donated_buffer):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_there_are_pages_with_snippets() -> None:
    assert len(PAGES) > 5


# Without a GPU, autocast and GradScaler turn themselves off; torch.compile imports old code.
@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_snippets(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of a page, and every fence of Python is found."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    pieces = list(_PIECE.finditer(text))
    assert sum(piece["code"] is not None for piece in pieces) == text.count("```python")
    namespace: dict[str, object] = {"__name__": "snippet"}
    exec(COMMON, namespace)
    for piece in pieces:
        part = "hidden" if piece["code"] is None else "code"
        # Empty lines in front: a traceback has the page's line.
        lines = "\n" * text.count("\n", 0, piece.start(part))
        exec(compile(lines + textwrap.dedent(piece[part]), page, "exec"), namespace)
