"""What mkdocs.yml needs beyond docs/: pages of other folders, and docstrings as Python sees them.

All pages have links that work in the repository's viewer. Files outside docs/ keep their paths on
the site; links between them and docs/ are adjusted here. Formulas become MathML, which browsers
show without scripts or fonts.
"""

import ast
import html
import importlib
import inspect
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Files of the site outside docs/.
ADDED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "bench/results/**/*.md",
    "experiments/results/*.md",
    "experiments/results/*.png",
)
# Search ranks guides before all others: a word in a title counts a thousand times one in the text.
SEARCH_BOOSTS = {
    "api/": 1e-3,
    "examples/": 1e-3,
    "CHANGELOG.md": 1e-6,
    "CONTRIBUTING.md": 1e-6,
    "bench/": 1e-6,
    "experiments/": 1e-6,
}
_DOCTEST = re.compile(r"^>>> .+(?:\n.+)*", re.M)
_LINK = re.compile(r"(?<=\]\()[^()\s#:]+(?=[#)])")
_FORMULA = re.compile(r'(?<=class="arithmatex">)\\([(\[])(.*?)\\[)\]]', re.S)
_HEADER_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>(?:(?!</?t[hd]).)*</th>)", re.S)


def on_config(config: Any) -> Any:
    """Takes the repository's address from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project["urls"]["Repository"]
    config.repo_name = config.site_name
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs/, and a page for each example."""
    for path in (path for pattern in ADDED for path in sorted(ROOT.glob(pattern))):
        uri = path.relative_to(ROOT).as_posix()
        file = File.generated(config, uri, abs_src_path=str(path))
        file.edit_uri = f"../{uri}"
        files.append(file)
    for path in sorted((ROOT / "examples").glob("*.py")):
        page = _example(path.read_text(encoding="utf-8"))
        file = File.generated(config, f"examples/{path.stem}.md", content=page)
        file.edit_uri = f"../examples/{path.name}"
        files.append(file)
    return files


def _example(source: str) -> str:
    """The page of an example: its docstring, then its code."""
    module = ast.parse(source)
    title, _, text = (ast.get_docstring(module) or "").partition("\n")
    code = "".join(source.splitlines(keepends=True)[module.body[0].end_lineno :]).strip()
    return f"# {title.rstrip('.')}\n{text}\n\n```python\n{code}\n```\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Sets the page's rank in searches, and leads links to where the files are on the site."""
    uri = page.file.src_uri
    for start, boost in SEARCH_BOOSTS.items():
        if uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    if page.parent is None:  # records, which have the widest tables: no menu lists them
        page.meta["hide"] = ["navigation"]
    folder = posixpath.dirname(uri)
    inside = (ROOT / "docs" / uri).is_file()
    repository_folder = posixpath.join("docs", folder) if inside else folder

    def adjusted(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(repository_folder, link[0]))
        target = target.removeprefix("docs/")
        if target.startswith("examples/"):
            target = target.replace(".py", ".md")
        if files.get_file_from_path(target) is None:
            return link[0]  # mkdocs warns of it
        return posixpath.relpath(target, folder or ".")

    return _LINK.sub(adjusted, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Converts formulas; a name in a table's header may break after "_", a deviation after "±"."""
    content = _HEADER_CODE.sub(lambda code: code[0].replace("_", "_<wbr>"), content)
    content = content.replace(" ± ", "&nbsp;± ")
    return _FORMULA.sub(_mathml, content)


def _mathml(formula: re.Match[str]) -> str:
    display = "inline" if formula[1] == "(" else "block"
    return str(convert(html.unescape(formula[2]).strip(), display=display))


def on_post_page(output: str, **kwargs: Any) -> str:
    """Keeps Material from asking GitHub for stars: the site loads nothing from elsewhere."""
    return output.replace('data-md-component="source"', "")


def on_post_template(output_content: str, **kwargs: Any) -> str:
    """The same for 404.html."""
    return on_post_page(output_content)


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
