"""Scripts about Triton's kernels, each in a process of its own: Triton decides when it is imported whether it
interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest


def _has_triton() -> bool:
    return find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) >= (3, 2)


needs_triton = pytest.mark.skipif(not _has_triton(), reason="Triton 3.2 is not installed: it has wheels for Linux")


def assert_prints(script: str, expected: str, *words: object, **environ: str) -> None:
    """Runs a script of Python that prints one line if all is well."""
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{expected}\n"


# The interpreter patches triton.language when a kernel is launched, and again at each call of a function in the kernel.
# Once for each module of functions is enough; the repetition takes a quarter of the time.
_PATCH_ONCE = """\
from triton.runtime import interpreter

def call(self, *args, modules=set(), **options):
    if self.fn.__module__ not in modules:
        modules.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)

interpreter.InterpretedFunction.__call__ = call
"""


def assert_interprets(module: str) -> None:
    """Runs `check` of a module, which prints "equal", in Triton's interpreter."""
    assert_prints(f"{_PATCH_ONCE}\nfrom {module} import check\ncheck()", "equal", TRITON_INTERPRET="1")


def assert_emulates(module: str, cache: Path, capability: int = 90) -> None:
    """Runs `check` of a module, which prints "equal", on PTX that is compiled for GPUs, in the emulator."""
    script = f"from ptx.emulation import emulate\nfrom {module} import check\nemulate({capability})\ncheck()"
    assert_prints(script, "equal", TRITON_CACHE_DIR=str(cache))


def assert_compiles(script: str, cache: Path) -> None:
    """Runs a script that compiles for GPUs that are not here, and prints "compiled"."""
    assert_prints(script, "compiled", TRITON_CACHE_DIR=str(cache))
