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


def assert_prints(script: str, expected: str, **environ: str) -> None:
    """Runs a script of Python that prints one line if all is well."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{expected}\n"


# The interpreter patches triton.language when a kernel is launched, and again at each call of a function in the kernel.
# Once for each module of functions is enough; the repetition takes a quarter of the time.
PATCH_ONCE = """\
from triton.runtime import interpreter

def call(self, *args, modules=set(), **options):
    if self.fn.__module__ not in modules:
        modules.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)

interpreter.InterpretedFunction.__call__ = call
"""


def assert_emulates(module: str, cache: Path) -> None:
    """Runs `check` of a module on the PTX of kernels compiled for sm_90."""
    script = f"from ptx.emulation import emulate\nemulate(90)\nfrom {module} import check\ncheck()\nprint('checked')"
    assert_prints(script, "checked", TRITON_CACHE_DIR=str(cache))


# After only_compile(kernel), launches of the kernel compile it for a GPU of `driver.capability`, and no more. The list
# that is returned gets what they compile.
_ONLY_COMPILE = """\
import triton
from triton.backends.compiler import GPUTarget


class Driver:
    capability = 90

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


driver = Driver()


def only_compile(kernel):
    launch, compiled = kernel.run, []
    triton.runtime.driver.set_active(driver)

    def run(*arguments, grid, warmup, **options):
        compiled.append(launch(*arguments, grid=grid, warmup=True, **options))

    kernel.run = run
    return compiled


"""


def assert_compiles(script: str, cache: Path) -> None:
    """Runs a script that compiles for GPUs that are not here, and prints "compiled"."""
    assert_prints(_ONLY_COMPILE + script, "compiled", TRITON_CACHE_DIR=str(cache))
