"""The rooms of the package in docs/architecture.md: what each may import, no cycles, and no code in `__init__`."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter

import pytest
from imports import MODULES, PACKAGE, imports_in, modules_imported
from places import ROOT

# Every room may import these two, which import nothing.
FLOOR = {"errors", "version"}
ENTRY_POINTS = {"__init__", "__main__"}
ROWS = re.findall(r"^\| `(\w+)/` \|[^|]*\| *([^|]*?) *\|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
MAY_IMPORT = {
    room: {other for other, _ in ROWS} - {room} if allowed == "all" else set(re.findall(r"\w+", allowed))
    for room, allowed in ROWS
}
HAVE_CODE_IN_INIT = {"augment"}
"""Packages that users import from."""


def room_of(module: str) -> str:
    return module.split(".")[0]


def against_the_table(module: str, imported: set[str]) -> set[str]:
    room = room_of(module)
    return {other for other in imported if room_of(other) not in {room} | FLOOR | MAY_IMPORT[room]}


def test_every_module_lies_in_a_room() -> None:
    assert {room_of(module) for module in MODULES} == MAY_IMPORT.keys() | FLOOR | ENTRY_POINTS


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_the_table_says(room: str) -> None:
    for module in (module for module in MODULES if room_of(module) == room):
        assert against_the_table(module, modules_imported(module)) == set(), module


def test_what_all_may_import_imports_nothing() -> None:
    for module in FLOOR:
        assert modules_imported(module) == set()


def test_an_import_against_the_table_is_noticed() -> None:
    assert against_the_table("order.rng", {"errors", "order.orders"}) == set()
    assert against_the_table("order.rng", {"system.files"}) == {"system.files"}


def test_neither_the_table_nor_the_modules_have_a_cycle() -> None:
    assert len(MAY_IMPORT) == 15
    for graph in (MAY_IMPORT, {module: modules_imported(module) for module in MODULES}):
        TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_the_init_of_a_room_holds_a_docstring_and_nothing_else() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        body = ast.parse(path.read_text()).body
        package = path.parent.relative_to(PACKAGE).as_posix()
        assert ast.get_docstring(ast.Module(body, [])), f"{package}: no docstring"
        assert len(body) == 1 or package in HAVE_CODE_IN_INIT, package


def test_this_test_sees_every_kind_of_import() -> None:
    source = """
import shardio.a as x, os
from shardio import b
from shardio.c import name
def function():
    from shardio.d import name
if TYPE_CHECKING:
    import shardio.e
"""
    expected = {"os", "shardio.a", "shardio.b", "shardio.c.name", "shardio.d.name", "shardio.e"}
    assert set(imports_in(source)) == expected
