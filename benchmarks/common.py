"""The shared part of the benchmarks: a generated set, rounds in turn, medians, and a line about the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.format.layout import MANIFEST_NAME

BUILD = Path(__file__).resolve().parents[1] / "build" / "benchmarks"


def describe_machine() -> str:
    model = "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next((x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), model)
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
    )


def describe_gpu(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


@dataclass(frozen=True)
class _Noise:
    """A dataset of random pixels."""

    num_samples: int
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> tuple[NDArray[np.uint8], int]:
        return np.random.default_rng(i).integers(0, 256, self.shape, dtype=np.uint8), i % 1000


def generated_set(num_samples: int, size: int, shard_nbytes: int = 1 << 30, pixels: Any = "rgb") -> Path:
    """Returns a set of random pixels, `size` x `size` x 3, in 1000 classes. It is written once, and then found."""
    out = BUILD / f"generated-{num_samples}-{size}-{shard_nbytes}{f'-{pixels}' * (pixels != 'rgb')}"
    shape = (size, size, 3)
    if pixels != "rgb" and not (out / MANIFEST_NAME).exists():
        convert(_Noise(num_samples, shape), out, size=size, pixels=pixels, shard_size=shard_nbytes)
    if not (out / MANIFEST_NAME).exists():
        rng = np.random.default_rng(0)
        with ShardWriter(out, shape, shard_nbytes=shard_nbytes) as writer:
            for i in tqdm(range(num_samples), desc="generating", disable=None):
                writer.append(rng.integers(0, 256, shape, dtype=np.uint8), i % 1000)
    return out


def in_turn(ways: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Returns items per second of each way, once per round, A B C A B C ... Each way returns how many items it did."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            count = way()
            rates[name].append(count / (time.perf_counter() - start))
    return rates


def spread(values: Sequence[float], digits: int) -> str:
    """Returns the median, the minimum and the maximum as text."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def ratios(values: Sequence[float], reference: Sequence[float], digits: int = 3) -> str:
    """Returns the spread of the ratios of the rounds."""
    return spread([a / b for a, b in zip(values, reference, strict=True)], digits)


def print_ratios(rates: Mapping[str, list[float]], reference: str, unit: str) -> None:
    """Prints the rates, and the round-by-round ratios to `reference`, each as median, minimum and maximum."""
    width = max(map(len, rates))
    for name, values in rates.items():
        print(f"{name:<{width}} {spread(values, 1):>38} {unit}   ratio {ratios(values, rates[reference])}")


# A small process lies between, as a process at first counts the memory of its parent as its own.
_MEASURE = """
import resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def measured(command: Sequence[str]) -> tuple[float, float]:
    """Runs a command. Returns its seconds, and the most memory that it had in megabytes, mapped files included."""
    done = subprocess.run([sys.executable, "-c", _MEASURE, *command], check=True, stdout=subprocess.PIPE, text=True)
    seconds, kilobytes = done.stdout.split()
    return float(seconds), float(kilobytes) / 1e3


def leave_the_page_cache(path: Path) -> None:
    for file in filter(Path.is_file, path.iterdir()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@contextmanager
def cgroup(limit: int) -> Iterator[Path]:
    """A cgroup with a limit of memory, page cache included. Yields its file that takes processes."""
    root = Path("/sys/fs/cgroup")
    is_v2 = (root / "cgroup.controllers").exists()
    folder = (root if is_v2 else root / "memory") / f"shardio-benchmark-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.max" if is_v2 else "memory.limit_in_bytes"
        (folder / name).write_text(str(limit))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()
