"""Looks into wheels and sdists before they are published: is everything there that a user needs, and nothing else?

A wheel must have all kernels in C. An sdist must have what a clone has. Exit code 1, and a line
for each fault, if anything is wrong.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = {path.stem for path in (ROOT / "shardio" / "kernels").glob("_*.c")}
# Files of the package that are no modules.
DATA = {
    "shardio/py.typed",
    *(f"shardio/viewing/{name}" for name in ("report.html", "report.css", "report.js")),
}
# What a user of a wheel does not need, and what no file that is published may hold.
FOREIGN = re.compile(r"(^|/)(tests|benchmarks|tools|docs|build)/|__pycache__|\.py[co]$|\.c$")
# Of a clone, that an sdist does without.
NOT_PACKED = re.compile(r"^(\.|docs/_)")


def faults_of_wheel(names: list[str]) -> list[str]:
    """Returns what is wrong with a wheel of these files."""
    built = {match[1] for name in names if (match := re.search(r"shardio/kernels/(_\w+)\.[^/]*(?:so|pyd)$", name))}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "shardio").rglob("*.py")}
    found = [f"lacks the kernel {name}" for name in sorted(KERNELS - built)]
    found += [f"lacks {name}" for name in sorted((modules | DATA) - set(names))]
    return found + [f"has {name}, which no user needs" for name in names if FOREIGN.search(name)]


def faults_of_sdist(names: list[str]) -> list[str]:
    """Returns what is wrong with an sdist of these files."""
    inside = {name.split("/", 1)[1] for name in names if "/" in name}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.splitlines() if not NOT_PACKED.match(name)}
    found = [f"lacks {name}" for name in sorted(tracked - inside)]
    return found + [f"has {name}, which was built" for name in sorted(inside) if re.search(r"\.(so|pyc)$", name)]


def main() -> None:
    paths = [Path(word) for word in sys.argv[1:]]
    if not paths:
        sys.exit("check_wheel.py: expected wheels and sdists, such as dist/*")
    bad = False
    for path in paths:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                faults = faults_of_wheel(wheel.namelist())
        else:
            with tarfile.open(path) as sdist:
                faults = faults_of_sdist([member.name for member in sdist if member.isfile()])
        for fault in faults:
            print(f"{path.name}: {fault}", file=sys.stderr)
        bad |= bool(faults)
        print(f"{path.name}: {'BAD' if faults else 'complete'}")
    sys.exit(bad)


if __name__ == "__main__":
    main()
