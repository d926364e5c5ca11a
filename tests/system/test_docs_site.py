"""The documentation site, as `make docs` builds it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-d", folder]
    environment = os.environ | {"PYTHONPATH": ".:python", "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


def text(page: Path) -> str:
    return re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8"))


def test_constructors_show_their_signatures(site: Path) -> None:
    signatures = text(site / "api/tnt_optim.html")
    for name in ("TNT", "Shampoo", "KFAC"):
        assert re.search(rf"\b{name}\(\s+(params|model): ", signatures), name


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?https?:|<link\b[^>]*\bhref=\"?https?:"
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        content = page.read_text(encoding="utf-8")
        assert loaded.search(content) is None, page
        assert 'data-md-component="source"' not in content, page  # it would ask GitHub for stars


def test_formulas_are_converted(site: Path) -> None:
    assert "<math" in (site / "how-it-works.html").read_text(encoding="utf-8")
    for page in sorted(site.glob("*.html")):
        assert 'arithmatex">\\' not in page.read_text(encoding="utf-8"), page
        assert not re.search(r"\$[^$\n]*\\", text(page)), page


def test_search_ranks_guides_first(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    boosts = {entry["location"]: entry.get("boost", 1) for entry in index["docs"]}
    guides, records = boosts["settings.html"], boosts["experiments/results/rivals.html"]
    assert guides > 1000 * records  # a word in a title counts 1000 times one in the text
