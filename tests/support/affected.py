"""Prints the tests that a change of the working tree may break: `make check` runs them.

A test may break if it imports a changed file, through any number of other files. Tests of the whole package in
tests/house always run, and all tests run after a change of anything else than Python code and pages.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from imports import imports_in
from places import ROOT

# Where names that are imported without a package lie: `pythonpath` in pyproject.toml.
_FLAT = ("tests/support", "tools", "tools/chaos")
# Tests that run scripts and pages by their paths, without importing them.
_BY_PATH = {
    r"examples/|docs/integrations": "tests/recipes",
    r"benchmarks/": "tests/measure",
    r"docs/man": "tests/format",
}
_HOUSE = "tests/house"


def changed() -> list[str]:
    commands = "git diff --name-only --merge-base main", "git ls-files --others --exclude-standard"
    return [
        path
        for command in commands
        for path in subprocess.run(command.split(), cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    ]


def _files(name: str) -> Iterator[str]:
    """Yields the files that may be imported as `name`, a module or a name in a module."""
    path = name.replace(".", "/")
    for stem in (path, path.rpartition("/")[0]) if name.startswith("shardio") else (f"{top}/{path}" for top in _FLAT):
        yield from (f"{stem}.py", f"{stem}/__init__.py")


@cache
def _imported(path: str) -> tuple[str, ...]:
    names = imports_in((ROOT / path).read_text(encoding="utf-8"))
    return tuple(file for name in names for file in _files(name) if (ROOT / file).is_file())


def _reached(path: str) -> set[str]:
    """Returns the files that a file imports, directly or through others, and the file itself."""
    found, pending = {path}, [path]
    while pending:
        pending += (new := {*_imported(pending.pop())} - found)
        found |= new
    return found


def affected(paths: Iterable[str]) -> list[str]:
    """Returns the tests to run after a change of the files `paths`, relative to the repository."""
    python = {path for path in paths if path.endswith(".py")}
    rest = {path for path in paths if not path.endswith((".py", ".md"))}
    if rest or any(Path(path).name in ("conftest.py", "setup.py") for path in python):
        return ["tests"]
    tests = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*.py"))
    by_path = {folder for pattern, folder in _BY_PATH.items() for path in paths if re.match(pattern, path)}
    return [_HOUSE, *sorted(by_path), *sorted(test for test in tests if python & _reached(test))]


if __name__ == "__main__":
    print(*affected(changed()))
