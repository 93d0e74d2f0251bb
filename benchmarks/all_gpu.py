"""All that needs a GPU, in nine minutes: the tests, and the benchmarks in short forms. One table, and one JSON file.

Each part is a process of its own with a limit of time; where one fails, the others go on. The parts run by the first
Python whose torch sees a CUDA device: that of .venv, the one that runs this, or python3. Nothing is installed. Kernels
in C that are missing are built in place. Exit code 2 where there is no GPU, 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/loading/test_gpu.py", "tests/loading/test_loader_arrays.py")
SHORT = ("--rounds", "3")


@dataclass(frozen=True)
class Part:
    """`words` for Python, and the most seconds that it may take."""

    name: str
    words: Sequence[str]
    seconds: int


PARTS = (
    Part("kernels in C", ("-c", "from setuptools import setup; setup()", "build_ext", "--inplace", "--quiet"), 40),
    Part("tests", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *TESTS), 150),
    Part(
        "bus",
        (
            *("benchmarks/loader.py", "--samples", "20000", "--device", "cuda"),
            *("--batch-size", "256", "--threads", "1,4,8", *SHORT, "--seconds", "0.4"),
        ),
        105,
    ),
    Part("augmentation", ("benchmarks/augment.py", "--device", "cuda", "--samples", "20000", *SHORT), 80),
    Part(
        "training",
        ("benchmarks/train_step.py", "--samples", "20000", "--transform", *SHORT, "--steps", "40"),
        105,
    ),
)
"""Their limits together are less than nine minutes."""


@dataclass(frozen=True)
class Figure:
    """A number in the lines of a part: the first group of `pattern`, of all lines that have it the `best`."""

    part: str
    name: str
    pattern: str
    best: Callable[[Sequence[float]], float]
    aim: float
    at_most: bool

    def found(self, outcomes: Sequence[Outcome]) -> float | None:
        lines = [line for outcome in outcomes if outcome.part == self.part for line in outcome.lines]
        numbers = [float(match[1]) for match in map(re.compile(self.pattern).search, lines) if match]
        return self.best(numbers) if numbers else None

    def is_met(self, found: float) -> bool:
        return found <= self.aim if self.at_most else found >= self.aim


FIGURES = (
    Figure("tests", "tests failed", r"(\d+) failed", sum, 0, True),
    Figure("tests", "tests passed", r"(\d+) passed", sum, 1, False),
    Figure("bus", "H2D, of bare pinned copies", r"^[148] .* ([\d.]+)$", max, 0.85, False),
    Figure("training", "% of a step lost to data", r"^loss +(-?[\d.]+)%", max, 1.0, True),
)
"""What the project aims at on a GPU."""


@dataclass
class Outcome:
    part: str
    state: str = "done"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)


def gpu_of(python: str) -> str | None:
    """Returns what torch calls the GPU, with the versions; None if this Python has no torch that sees a GPU."""
    script = """
import platform, torch
gpu = torch.cuda.get_device_name()
print(gpu, "CUDA", torch.version.cuda, "torch", torch.__version__, "on", platform.node(), platform.release())
"""
    try:
        run = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def pythons() -> list[str]:
    return list(dict.fromkeys([str(ROOT / ".venv/bin/python"), sys.executable, shutil.which("python3") or "python3"]))


def run_part(part: Part, python: str) -> Outcome:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    outcome, start = Outcome(part.name), time.monotonic()
    try:
        run = subprocess.run(
            [python, *part.words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=part.seconds,
        )
    except subprocess.TimeoutExpired as error:
        outcome.state = f"stopped after {part.seconds} s"
        text = error.stdout or b""
        outcome.lines = (text if isinstance(text, str) else text.decode(errors="replace")).splitlines()
    else:
        outcome.state = "done" if run.returncode == 0 else f"failed with exit code {run.returncode}"
        outcome.lines = run.stdout.splitlines()
    outcome.seconds = time.monotonic() - start
    return outcome


def told(outcome: Outcome) -> list[str]:
    """Returns the lines that the table shows: results, or the end of what a part that has failed has printed."""
    if outcome.state != "done":
        return outcome.lines[-12:]
    return outcome.lines[-1:] if outcome.part == "tests" else outcome.lines


def figures_of(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Returns each figure with its aim, and whether that is met; None where the part was not run to that line."""
    rows: list[dict[str, object]] = []
    ran = {outcome.part: outcome.state for outcome in outcomes}
    for figure in FIGURES:
        found = figure.found(outcomes)
        if found is None and figure.name == "tests failed" and ran.get("tests") == "done":
            found = 0  # pytest does not say so
        met = None if found is None else figure.is_met(found)
        rows.append({"figure": figure.name, "found": found, "aim": figure.aim, "at_most": figure.at_most, "met": met})
    return rows


def table_of(figures: Sequence[dict[str, object]]) -> list[str]:
    words = {True: "met", False: "MISSED", None: "not measured"}
    lines = [f"{'':<32}{'found':>10}{'aim':>14}"]
    for row in figures:
        found = "-" if row["found"] is None else f"{row['found']:g}"
        aim = f"{'at most' if row['at_most'] else 'at least'} {row['aim']:g}"
        lines.append(f"{row['figure']:<32}{found:>10}{aim:>14}  {words[row['met']]}")  # type: ignore[index]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", choices=names, action="append", help="may be given again  [default: all]")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", metavar="FILE", help="(%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the parts, and run none")
    options = parser.parse_args()
    chosen = [part for part in PARTS if part.name in (options.only or names)]
    if options.dry_run:
        for part in chosen:
            print(f"{part.name}, at most {part.seconds} s:\n    python {shlex.join(part.words)}")
        return
    found = ((python, gpu_of(python)) for python in pythons())
    python, gpu = next(((python, gpu) for python, gpu in found if gpu), ("", ""))
    if not python:
        tried = ", ".join(pythons())
        parser.exit(2, f"no CUDA device is here, or torch does not see it: tried {tried}; --dry-run shows the parts\n")
    print(f"{gpu}, {python}", flush=True)
    outcomes = []
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for part in chosen:
        outcome = run_part(part, python)
        outcomes.append(outcome)
        print(f"== {outcome.part}: {outcome.state}, {outcome.seconds:.0f} s")
        print("\n".join(f"   {line}" for line in told(outcome)), flush=True)
        # Written after each part: what was measured stays, also if this is killed.
        figures = figures_of(outcomes)
        parts = [asdict(outcome) for outcome in outcomes]
        report = {"machine": gpu, "python": python, "figures": figures, "parts": parts}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"== {gpu}")
    print("\n".join(table_of(figures_of(outcomes))))
    print(f"written to {options.json}")
    sys.exit(any(outcome.state != "done" for outcome in outcomes))


if __name__ == "__main__":
    main()
