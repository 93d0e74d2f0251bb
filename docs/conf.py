"""Makes the site of this repository's Markdown: `make docs`.

The pages stay where they are, so that each link is right both on the site and where a repository is shown. The README
is the first page. Sphinx gives what an API of docstrings needs, and checks every link; Furo is a theme with light and
dark, and pages that fit a telephone.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import click

from shardio.cli.main import COMMANDS, cli
from shardio.version import __version__

project = "shardio"
copyright = "the shardio authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/guide/*.md", "benchmarks/*.md", "examples/*.md"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# In docstrings, as in Markdown, `name` is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "NDArray": "NDArray"}
# Long signatures are easier to read with a line for each argument.
maximum_signature_line_length = 88
# Quotes in docstrings and headings are often those of code.
smartquotes = False

html_theme = "furo"
html_title = f"shardio {__version__}"
html_show_sphinx = False
_pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
if repository := re.search(r'^Repository = "(.*)"$', _pyproject, re.MULTILINE):
    # Each page has links to its source.
    html_theme_options = {"source_repository": repository[1], "source_branch": "main", "source_directory": ""}
html_static_path = ["site"]
html_css_files = ["site.css"]
pygments_style = "friendly"
pygments_dark_style = "monokai"

# The README of a repository cannot have this: what is beside each page, by heading.
NAVIGATION = {
    "Guide": [
        ("Overview", "docs/guide/README"),
        *(
            (name.capitalize(), f"docs/guide/{name}")
            for name in ("convert", "sources", "collections", "train", "augment", "evaluate")
        ),
        *(
            (name.capitalize(), f"docs/guide/{name}")
            for name in ("mix", "resume", "change", "share", "look", "measure")
        ),
    ],
    "How to": [
        ("Recipes", "docs/guide/recipes"),
        ("Self-supervised training", "docs/guide/self-supervised"),
        ("Generative training", "docs/guide/generative"),
        ("Moving from other loaders", "docs/guide/moving"),
        ("Sizing", "docs/guide/sizing"),
        ("Questions and errors", "docs/guide/questions"),
        ("Clusters", "docs/cluster"),
        ("Frameworks", "docs/integrations"),
        ("Examples", "examples/README"),
    ],
    "Reference": [
        ("Commands", "docs/commands"),
        ("Python", "docs/api"),
        ("Format on disk", "docs/format"),
        ("What is promised", "docs/promises"),
        ("Benchmarks", "benchmarks/README"),
        ("Results", "benchmarks/RESULTS"),
    ],
    "Project": [
        ("Contributing", "CONTRIBUTING"),
        ("Architecture", "docs/architecture"),
        ("Changes", "CHANGELOG"),
        ("Security", "SECURITY"),
        ("Conduct", "CODE_OF_CONDUCT"),
    ],
}


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            entries = "\n".join(f"{title} <{name}>" for title, name in pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def add_commands(app: Any, page: str, source: list[str]) -> None:
    """Adds the help of each command to their page, where the headings are those of `shardio --help`."""
    if page == "docs/commands":
        for title, commands in COMMANDS.items():
            source[0] += f"\n## {title}\n"
            for command in commands:
                # Within the group, whose settings show the defaults.
                group = cli.make_context("shardio", [str(command.name)], terminal_width=88)
                with click.Context(command, group, command.name, terminal_width=88) as context:
                    source[0] += f"\n### shardio {command.name}\n\n```text\n{command.get_help(context)}\n```\n"


def copy_first_page(app: Any, error: Exception | None) -> None:
    """The address of the site without a page's name shows the README."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def mark_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """In docstrings, as in Markdown, lines that are indented behind an empty one are code.

    Lines that begin with names and a colon are a list of arguments.
    """
    marked: list[str] = []
    is_argument = False
    for line in lines:
        if re.match(r"\w+(, \w+)*: ", line):
            marked += [*([] if is_argument or not marked or not marked[-1] else [""]), f"- {line}"]
            is_argument = True
            continue
        if is_argument and line.startswith("    "):
            marked.append(f"  {line.strip()}")
            continue
        is_argument = False
        text, indented = line.strip(), line.startswith("    ")
        inside = next((before.startswith("    ") for before in reversed(marked) if before), False)
        if text and indented and not inside and marked and not marked[-1]:
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def mend_signature(app: Any, what: str, name: str, obj: Any, options: Any, arguments: str, result: str) -> Any:
    """Shows aliases by their names, not as what Sphinx keeps them in, and defaults that a factory makes as "..."."""
    if arguments:
        arguments = re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", arguments).replace("<factory>", "...")
    return arguments, result


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", mend_signature)
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("source-read", add_navigation)
    app.connect("source-read", add_commands)
    app.connect("build-finished", copy_first_page)
