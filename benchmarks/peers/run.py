"""One way of one library. ../peers.py starts this in the environment of the library, where shardio need not be.

python run.py MODULE prepare SOURCE OUT                   writes the library's form of the pixels or images
python run.py MODULE check OUT BATCH_SIZE WORKERS WAY     reads an epoch; prints a hash of its samples
python run.py MODULE evaluate OUT COUNT FILE.npy          writes the first pictures of an evaluation
python run.py MODULE write IMAGES OUT WORKERS WAY         measures a converter
python run.py MODULE measure OUT BATCH_SIZE WORKERS WAY SECONDS
python run.py MODULE ways                                 prints the names of the ways, and the versions

The last line of the standard output is an answer in JSON. A library may print others before.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Epoch = Callable[[int], Iterator[tuple[Any, Any]]]
# How often an epoch that is measured reads each sample. Some pay much for the start of an epoch; ImageNet's have
# 5,000 batches.
REPEATS = 100
STARTED = time.perf_counter()
TICKS = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """Returns the process and all those under it."""
    found, parents = [root], {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def cpu_seconds() -> float:
    """Returns the processor's seconds of this process, of those under it, and of those that have ended."""
    ticks = 0
    for process in tree(os.getpid()):
        try:
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / TICKS


def memory_nbytes() -> dict[str, int]:
    """Returns the memory of the tree: its proportional share, and what one process has written and no other shares."""
    sums = {"pss": 0, "private": 0}
    for process in tree(os.getpid()):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        sums["pss"] += found["Pss"]
        sums["private"] += found["Private_Dirty"]  # mapped files, which are clean, can be dropped
    return sums


def check(epoch: Epoch) -> dict[str, Any]:
    """Returns how many samples an epoch has, how many of them differ in their number, and a hash of them in order.

    The pixels may be None: then the hash is that of the numbers.
    """
    sums = []
    for batch in epoch(0):
        pixels, numbers = (part.cpu() if hasattr(part, "cpu") else part for part in batch)
        samples = [b""] * len(numbers) if pixels is None else np.asarray(pixels)
        for sample, number in zip(samples, np.asarray(numbers), strict=True):
            sums.append((int(number), zlib.crc32(np.ascontiguousarray(sample))))
    distinct = sorted(set(sums))
    return {
        "samples": len(sums),
        "distinct": len({number for number, _ in sums}),
        "digest": hashlib.sha256(repr(distinct).encode()).hexdigest(),
    }


def gpu() -> Any:
    """Returns torch if it sees a GPU, and None otherwise, or if the library has not imported torch."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def delivered(batches: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yields the batches, on the GPU if there is one: they count once they are copied there."""
    torch = gpu()
    for images, labels in batches:
        if torch and isinstance(images, torch.Tensor):
            images = images.cuda(non_blocking=True)
            torch.cuda.current_stream().synchronize()  # other batches may be on their way on other streams
        yield images, labels


def measure(opened: Callable[[], Epoch], seconds: float, to_gpu: bool = False) -> dict[str, Any]:
    """Reads epochs for so many seconds after the first batch, for which importing the library counts, too."""
    epoch = opened()

    def batches() -> Iterator[tuple[Any, Any]]:
        for number in range(1 << 30):
            yield from delivered(epoch(number)) if to_gpu else epoch(number)

    reading = batches()
    next(reading)
    first = time.perf_counter() - STARTED
    images, used, start = 0, cpu_seconds(), time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        images += len(next(reading)[1])
    passed = time.perf_counter() - start
    used = cpu_seconds() - used
    return {
        "images_per_second": images / passed,
        "cpu_us_per_image": 1e6 * used / images,
        "first_batch_seconds": first,
        **memory_nbytes(),
        **({"device": torch.cuda.get_device_name() if (torch := gpu()) else "no GPU"} if to_gpu else {}),
    }


def write(way: Callable[[], None], images: Path) -> dict[str, Any]:
    """Times a converter, which may sync or not; what it has left to be written later is not waited for."""
    count = sum(file.is_file() for file in images.rglob("*"))
    used, start = cpu_seconds(), time.perf_counter()
    way()
    passed = time.perf_counter() - start
    return {"images_per_second": count / passed, "cpu_us_per_image": 1e6 * (cpu_seconds() - used) / count}


def import_what_torch_lacks() -> None:
    """Makes torchvision, which some libraries import, known beside a torch for the CPU."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from augment_peer import import_torchvision

    with contextlib.suppress(ImportError):
        import_torchvision()


def import_peer(name: str) -> Any:
    if name.endswith(("_litdata", "_streaming", "_torchvision", "_torchcodec", "tutorial_with_threads")):
        import_what_torch_lacks()
    return importlib.import_module(name)


def version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def main() -> dict[str, Any]:
    name, action, *words = sys.argv[1:]
    peer = import_peer(name)
    if action == "ways":
        return {"ways": list(peer.WAYS), "versions": [version(package) for package in peer.PACKAGES]}
    if action == "prepare":
        source, out = map(Path, words)
        began = time.perf_counter()
        peer.prepare(np.load(source, mmap_mode="r") if source.suffix == ".npy" else source, out)
        passed = time.perf_counter() - began
        return {"seconds": passed, "nbytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file())}
    if action == "write":
        return write(partial(peer.WAYS[words[3]], Path(words[0]), Path(words[1]), int(words[2])), Path(words[0]))
    if action == "evaluate":
        np.save(words[2], peer.evaluated(Path(words[0]), int(words[1])))
        return {}
    folder, batch_size, workers, way = Path(words[0]), int(words[1]), int(words[2]), peer.WAYS[words[3]]
    if action == "check":
        return check(way(folder, batch_size, workers, 1))
    to_gpu = not name.startswith("with_")
    return measure(lambda: way(folder, batch_size, workers, REPEATS), float(words[4]), to_gpu)


if __name__ == "__main__":
    print("\n" + json.dumps(main()), flush=True)
    os._exit(0)  # some libraries wait for threads or processes of their own for long
