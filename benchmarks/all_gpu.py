"""The first ten minutes on a GPU: the machine, the tests, the order of streams, speed, and a training.

The most important evidence comes first. Each part is a process of its own with a limit of time; where one fails, the
others go on. FILE is written after each line that a part prints, so a run that is killed leaves what it has found. The
end is a table for RESULTS.md. The parts run by the first Python whose torch sees a CUDA device: that of .venv, the one
that runs this, or python3. Nothing is installed, and no network is used. Exit code 2 where there is no GPU, 1 if a part
has failed. With --dry-run, short forms of the parts run on the tests' stand-in for CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = tuple(f"tests/loading/test_{name}.py" for name in ("gpu", "loader_arrays", "freed", "place"))
PYTEST = ("-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")
PARTS_FILE = "benchmarks/gpu_parts.py"


@dataclass(frozen=True)
class Part:
    """`words` for Python, the most seconds that it may take, and the words of a dry run; none: it has no dry run."""

    name: str
    words: Sequence[str]
    seconds: int
    dry: Sequence[str] = ()


PARTS = (
    Part("kernels in C", ("setup.py", "-q", "build_ext", "--inplace"), 45),
    Part("machine", (PARTS_FILE, "machine"), 25, (PARTS_FILE, "machine", "--dry-run")),
    Part("tests", (*PYTEST, *TESTS), 150, (*PYTEST, "-k", "in_channels_last_memory", TESTS[0])),
    Part("streams", (PARTS_FILE, "streams"), 90, (PARTS_FILE, "streams", "--dry-run")),
    Part("speed", (PARTS_FILE, "speed"), 120, (PARTS_FILE, "speed", "--dry-run")),
    Part("training", ("benchmarks/train_step.py", "--transform", "--rounds", "3", "--steps", "40"), 105),
)


@dataclass
class Outcome:
    part: str
    state: str = "ended early"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)

    @property
    def figures(self) -> list[dict[str, Any]]:
        """What the lines say: name, found, aim (None: no aim), and whether that is an upper limit."""
        rows = [json.loads(line) for line in self.lines if re.match('{"figure".*}$', line)]
        if self.part == "tests":
            for name, pattern, aim in (("passed", "PASSED", 1), ("failed", "FAILED|ERROR", 0)):
                found = sum(bool(re.search(rf"^tests/\S*::.* ({pattern})\b", line)) for line in self.lines)
                rows.append({"figure": f"tests {name}", "found": found, "aim": aim, "at_most": name == "failed"})
        losses = [float(match[1]) for match in map(re.compile(r"loss +(-?[\d.]+)%").match, self.lines) if match]
        name = "% of a step of ResNet-50 lost to data"
        return rows + [{"figure": name, "found": found, "aim": 1, "at_most": True} for found in losses]


def gpu_of(python: str) -> str | None:
    """Returns what torch calls the GPU, with the versions; None if this Python has no torch that sees a GPU."""
    script = """
import platform, torch
gpu = torch.cuda.get_device_name()
print(gpu, "CUDA", torch.version.cuda, "torch", torch.__version__, "on", platform.system(), platform.release())
"""
    try:
        run = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def pythons() -> list[str]:
    return list(dict.fromkeys([str(ROOT / ".venv/bin/python"), sys.executable, shutil.which("python3") or "python3"]))


def run_part(outcome: Outcome, words: Sequence[str], seconds: int, python: str, save: Callable[[], None]) -> None:
    """Runs a part. Calls `save` after each line that it prints, and ends it and its children at its limit."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    start, stopped = time.monotonic(), threading.Event()
    run = subprocess.Popen(
        [python, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        start_new_session=True,
    )

    def stop() -> None:
        stopped.set()
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(run.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        assert run.stdout is not None
        with run.stdout:
            for line in run.stdout:
                outcome.lines.append(line.rstrip("\n"))
                outcome.seconds = time.monotonic() - start
                save()
        code = run.wait()
    finally:
        timer.cancel()
        if run.poll() is None:  # this run is being ended
            stop()
            run.wait()
    outcome.seconds = time.monotonic() - start
    ended = "done" if code == 0 else f"failed with exit code {code}"
    outcome.state = f"stopped after {seconds} s" if stopped.is_set() else ended
    save()


def summary(gpu: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Returns a section for RESULTS.md."""
    conditions = f"`python benchmarks/all_gpu.py`, {gpu}, {time.strftime('%Y-%m-%d')}."
    lines = ["## How fast is it on a GPU?", "", conditions, ""]
    lines += ["| figure | found | aim | |", "|---|---|---|---|"]
    for row in (row for outcome in outcomes for row in outcome.figures):
        found, aim = row["found"], row["aim"]
        is_met = aim is None or (found <= aim if row["at_most"] else found >= aim)
        limit = "" if aim is None else f"at {'most' if row['at_most'] else 'least'} {aim:g}"
        word = "" if aim is None else "met" if is_met else "**missed**"
        digits = f"{found:,.0f}" if abs(found) >= 1000 else f"{found:g}"
        lines.append(f"| {row['figure']} | {digits} | {limit} | {word} |")
    return lines + [f"| {one.part} | {one.state} | | |" for one in outcomes if one.state != "done"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", choices=names, action="append", help="may be given again  [default: all]")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", metavar="FILE", help="(%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="short forms of the parts, without a GPU")
    options = parser.parse_args()
    python, gpu = sys.executable, "no GPU, a dry run"
    if not options.dry_run:
        found = ((python, gpu_of(python)) for python in pythons())
        python, gpu = next(((python, gpu) for python, gpu in found if gpu), ("", ""))
    if not python:
        parser.exit(2, f"no CUDA device is here, or torch does not see it: tried {', '.join(pythons())}\n")
    print(f"{gpu}, {python}", flush=True)
    outcomes: list[Outcome] = []
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        report = {"machine": gpu, "python": python, "summary": summary(gpu, outcomes)}
        text = json.dumps({**report, "parts": [asdict(outcome) for outcome in outcomes]}, indent=1)
        part = options.json.with_name(options.json.name + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(options.json)

    for part in PARTS:
        words = part.dry if options.dry_run else part.words
        if part.name in (options.only or names) and words:
            outcomes.append(outcome := Outcome(part.name))
            save()
            run_part(outcome, words, part.seconds, python, save)
            print(f"== {outcome.part}: {outcome.state}, {outcome.seconds:.0f} s")
            print("\n".join(f"   {line}" for line in outcome.lines[-15:]), flush=True)
    print("\n".join(["", *summary(gpu, outcomes), ""]))
    print(f"written to {options.json}")
    sys.exit(any(outcome.state != "done" for outcome in outcomes))


if __name__ == "__main__":
    main()
