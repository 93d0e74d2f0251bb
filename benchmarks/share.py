"""Many processes on one set, as the jobs of a node have it: the memory that they share, and their speed together.

Each process has a loader of its own, over all samples. All read a whole epoch, so that all have touched every page, and
then look at their memory (/proc/PID/smaps):

    set         pages of the set, each divided by the number of processes that have mapped it (PSS), over all processes:
                the size of the split if everything is shared, whatever their number
    ring        the slots of the loaders
    private     the pages of a process alone (dirty pages), without its ring, and without those of a process that has
                only imported torch and shardio: the most of any process
    page tables also of a process alone (VmPTE), likewise

Then all read at the same time, and all copy blocks of memory at the same time, in turn: memcpy is the limit. Samples
must be in the page cache. With --io pread nothing is mapped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from common import describe_machine, generated_set, ratios, spread

from shardio.loading.loader import ShardLoader
from shardio.measure.limits import memcpy
from shardio.reading.shardset import open_shards
from shardio.system.machine import usable_cores

MOST_PRIVATE_NBYTES = 30_000_000
"""The promise of docs/cluster.md for each process."""


def memory(folder: Path) -> dict[str, int]:
    """The memory of this process in bytes."""
    pss = of_set = dirty = 0
    in_set = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Pss", "Private_Dirty"):
            nbytes = int(value.split()[0]) << 10
            pss += nbytes * (name == "Pss")
            of_set += nbytes * (name == "Pss" and in_set)
            dirty += nbytes * (name == "Private_Dirty")
        elif "-" in line.split(" ", 1)[0]:  # "7f12...-7f34... r--s 00001000 fe:00 1234   /path"
            in_set = line.partition("/")[1] == "/" and line[line.index("/") :].startswith(f"{folder}/")
    status = Path("/proc/self/status").read_text()
    tables = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmPTE"))
    return {"pss": pss, "set": of_set, "private": dirty, "page_tables": tables}


def serve(path: Path, io: str, batch_size: int, num_threads: int) -> None:
    """Runs in a process of its own: does what the lines on stdin say, and answers each with one line of JSON."""
    loader: ShardLoader | None = None
    nbytes = 0
    before = memory(path)
    for line in sys.stdin:
        command, seconds = line.split()
        answer: dict[str, Any] = {}
        if command == "open":
            loader = ShardLoader(
                path,
                batch_size,
                io=io,  # type: ignore[arg-type]
                device="cpu",
                num_threads=num_threads,
                rank=0,
                world_size=1,
            )
            height, width, channels = loader.shards.sample_shape
            nbytes = height * width * channels
            for _ in loader:
                pass
        assert loader is not None
        if command == "memory":
            now = memory(path)
            answer = {name: now[name] - before[name] for name in ("private", "page_tables")}
            slot = loader._pipeline._most_per_slot * batch_size * nbytes  # small batches share one
            answer |= {"pss": now["pss"], "set": now["set"], "ring": loader.stats()["slots"] * slot}
        elif command == "read":
            start, images = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - start) < float(seconds):
                for _, labels in loader:
                    images += len(labels)
                    if (elapsed := time.perf_counter() - start) >= float(seconds):
                        break
            answer = {"rate": images * nbytes / elapsed}
        elif command == "copy":
            with closing(memcpy(nbytes)) as steps:
                next(steps)  # touches its memory
                start, images = time.perf_counter(), 0
                while (elapsed := time.perf_counter() - start) < float(seconds):
                    images += next(steps)
            answer = {"rate": images * nbytes / elapsed}
        print(json.dumps(answer), flush=True)


class Processes:
    """Processes that all do the same thing at the same time."""

    def __init__(self, count: int, path: Path, arguments: Sequence[str]) -> None:
        command = [sys.executable, __file__, str(path), *arguments, "--serve"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._all = [subprocess.Popen(command, **pipes) for _ in range(count)]

    def do(self, command: str, seconds: float = 0.0) -> list[dict[str, Any]]:
        for process in self._all:
            assert process.stdin is not None
            process.stdin.write(f"{command} {seconds}\n")
            process.stdin.flush()
        answers = []
        for process in self._all:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline() or "null"))
        if None in answers:
            raise SystemExit(f"a process ended while it was told: {command}")
        return answers

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._all:
            with process:  # closes its pipes, which ends it, and waits
                pass


def measure(path: Path, count: int, rounds: int, seconds: float, arguments: Sequence[str]) -> dict[str, Any]:
    with Processes(count, path, arguments) as processes:
        processes.do("open")
        found = processes.do("memory")
        rates: dict[str, list[float]] = {"read": [], "copy": []}
        for _ in range(rounds):
            for command, values in rates.items():
                values.append(sum(answer["rate"] for answer in processes.do(command, seconds)))
    return {
        "processes": count,
        "pss": sum(answer["pss"] for answer in found),
        "set": sum(answer["set"] for answer in found),
        "ring": sum(answer["ring"] for answer in found),
        "private": max(answer["private"] - answer["ring"] for answer in found),
        "page_tables": max(answer["page_tables"] for answer in found),
        "read_rates": rates["read"],
        "memcpy_rates": rates["copy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, nargs="?", help="a set; by default one of 5,000 samples is generated")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--io", choices=["mmap", "pread"], default="mmap")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, help="threads of each loader; by default the cores are shared")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each round")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.shards.resolve() if options.shards else generated_set(5000, 256)
    threads = options.threads or max(1, usable_cores() // options.processes)
    if options.serve:
        serve(path, options.io, options.batch_size, threads)
        return
    arguments = [f"--io={options.io}", f"--batch-size={options.batch_size}", f"--threads={threads}"]
    counts = dict.fromkeys((1, options.processes))
    found = [measure(path, count, options.rounds, options.seconds, arguments) for count in counts]
    shards = open_shards(path)
    nbytes = sum(shard.nbytes for shard in shards.manifest.splits[shards.split].shards)
    if options.json:
        facts = {"machine": describe_machine(), "io": options.io, "threads": threads, "split_nbytes": nbytes}
        print(json.dumps({**facts, "most_private": MOST_PRIVATE_NBYTES, "results": found}))
        return
    print(describe_machine())
    print(
        f"{len(shards):,} samples, {nbytes / 1e6:,.0f} MB; io={options.io}, batches of {options.batch_size}, {threads} "
        f"threads each; medians of {options.rounds} rounds"
    )
    names = ("set", "ring", "private", "page_tables", "pss")
    print(
        f"{'processes':>9}{'set, MB':>12}{'ring, MB':>12}{'private, MB':>13}{'tables, MB':>12}{'PSS, MB':>12}", end=""
    )
    print(f"{'read, GB/s':>22}{'memcpy, GB/s':>22}{'ratio':>22}")
    for row in found:
        megabytes = (f"{row[name] / 1e6:>{width},.1f}" for name, width in zip(names, (12, 12, 13, 12, 12), strict=True))
        print(f"{row['processes']:>9}" + "".join(megabytes), end="")
        rates = [[rate / 1e9 for rate in row[f"{what}_rates"]] for what in ("read", "memcpy")]
        print("".join(f"{cell:>22}" for cell in (*(spread(one, 1) for one in rates), ratios(*rates, 2))))
    print(
        f"set: {found[-1]['set'] / found[0]['set']:.3f} times what one process has"
        if found[0]["set"]
        else "set: not mapped"
    )
    worst = max(row["private"] for row in found)
    print(
        f"private: {worst / 1e6:.1f} MB, {'under' if worst < MOST_PRIVATE_NBYTES else 'MORE THAN'} the 30 MB promised"
    )


if __name__ == "__main__":
    main()
