"""Packages that are slow to import, or need not be there, are imported in one place each."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from imports import MODULES, SOURCES, imports_in
from places import ROOT


def packages_of(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports_in(SOURCES.get(module, ""))}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("click", {"cli"}),
        ("tqdm", {"system.progress"}),
        ("PIL", {"conversion.images", "loading.dataset", "drawing", "viewing"}),
        ("jinja2", {"viewing"}),
        ("simplejpeg", {"conversion.images.decode"}),
        ("scipy", {"conversion.sources.imagenet"}),
        ("distributed", {"conversion.engine"}),
        ("pyarrow", {"sets.given"}),
        ("fsspec", {"sets.remote"}),
    ],
)
def test_a_heavy_package_is_imported_only_where_it_is_wanted(package: str, allowed: set[str]) -> None:
    users = {module for module in MODULES if package in packages_of(module)}
    assert [user for user in users if not any(f"{user}.".startswith(f"{place}.") for place in allowed)] == []
    assert users  # or the dependency could go


def test_a_set_is_opened_read_and_described_without_torch_and_pillow(make_set: Callable[..., Path]) -> None:
    code = "import sys, shardio; shards = shardio.open_shards(sys.argv[1]); repr(shards), shards[0]\n"
    code += "assert not {'PIL', 'torch', 'simplejpeg', 'click', 'tqdm'} & set(sys.modules)\n"
    code += "shards.show([0]); assert 'PIL' in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(make_set(3))], check=True, timeout=60)


def test_no_module_imports_by_name_or_unpickles() -> None:
    for module in MODULES - {"__init__"}:
        imported = set(imports_in(SOURCES.get(module, "")))
        assert imported.isdisjoint({"importlib", "pickle", "marshal", "shelve", "runpy"}), module
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(SOURCES.get(module, "")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert calls.isdisjoint({"eval", "exec", "compile", "__import__"}), module


def test_a_test_imports_no_other_one() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) (test_|conftest)", text, re.MULTILINE), path
