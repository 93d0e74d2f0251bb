"""Imports run downward only, and the two halves meet only where the contract is.

The table is written twice, here and in docs/architecture.md: a change of a layer is a change of both.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from places import ROOT

PACKAGE = ROOT / "shardio"
ENTRY_POINTS = {"__init__", "__main__"}

# module -> (layer, half): "c" is conversion, "t" is training, "b" is both.
LAYERS: dict[str, tuple[int, str]] = {
    "errors": (0, "b"),
    "version": (0, "b"),
    "checksum": (0, "b"),
    "counter_rng": (0, "t"),
    "eager": (0, "t"),
    "caller": (0, "t"),
    "threads": (0, "b"),
    "_rowcopy": (0, "t"),
    "_resample": (0, "t"),
    "_rowread": (0, "t"),
    "format": (1, "b"),
    "files": (1, "b"),
    "boxes": (1, "t"),
    "permutation": (1, "t"),
    "kernels": (1, "t"),
    "rowcopy": (2, "t"),
    "launch": (1, "t"),
    "machine": (1, "b"),
    "numa": (1, "t"),
    "lifeline": (1, "c"),
    "jpeg": (1, "c"),
    "tar": (2, "c"),
    "png": (1, "c"),
    "webp": (1, "c"),
    "exif": (0, "c"),
    "warned": (0, "c"),
    "splits": (0, "c"),
    "clutter": (0, "c"),
    "leftovers": (2, "t"),
    "local": (2, "b"),
    "amounts": (0, "c"),
    "labels": (0, "c"),
    "torchthreads": (1, "c"),
    "runfile": (2, "c"),
    "parts": (1, "c"),
    "journal": (2, "c"),
    "manifest": (2, "b"),
    "places": (2, "t"),
    "order": (2, "t"),
    "crop": (2, "t"),
    "sampler": (3, "t"),
    "cache": (3, "t"),
    "fused": (3, "t"),
    "transform": (4, "t"),
    "mix": (5, "t"),
    "augment": (6, "t"),
    "shufflecheck": (3, "t"),
    "mapping": (2, "t"),
    "resample": (2, "t"),
    "openfiles": (2, "t"),
    "ring": (2, "t"),
    "decode": (2, "c"),
    "shardset": (3, "t"),
    "remote": (3, "t"),
    "resize": (3, "c"),
    "sources": (3, "c"),
    "arrow": (2, "c"),
    "tree": (4, "c"),
    "columns": (4, "c"),
    "indexed": (5, "c"),
    "parquet": (5, "c"),
    "writer": (3, "c"),
    "storage": (4, "t"),
    "stagedset": (5, "t"),
    "staging": (5, "t"),
    "cached": (6, "t"),
    "readers": (4, "t"),
    "prefetch": (4, "t"),
    "dataset": (4, "t"),
    "torchlike": (5, "t"),
    "verifier": (4, "t"),
    "warmer": (4, "t"),
    "setwriter": (4, "c"),
    "ilsvrc": (4, "c"),
    "kaggle": (5, "c"),
    "duplicates": (4, "c"),
    "engine": (5, "t"),
    "damage": (5, "t"),
    "gather": (5, "t"),
    "cuda": (5, "t"),
    "limits": (5, "t"),
    "catalogue": (5, "t"),
    "publisher": (5, "t"),
    "plan": (5, "c"),
    "listfile": (6, "c"),
    "webdataset": (6, "c"),
    "loader": (7, "t"),
    "shardtask": (6, "c"),
    "bench": (8, "t"),
    "scanner": (7, "c"),
    "workers": (7, "c"),
    "executors": (7, "c"),
    "estimate": (8, "c"),
    "dask_cluster": (8, "c"),
    "benchtable": (9, "t"),
    "demo": (8, "t"),
    "repairer": (8, "b"),
    "converter": (9, "c"),
    "cli": (10, "b"),
}


def imports_in(source: str) -> Iterator[str]:
    """Every module that `source` imports, wherever in it the import stands: in a function, under `if TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports name the whole path"
            assert node.module is not None
            if node.module == "shardio":
                yield from (f"shardio.{alias.name}" for alias in node.names)
            else:
                yield node.module


def source_of(module: str) -> str:
    path = PACKAGE / f"{module}.py"
    return path.read_text() if path.exists() else ""  # in C, where nothing of ours can be imported


def imports_of(module: str) -> set[str]:
    return set(imports_in(source_of(module)))


def siblings_of(module: str) -> set[str]:
    """The modules of shardio that this one imports."""
    return {name.split(".")[1] for name in imports_of(module) if name.startswith("shardio.")}


def packages_of(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports_of(module)}


def rows_of_the_document(text: str) -> dict[str, tuple[int, str]]:
    rows = re.findall(r"^\| *(\d+) *\| *`(\w+)` *\| *([bct]) *\| *\S.*\|$", text, re.MULTILINE)
    assert len({name for _, name, _ in rows}) == len(rows), "a module stands twice in the table"
    return {name: (int(layer), half) for layer, name, half in rows}


def test_every_module_has_a_layer() -> None:
    modules = {path.stem for pattern in ("*.py", "*.c") for path in PACKAGE.glob(pattern)}
    assert modules - ENTRY_POINTS == set(LAYERS)
    assert [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_the_document_has_the_same_table() -> None:
    document = ROOT / "docs" / "architecture.md"
    if not document.exists():
        pytest.skip("docs/architecture.md is not there")
    assert rows_of_the_document(document.read_text()) == LAYERS


@pytest.mark.parametrize("module", LAYERS)
def test_imports_run_downward(module: str) -> None:
    layer, _ = LAYERS[module]
    for sibling in siblings_of(module):
        assert LAYERS[sibling][0] < layer, f"{module} ({layer}) imports {sibling} ({LAYERS[sibling][0]})"


@pytest.mark.parametrize("module", [module for module, (_, half) in LAYERS.items() if half != "b"])
def test_no_half_imports_the_other(module: str) -> None:
    _, half = LAYERS[module]
    foreign = {sibling for sibling in siblings_of(module) if LAYERS[sibling][1] not in ("b", half)}
    assert foreign == set()


def test_what_both_halves_share_depends_on_neither() -> None:
    # The command line drives both halves; a repair is a check of one and a conversion by the other.
    shared = {module for module, (_, half) in LAYERS.items() if half == "b"} - {"cli", "repairer"}
    for module in shared:
        assert siblings_of(module) <= shared


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("click", {"cli", "demo"}),
        ("tqdm", {"cli", "demo"}),
        ("PIL", {"decode", "dataset"}),
        ("simplejpeg", {"decode"}),
        ("scipy", {"ilsvrc"}),
        ("distributed", {"dask_cluster"}),
        ("pyarrow", {"arrow"}),
        ("fsspec", {"remote"}),
    ],
)
def test_a_heavy_package_is_imported_only_where_it_is_wanted(package: str, allowed: set[str]) -> None:
    users = {module for module in [*LAYERS, *ENTRY_POINTS] if package in packages_of(module)}
    assert users <= allowed
    assert users  # or the dependency could go


def test_reading_a_set_needs_no_torch() -> None:
    needed = {"shardset"}
    while more := {sibling for module in needed for sibling in siblings_of(module)} - needed:
        needed |= more
    assert "manifest" in needed
    for module in needed:
        assert packages_of(module).isdisjoint({"torch", "PIL", "simplejpeg", "click", "tqdm"}), module


def test_no_module_imports_by_name_or_unpickles() -> None:
    for module in LAYERS:
        assert imports_of(module).isdisjoint({"importlib", "pickle", "marshal", "shelve", "runpy"}), module
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(source_of(module)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert calls.isdisjoint({"eval", "exec", "compile", "__import__"}), module


def test_a_test_imports_no_other_one() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        imported = imports_in(path.read_text(encoding="utf-8"))
        assert not [name for name in imported if name.startswith(("test_", "conftest"))], path


def test_this_test_sees_every_kind_of_import() -> None:
    source = "\n".join(
        [
            "import shardio.a as x, os",
            "from shardio import b",
            "from shardio.c import name",
            "def function():",
            "    from shardio.d import name",
            "if TYPE_CHECKING:",
            "    import shardio.e",
        ]
    )
    assert set(imports_in(source)) == {"os", *(f"shardio.{letter}" for letter in "abcde")}
