#!/usr/bin/env python
"""Draws docstrings and error messages of the package at random, for someone who has not seen the code to read.

python tools/draw_words.py [--seed 40] [--docstrings 60] [--errors 24]
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def words_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yields ("docstring" or "error", text) with the place and the signature in front."""
    place = path.relative_to(HERE)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield "docstring", f"{place}, {signature(node)}:\n{text}"
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and has_text(node.exc):
            yield "error", f"{place}:{node.lineno}:\n{ast.unparse(node.exc)}"


def signature(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Returns what a reader sees above and below a docstring: the arguments, or the fields and their docstrings."""
    if isinstance(node, ast.FunctionDef):
        return ast.unparse(ast.copy_location(ast.FunctionDef(**{**vars(node), "body": [], "decorator_list": []}), node))
    if isinstance(node, ast.ClassDef):
        fields = [part for part in node.body[1:] if isinstance(part, (ast.AnnAssign, ast.Expr))]
        return "\n    ".join(
            [f"class {node.name}({', '.join(map(ast.unparse, node.bases))})", *map(ast.unparse, fields)]
        )
    return "the module"


def has_text(call: ast.Call) -> bool:
    return any(isinstance(part, (ast.JoinedStr, ast.Constant)) for part in ast.walk(call))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--docstrings", type=int, default=60)
    parser.add_argument("--errors", type=int, default=24)
    given = parser.parse_args()
    found = [words for path in sorted((HERE / "shardio").rglob("*.py")) for words in words_of(path)]
    for kind, count in (("docstring", given.docstrings), ("error", given.errors)):
        texts = [text for other, text in found if other == kind]
        for number, text in enumerate(random.Random(given.seed).sample(texts, count), 1):
            print(f"--- {kind} {number}: {text}\n")


if __name__ == "__main__":
    main()
