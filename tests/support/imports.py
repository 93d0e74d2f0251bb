"""Which modules the package has, and what each of them imports."""

from __future__ import annotations

import ast
import functools

from places import ROOT

PACKAGE = ROOT / "shardio"


@functools.cache
def imports_in(source: str) -> tuple[str, ...]:
    """Every module that `source` imports, wherever in it the import stands: in a function, under `if TYPE_CHECKING`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports name the whole path"
            assert node.module is not None
            if node.module.split(".")[0] == "shardio":
                # A name of the module, or a module of the package.
                found += (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                found.append(node.module)
    return tuple(found)


def name_of(path: str) -> str:
    """The module `path` as its own package calls it: reading.mapped for shardio/reading/mapped.py."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


SOURCES = {name_of(path.relative_to(PACKAGE).as_posix()): path.read_text() for path in PACKAGE.rglob("*.py")}
_IN_C = {name_of(path.relative_to(PACKAGE).with_suffix("").as_posix()) for path in PACKAGE.rglob("*.c")}
MODULES = SOURCES.keys() | _IN_C


def modules_imported(module: str) -> set[str]:
    """The modules of shardio that this one imports."""
    found = set()
    for name in imports_in(SOURCES.get(module, "")):
        if name.startswith("shardio."):
            name = name.removeprefix("shardio.")
            while name not in MODULES:  # a name in a module
                name, dot, _ = name.rpartition(".")
                assert dot, f"{module} imports a name of shardio itself"
            found.add(name)
    return found
