"""Builds the kernels in C. All else about the package is in pyproject.toml."""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Products are rounded before they are added (fp-contract): or pixels on ARM, which has one instruction for both, would
# be others than on x86.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
NAMES = ["_pixels", "_resample", "_rowcopy", "_rowread", "_finalized"]


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:  # the compiler has said more
            sys.exit(
                f"shardio: error: the C compiler, {self.compiler.compiler_so[0]}, did not build {ext.name}: "
                "install gcc and the headers of Python (apt install gcc python3-dev), or install a wheel (pip install "
                "--only-binary shardio shardio)"
            )


setup(
    ext_modules=[
        Extension(
            f"shardio.kernels.{name}",
            [f"shardio/kernels/{name}.c"],
            depends=["shardio/kernels/guard.h"],
            extra_compile_args=FLAGS,
        )
        for name in NAMES
    ],
    cmdclass={"build_ext": BuildKernels},
)
