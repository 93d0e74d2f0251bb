"""The parts of all_gpu.py that look at a GPU: facts, order of streams, speed. Each result is a line of JSON, at once.

python benchmarks/gpu_parts.py PART [--dry-run]: with --dry-run, small, on the tests' stand-in for CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from common import describe_gpu, describe_machine, generated_set, in_turn

from shardio import ShardLoader
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop, ToDtype
from shardio.measure.limits import pinned_copies

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
SMI = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total,clocks.max.sm,mig.mode.current"


def note(figure: str, found: float, aim: float | None = None, at_most: bool = True) -> None:
    print(json.dumps({"figure": figure, "found": round(found, 4), "aim": aim, "at_most": at_most}), flush=True)


def machine(is_dry: bool) -> None:
    print(describe_gpu(torch.device("cuda", 0)))
    print(describe_machine())
    if not is_dry:
        print(torch.cuda.get_device_properties(0), torch.cuda.get_allocator_backend())
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"], timeout=15, check=False)


def chains(size: int) -> dict[str, Compose | None]:
    standard = [RandomResizedCrop(size), HorizontalFlip(), Normalize("imagenet")]
    return {"uint8": None, "float32": Compose(standard), "bfloat16": Compose([*standard, ToDtype(torch.bfloat16)])}


def endless(loader: ShardLoader) -> Iterator[Any]:
    return chain.from_iterable(repeat(loader))


def streams(is_dry: bool) -> None:
    """Batches as on the CPU, by consumers on changing streams that sleep, and calls that wait for the device."""
    count, batch_size, size = (30, 4, 12) if is_dry else (1000, 32, 96)
    path = generated_set(16 * batch_size, size)
    for name, transform in chains(size // 3 * 2).items():
        options: dict[str, Any] = {"transform": transform, "seed": 5, "return_indices": True}
        rng, kept, behind = random.Random(1), [], 0
        choices = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        with ShardLoader(path, batch_size, device="cuda", **options) as loader:
            next(iter(loader))  # copies constants, once in a process
            torch.cuda.synchronize()
            copies = loader._pipeline._copier._stream  # type: ignore[union-attr]
            batches = endless(loader)
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                for _ in range(count):
                    stream = rng.choice(choices)
                    with torch.cuda.stream(stream):
                        batch = next(batches)
                        torch.cuda._sleep(rng.choice([1, 1, 400_000, 4_000_000]))
                        kept.append([tensor.clone() for tensor in batch])
                        behind += not stream.query()
                        # Memory of the same size, to be given away again.
                        torch.full_like(batch[0], 7)
                        del batch
                    if rng.random() < 0.2:
                        with torch.cuda.stream(copies):
                            torch.cuda._sleep(2_000_000)
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        note(f"{name}: calls that wait for the device, in {count:,} batches", len(waits), 0)
        note(f"{name}: batches for which the device was behind", behind, count // 20, at_most=False)
        wrong = apart = 0.0
        with ShardLoader(path, batch_size, device="cpu", **options) as loader:
            next(iter(loader))
            for found, expected in zip(kept, islice(endless(loader), count), strict=True):
                images, *rest = [tensor.cpu() for tensor in found]
                wrong += sum(int((one != other).sum()) for one, other in zip(rest, expected[1:], strict=True))
                if transform is None:
                    wrong += int((images != expected[0]).sum())
                else:
                    apart = max(apart, ulps(images, expected[0]))
        note(f"{name}: wrong {'pixels and ' if transform is None else ''}labels", wrong, 0)
        if transform is not None:
            note(f"{name}: largest difference from the CPU, ulp", apart, 1)


def ulps(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest difference of two tensors, in units of the last place of the larger numbers."""
    exponents = torch.frexp(torch.maximum(one.abs(), other.abs()).double()).exponent.double()
    units = torch.exp2(exponents - 1) * torch.finfo(one.dtype).eps
    return float(((one.double() - other.double()).abs() / units).max())


def speed(is_dry: bool) -> None:
    """Images per second on the device, as ratios to bare copies of the stored bytes from pinned memory."""
    samples, batch_size, size, rounds = (32, 4, 32, 1) if is_dry else (20_000, 256, 256, 5)
    path, crop = generated_set(samples, size), 16 if is_dry else 224
    threads = sorted({1, 4, min(16, os.cpu_count() or 1)})
    standard, bare = chains(crop)["bfloat16"], "bare pinned copies"
    with ExitStack() as stack:
        copies = pinned_copies(torch.device("cuda", 0), batch_size, 3 * size * size)
        ways: dict[str, Iterator[int]] = {bare: stack.enter_context(closing(copies))}
        for number in threads:
            for name, transform in (("stored bytes", None), ("standard transform", standard)):
                loader = ShardLoader(path, batch_size, device="cuda", transform=transform, num_threads=number)
                batches = endless(stack.enter_context(loader))
                ways[f"{name}, {number} threads"] = images_of(batches, 2 if is_dry else 64)
        steps = {name: partial(next, way) for name, way in ways.items()}
        in_turn(steps, 1)  # pins memory, and reads the set into the page cache
        found: list[dict[str, float]] = []
        for _ in range(rounds):
            found.append({name: rate for name, (rate,) in in_turn(steps, 1).items()})
            print({name: round(rate) for name, rate in found[-1].items()}, flush=True)
    rates = {name: statistics.median(rates[name] for rates in found) for name in steps}
    note(f"{bare}, GB/s", rates[bare] * 3 * size * size / 1e9)
    best = max(rate for name, rate in rates.items() if name.startswith("stored"))
    note("stored bytes to the device, of bare pinned copies", best / rates[bare], 0.85, at_most=False)
    for name, rate in rates.items():
        if name != bare:
            note(f"{name}, images/s", rate)


def images_of(batches: Iterator[Any], count: int) -> Iterator[int]:
    """Yields the number of images of some batches, once the device has them."""
    while True:
        number = sum(len(labels) for _, labels in islice(batches, count))
        torch.cuda.synchronize()
        yield number


def main() -> None:
    parts = {part.__name__: part for part in (machine, streams, speed)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.dry_run:
            sys.path.insert(0, str(SUPPORT))
            from simulated_cuda import Simulation

            stack.enter_context(Simulation())
        parts[options.part](options.dry_run)


if __name__ == "__main__":
    main()
