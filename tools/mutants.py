#!/usr/bin/env python
"""Changes the package in one place at a time, and counts the changes that the tests of the room notice.

    python tools/mutants.py [--seed 0] [--count 120] [--also-in CHECKOUT]

A mutant is one operator, number, condition or call changed on one line. It is named by its function, the text of its
line and the change, so it has the same name wherever the line stands. A seed draws mutants by a hash of these names:
two checkouts have the same mutants as far as they have the same lines, and `--also-in` draws among those lines only.
Each mutant runs the tests of its room in a copy of this checkout, those that import the changed module first.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 900.0

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
}  # fmt: skip
ARITHMETIC = {"+": "-", "-": "+", "*": "//", "//": "*", "%": "+", "<<": ">>", ">>": "<<"}
LOGIC = {"and": "or", "or": "and"}


@dataclass(frozen=True)
class Mutant:
    path: str  # below the checkout
    function: str
    line: int  # from 0
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.function}: {self.before.strip()} -> {self.after.strip()}"

    @property
    def room(self) -> str:
        return Path(self.path).parts[1]

    def rank(self, seed: int) -> bytes:
        return hashlib.sha256(f"{seed} {self.name}".encode()).digest()


class Finder(ast.NodeVisitor):
    """Collects the mutants of one module. Only what lies on one line is changed."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.lines = text.encode().split(b"\n")
        self.functions = ["module"]
        self.found: list[Mutant] = []
        self.visit(ast.parse(text))

    def _change(self, line: int, start: int, end: int, after: bytes) -> None:
        old = self.lines[line - 1]
        new = old[:start] + after + old[end:]
        if new != old:
            self.found.append(Mutant(self.path, self.functions[-1], line - 1, old.decode(), new.decode()))

    def _swap(self, left: ast.expr, right: ast.expr, choices: dict[str, str]) -> None:
        """Changes the operator between two operands."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        between = self.lines[left.end_lineno - 1][left.end_col_offset : right.col_offset].decode()
        operator = " ".join(re.sub(r"[()]", " ", between).split())
        if operator in choices and between.count(operator) == 1:
            changed = between.replace(operator, choices[operator])
            self._change(right.lineno, left.end_col_offset, right.col_offset, changed.encode())

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self._swap(left, right, COMPARISONS)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._swap(node.left, node.right, ARITHMETIC)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap(left, right, LOGIC)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
            self._change(node.lineno, node.col_offset, node.operand.col_offset, b"")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, int) and node.lineno == node.end_lineno and node.end_col_offset is not None:
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            self._change(node.lineno, node.col_offset, node.end_col_offset, str(other).encode())

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        test = node.test
        if test.lineno == test.end_lineno and test.end_col_offset is not None:
            text = self.lines[test.lineno - 1][test.col_offset : test.end_col_offset]
            if b":=" not in text:
                self._change(test.lineno, test.col_offset, test.end_col_offset, b"not (" + text + b")")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and node.lineno == node.end_lineno and node.end_col_offset is not None:
            self._change(node.lineno, node.col_offset, node.end_col_offset, b"pass")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node.name)
        for part in (*node.args.defaults, *node.body):  # annotations are no code
            self.visit(part)
        self.functions.pop()


def mutants_of(checkout: Path) -> dict[str, Mutant]:
    """Returns the mutants by name, without those whose name is not unique."""
    found = [
        mutant
        for path in sorted((checkout / "shardio").glob("*/**/*.py"))
        for mutant in Finder(str(path.relative_to(checkout)), path.read_text(encoding="utf-8")).found
    ]
    counts = Counter(mutant.name for mutant in found)
    return {mutant.name: mutant for mutant in found if counts[mutant.name] == 1}


def tests_of(mutant: Mutant, copy: Path) -> Iterator[str]:
    """The test files of the mutant's room: those that import its module first."""
    module = mutant.path.removesuffix(".py").replace("/", ".")
    files = sorted((copy / "tests" / mutant.room).glob("test_*.py"))
    for path in sorted(files, key=lambda path: module not in path.read_text(encoding="utf-8")):
        yield str(path.relative_to(copy))


def passes(mutant: Mutant, copy: Path, after: str) -> bool:
    """Whether the tests of the mutant's room pass with `after` as its line."""
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    lines[mutant.line] = after
    path.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--maxschedchunk", "1", *tests_of(mutant, copy)]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=copy, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        return process.wait(TIMEOUT_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--also-in", type=Path, metavar="CHECKOUT")
    given = parser.parse_args()
    mutants = mutants_of(HERE)
    if given.also_in:
        mutants = {name: mutants[name] for name in mutants.keys() & mutants_of(given.also_in).keys()}
    chosen = sorted(mutants.values(), key=lambda mutant: mutant.rank(given.seed))[: given.count]
    killed, sound = 0, set[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("__pycache__", ".*", "build"))
        if (HERE.parent / "shared").is_dir():
            (Path(folder) / "shared").symlink_to(HERE.parent / "shared")
        for mutant in chosen:
            if mutant.room not in sound and not passes(mutant, copy, mutant.before):
                sys.exit(f"the tests of {mutant.room} fail without any change")
            sound.add(mutant.room)
            result = "survived" if passes(mutant, copy, mutant.after) else "killed"
            killed += result == "killed"
            print(f"{result:<9}{mutant.path}:{mutant.line + 1} {mutant.name}", flush=True)
    print(f"seed {given.seed}: {killed} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
