"""The reader of texts."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.data.text import python_sources, read_text, split


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "input.txt"


@pytest.mark.parametrize(("validation", "trained"), [(0.1, 25), (0.25, 21), (0.5, 14), (0.9, 2)])
def test_the_codes_spell_the_text(path: Path, validation: float, trained: int) -> None:
    # One, two, three and four bytes a character, and both line ends.
    text = "zaaß →\r\nThe last tenth\n🙂ab b"
    path.write_bytes(text.encode())
    read = read_text(path, validation)
    assert read.characters == "".join(sorted(set(text)))
    assert read.train.dtype == read.validation.dtype == torch.int64
    assert (len(read.train), len(read.validation)) == (trained, 28 - trained)
    codes = torch.cat([read.train, read.validation]).tolist()
    assert "".join(read.characters[code] for code in codes) == text


@pytest.mark.parametrize(
    "content", [b"good until \xff here", "latin ü".encode("latin1"), b"\xe2\x82"]
)
def test_other_encodings_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content * 20)
    with pytest.raises(ValueError, match=r"input\.txt: must be text in UTF-8: .*decode byte"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "counts"), [("", "0 and 0"), ("abc", "2 and 1"), ("a" * 10, "9 and 1")]
)
def test_a_text_that_is_too_short_is_refused(path: Path, text: str, counts: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"input\.txt: training and validation .* got {counts}"):
        read_text(path)


def test_the_real_file(real_data: Callable[[str], Path]) -> None:
    read = read_text(real_data("tinyshakespeare") / "input.txt")
    assert (len(read.train), len(read.validation), len(read.characters)) == (1003854, 111540, 65)
    start = "".join(read.characters[code] for code in read.train[:14].tolist())
    assert start == "First Citizen:"


def test_python_sources_are_shuffled_files_in_ascii(tmp_path: Path) -> None:
    """Without tests, packages and files that are not in ASCII; the order is fixed."""
    contents = {f"m{i}.py": f"module {i}\n" for i in range(20)}
    contents |= {"json/tool.py": "in a package\n", "notes.txt": "no source\n"}
    contents |= {"test/case.py": "a test\n", "json/tests/case.py": "a test\n"}
    contents |= {"site-packages/other.py": "installed\n", "latin.py": "# ü\n"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    text, source = python_sources(tmp_path)
    wanted = [f"module {i}" for i in range(20)] + ["in a package"]
    assert sorted(text.splitlines()) == sorted(wanted) != text.splitlines()
    assert python_sources(tmp_path) == (text, source)
    assert f"{len(text):,} characters" in source
    assert hashlib.sha256(text.encode()).hexdigest() in source


def test_this_machines_python_has_sources() -> None:
    text, _ = python_sources()
    read = split(text, "sources")
    assert len(text) > 5_000_000 and 90 <= len(read.characters) <= 128
    assert abs(len(read.validation) - len(text) / 10) < 2
