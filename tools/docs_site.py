"""What mkdocs.yml needs beyond docs/: pages of other folders, and docstrings as Python sees them.

All pages have links that work in the repository's viewer. Files outside docs/ keep their paths on
the site; links between them and docs/ are adjusted here.
"""

import importlib
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Files of the site outside docs/.
ADDED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "bench/results/**/*.md",
    "experiments/results/*.md",
    "experiments/results/*.png",
    "examples/*.py",
)
_DOCTEST = re.compile(r"^>>> .+(?:\n.+)*", re.M)
_LINK = re.compile(r"(?<=\]\()[^()\s#:]+(?=[#)])")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs/."""
    for path in (path for pattern in ADDED for path in sorted(ROOT.glob(pattern))):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes links that leave or enter docs/ lead to where the files are on the site."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri)
    inside = (ROOT / "docs" / uri).is_file()
    repository_folder = posixpath.join("docs", folder) if inside else folder

    def adjusted(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(repository_folder, link[0]))
        target = target.removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return link[0]  # mkdocs warns of it
        return posixpath.relpath(target, folder or ".")

    return _LINK.sub(adjusted, markdown)


class RunTimeDocstrings(griffe.Extension):
    """Takes docstrings from the imported objects: a decorator fills in the table of options."""

    def on_class(self, *, cls: Any, **kwargs: Any) -> None:
        """Replaces the docstring of a class of the packages."""
        self._replace(cls)

    def on_function(self, *, func: Any, **kwargs: Any) -> None:
        """Replaces the docstring of a function."""
        self._replace(func)

    def _replace(self, item: Any) -> None:
        # No page shows the kernels' functions, and importing them needs Triton.
        if item.docstring is None or item.path.startswith("tnt_kernels.triton."):
            return
        value: Any = importlib.import_module(item.module.path)
        for name in item.path.removeprefix(f"{item.module.path}.").split("."):
            value = getattr(value, name, None)
        text = inspect.getdoc(value) if value is not None else None
        # Literal blocks of reStructuredText, and doctests, become Markdown.
        text = re.sub(r"::$", ":", text or item.docstring.value, flags=re.M)
        item.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", text)
