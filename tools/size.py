#!/usr/bin/env python
"""Prints how large a checkout is: per room, and what a reader or a user meets in all.

    python tools/size.py [CHECKOUT]

Statements are counted as Python's parser sees them, so denser formatting changes nothing. Commands and options are
those that click has, which imports the checkout's command line.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

HERE = Path(__file__).parents[1]

COUNT_COMMANDS = """
from shardio.cli.main import cli
commands = cli.commands.values()
print(len(commands), sum(len(command.params) for command in commands))
"""


@dataclass
class Size:
    files: int = 0
    lines: int = 0
    statements: int = 0

    def add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.files += 1
        self.lines += len(text.splitlines())
        self.statements += sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def sizes_by_room(package: Path) -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    for path in python_files(package):
        below = path.relative_to(package)
        sizes.setdefault(below.parts[0] if len(below.parts) > 1 else "(top)", Size()).add(path)
    return sizes


def describe(checkout: Path) -> Iterator[str]:
    rooms = sizes_by_room(checkout / "shardio")
    total = Size(*map(sum, zip(*map(astuple, rooms.values()), strict=True)))
    yield f"{'room':<16}{'files':>8}{'lines':>8}{'statements':>12}"
    for room, size in sorted({**rooms, "all": total}.items(), key=lambda item: item[1].lines):
        yield f"{room:<16}{size.files:>8,}{size.lines:>8,}{size.statements:>12,}"

    sources = sorted((checkout / "shardio").rglob("*.c"))
    yield f"C: {sum(len(path.read_text().splitlines()) for path in sources):,} lines in {len(sources)} files"

    tests = Size()
    functions = 0
    for path in python_files(checkout / "tests"):
        tests.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions += sum(function.name.startswith("test_") for function in functions_of(tree))
    counts = f"{tests.lines:,} lines, {tests.statements:,} statements, {functions:,} functions"
    yield f"tests: {counts} in {tests.files:,} files"

    counted = subprocess.run(
        [sys.executable, "-c", COUNT_COMMANDS], cwd=checkout, check=True, capture_output=True, text=True
    )
    yield "commands: {}, with {} options and arguments".format(*counted.stdout.split())

    types: Counter[str] = Counter()
    longest = (0, "")
    for path in python_files(checkout / "shardio"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        types.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
        for function in functions_of(tree):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            longest = max(longest, (length, f"{path.relative_to(checkout)}: {function.name}"))
            if path.name == "loader.py" and function.name == "__init__" and len(function.args.kwonlyargs) > 10:
                arguments = function.args.args[1:] + function.args.kwonlyargs
                yield f"arguments of ShardLoader: {len(arguments)}"
    repeated = [f"{name} ({count})" for name, count in sorted(types.items()) if count > 1]
    yield f"public types of one name: {', '.join(repeated) or 'none'}"
    yield f"longest function: {longest[0]} lines, {longest[1]}"


if __name__ == "__main__":
    print("\n".join(describe(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE)))
