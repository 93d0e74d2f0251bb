"""The speed of batches on their way to a GPU: beside bare pinned copies, and by a way that the loader does not go.

bus       `shardio bench --device cuda`: the loader beside copies of as large batches from pinned memory, and nothing
          else. The aim is 0.85 of them.
mapping   Is the copy into pinned slots needed? The mapped shards are registered with CUDA, read-only, and each sample
          is copied to the device right out of the page cache. Drivers may refuse this.

Everything that is compared takes turns. Exit code 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import describe_gpu, describe_machine, generated_set, in_turn, print_ratios
from numpy.typing import NDArray

from shardio.loading.loader import ShardLoader
from shardio.measure.bench import Sweep, bench
from shardio.reading.shardset import ShardSet, open_shards

Way = Callable[[], int]
PARTS = ("bus", "mapping")
REGISTER_READ_ONLY = 0x08
HOST_TO_DEVICE = 1


class CudaError(Exception):
    """A call of the CUDA runtime failed."""


class Runtime:
    """The CUDA runtime that torch has loaded, for calls that torch does not offer."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            self._library = ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise CudaError(str(error)) from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()  # or torch would find it after its next kernel
            raise CudaError(f"{name}: error {code} ({self._library.cudaGetErrorString(code).decode()})")

    @contextmanager
    def registered(self, shards: ShardSet) -> Iterator[None]:
        with ExitStack() as stack:
            for array in shards.shard_arrays:
                address = ctypes.c_void_p(array.ctypes.data)
                flags = ctypes.c_uint(REGISTER_READ_ONLY)
                self("cudaHostRegister", address, ctypes.c_size_t(array.nbytes), flags)
                stack.callback(self, "cudaHostUnregister", address)
            yield


def measure_bus(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    sweep = Sweep(devices=["cuda"], batch_sizes=options.batch_sizes, num_threads=options.threads)
    report = bench(path, sweep, rounds=options.rounds, seconds=options.seconds)
    rows = []
    for loader in report.loaders:
        asked = loader.combination
        rows.append(
            {
                "batch_size": asked.batch_size,
                "num_threads": asked.num_threads,
                **loader.speed.to_dict(),
                "of_pinned_copies": report.ratios(loader)["pinned_copy"],
            }
        )
    return rows


def from_the_mapping(
    runtime: Runtime, shards: ShardSet, batch_size: int, batches: int, device: torch.device
) -> Iterator[int]:
    """Copies random samples: `batches` batches at a step."""
    row_nbytes = shards.row_nbytes
    firsts = np.concatenate([array.ctypes.data + row_nbytes * np.arange(len(array)) for array in shards.shard_arrays])
    memory = torch.empty(batch_size * row_nbytes, dtype=torch.uint8, device=device)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    kind, nbytes = ctypes.c_int(HOST_TO_DEVICE), ctypes.c_size_t(row_nbytes)

    def copy(chosen: NDArray[np.int64]) -> None:
        target = memory.data_ptr()
        for source in firsts[chosen].tolist():
            runtime("cudaMemcpyAsync", ctypes.c_void_p(target), ctypes.c_void_p(source), nbytes, kind, stream)
            target += row_nbytes

    rng = np.random.default_rng(0)
    copy(chosen := rng.integers(0, len(shards), batch_size))
    pictures = np.stack([shards[i].image for i in chosen.tolist()])
    assert np.array_equal(memory.cpu().numpy(), pictures.reshape(-1))
    while True:
        for _ in range(batches):
            copy(rng.integers(0, len(shards), batch_size))
        torch.cuda.synchronize(device)
        yield batches * batch_size


def from_the_loader(loader: ShardLoader, batches: int) -> Iterator[int]:
    def endless() -> Iterator[int]:
        while True:
            for _, labels in loader:
                yield len(labels)

    sizes = endless()
    while True:
        images = sum(islice(sizes, batches))
        torch.cuda.synchronize(loader.device)
        yield images


def rates_in_turn(ways: dict[str, Iterator[int]], rounds: int) -> dict[str, list[float]]:
    steps: dict[str, Way] = {name: partial(next, steps) for name, steps in ways.items()}
    in_turn(steps, 1)
    return in_turn(steps, rounds)


def measure_mapping(path: Path, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    shards = open_shards(path)
    batch_size = min(256, len(shards))
    try:
        runtime = Runtime()
        with runtime.registered(shards), ExitStack() as stack:
            loader = stack.enter_context(ShardLoader(path, batch_size, device=device, rank=0, world_size=1))
            ways = {
                "loader": from_the_loader(loader, options.batches),
                "mapping": from_the_mapping(runtime, shards, batch_size, options.batches, device),
            }
            return {"supported": True, "images_per_second": rates_in_turn(ways, options.rounds)}
    except CudaError as error:
        return {"supported": False, "reason": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, nargs="?", help="a set in the page cache; generated if none is given")
    parser.add_argument("--samples", type=int, default=20_000, help="samples of the generated set, 256 x 256 x 3")
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given again  [default: all]")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, default=50, help="batches per way and round, for mapping")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per way and round, for bus")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is here: there is nothing to measure", file=sys.stderr)
        sys.exit(2)
    device = torch.device("cuda", torch.cuda.current_device())
    machine = f"{describe_machine()}; {describe_gpu(device)}"
    path = options.shards or generated_set(options.samples, 256)
    report: dict[str, Any] = {"machine": machine}
    for part in options.only or PARTS:
        if part == "bus":
            report[part] = measure_bus(path, options)
        else:
            report[part] = measure_mapping(path, options, device)
    if options.json:
        print(json.dumps(report))
        return
    print(machine)
    for row in report.get("bus", []):
        print(
            f"bus: batch {row['batch_size']:>5} {row['num_threads']:>3} threads "
            f"{row['images_per_second']:>12,.0f} images/s {row['gigabytes_per_second']:>8.2f} GB/s, "
            f"{row['of_pinned_copies']:.3f} of pinned copies"
        )
    found = report.get("mapping")
    if found and found["supported"]:
        print_ratios(found["images_per_second"], "loader", "images/s")
    elif found:
        print(f"mapping: not supported: {found['reason']}")


if __name__ == "__main__":
    main()
