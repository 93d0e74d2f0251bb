"""Builds the kernels in C, and the page for a package index. All else about the package is in pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

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


def page() -> str:
    """Returns the README with links that a package index can follow: into the repository, at the version's tag.

    As long as pyproject.toml has no address of the repository, links become text, and pictures are left out.
    """
    text, settings, version = (
        (Path(__file__).parent / name).read_text(encoding="utf-8")
        for name in ("README.md", "pyproject.toml", "shardio/version.py")
    )
    found = re.search(r'^Repository = "(.*)"$', settings, re.MULTILINE)
    tag = re.search(r'"(.*)"', version)

    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if found is None or tag is None:
            return "" if mark else words
        return f"{mark}[{words}]({found[1]}/{'raw' if mark else 'blob'}/v{tag[1]}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:)([^)\s]+)\)", link, text)


setup(
    long_description=page(),
    long_description_content_type="text/markdown",
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
