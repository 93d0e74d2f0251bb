"""Checks the Triton kernels without a GPU: compiled for GPUs that are not here, and their PTX executed on the CPU.

    python tools/check_ptx.py --checks          what the suite checks for sm_90, for each of --capabilities
    python tools/check_ptx.py --fuzz 2000       images of random sizes, in at least this number of launches
    python tools/check_ptx.py --tritons FOLDER  --checks, and ptxas, with each Triton that a supported torch pins

The first two if none is named. The last installs Triton in FOLDER, a new folder for each version, unless it is there:
2 GB are downloaded. A case that fails is printed, with its number and the seed, and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import fused_resampling
import fused_steps
import torch
from numpy.typing import NDArray
from pictures import as_batch
from ptx import EmulationError
from ptx.emulation import Emulator, emulate
from tqdm import tqdm

from shardio.augment import CenterCrop, Compose, HorizontalFlip, Normalize, RandomResizedCrop, Resize, ToDtype
from shardio.augment.boxes import Boxes, Draws
from shardio.augment.resample import Interpolation, Resampling

CAPABILITIES = (80, 90, 100, 120)
# Those of torch 2.4 to 2.14.
TRITONS = ("3.0.0", "3.1.0", "3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0")
MOST_SIDE = 70
MOST_CHANNELS = 5
# Sizes of a case: they have some compiled kernels in common, and compiling takes most of the time.
SIZES = 4
INTERPOLATIONS: tuple[Interpolation, ...] = ("bilinear", "bicubic")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fuzz(emulator: Emulator, least_launches: int, capabilities: list[int], seed: int) -> int:
    """Checks random cases until there have been `least_launches` more. Returns the number of cases."""
    case, done, before = 0, 0, emulator.num_launches
    with tqdm(desc="fuzz", unit=" launches", total=least_launches, disable=None) as bar:
        while done < least_launches:  # a bar that is disabled, without a terminal, counts nothing
            emulator.capability = capabilities[case % len(capabilities)]
            emulator.division_seed = case
            check = (fuzz_resampling, fuzz_windows, fuzz_steps)[case % 3]
            try:
                check(np.random.default_rng((seed, case)))
            except (AssertionError, EmulationError) as error:
                sys.exit(f"{check.__name__}: FAILED in case {case}, sm_{emulator.capability}, {seed=}: {error!r}")
            case += 1
            bar.update(emulator.num_launches - before - done)
            done = emulator.num_launches - before
    emulator.division_seed = None
    return case


def fuzz_resampling(rng: np.random.Generator) -> None:
    """Checks gray levels, and what is normalized and cast, of images of several sizes."""
    channels = int(rng.integers(1, MOST_CHANNELS + 1))
    interpolation, antialias = INTERPOLATIONS[rng.integers(2)], bool(rng.integers(2))
    mean, std = (tuple(numbers) for numbers in rng.uniform(0.2, 0.6, (2, channels)))
    dtype = DTYPES[rng.integers(3)]
    for _ in range(SIZES):
        images = images_of(rng, channels)
        count, (height, width) = len(images), images.shape[1:3]
        heights, widths = rng.uniform(0.5, height, count), rng.uniform(0.5, width, count)
        boxes = Boxes(rng.uniform(0, height - heights), rng.uniform(0, width - widths), heights, widths)
        within = boxes if rng.integers(2) else Boxes.whole(count, height, width)
        flips = rng.integers(0, 2, count).astype(bool)
        how = Resampling(size_of(rng), interpolation, antialias)
        given = as_batch(images), boxes, within, flips
        for cast in ({}, {"statistics": (mean, std)}, {"statistics": (mean, std), "dtype": dtype}, {"dtype": dtype}):
            fused_resampling.check_equal(*given, replace(how, **cast))


def fuzz_windows(rng: np.random.Generator) -> None:
    """Checks windows of images of several sizes.

    The buffers are those of the loader where windows are all but whole, and else smaller; their margins are 255.
    """
    channels, crops = int(rng.integers(1, MOST_CHANNELS + 1)), bool(rng.integers(2))
    interpolation, antialias = INTERPOLATIONS[rng.integers(2)], bool(rng.integers(2))
    casts = [Normalize(0.5, 0.25), ToDtype(DTYPES[rng.integers(3)])] if rng.integers(2) else []
    for _ in range(SIZES):
        images, (height, width) = images_of(rng, channels), size_of(rng)
        crop = RandomResizedCrop((height, width), scale=(0.01, 1.0), interpolation=interpolation, antialias=antialias)
        resize = Resize((height, width), interpolation=interpolation, antialias=antialias)
        middle = CenterCrop((int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))))
        chain = Compose([*([crop, HorizontalFlip()] if crops else [resize, middle]), *casts])
        draws = Draws(int(rng.integers(1 << 30)), 0, np.arange(len(images)))
        fused_resampling.check_windows(images, chain, draws, int(rng.choice([0, 4])))


def fuzz_steps(rng: np.random.Generator) -> None:
    """Checks single operations of all kinds, and programs of those that are exact, on images of several sizes."""
    channels = int(rng.integers(1, MOST_CHANNELS + 1))
    codes = fused_steps.ops_of(channels)
    programs = [[op for op in ops if op in {0, *codes}] for ops in (fused_steps.EXACT, fused_steps.TABLED)]
    for _ in range(SIZES):
        fused_steps.check_each(rng, rng.choice(codes, 6), size_of(rng), channels)
        fused_steps.check_program(rng, programs[rng.integers(2)], size_of(rng), channels)


def size_of(rng: np.random.Generator) -> tuple[int, int]:
    height, width = rng.integers(1, MOST_SIDE + 1, 2)
    return int(height), int(width)


def images_of(rng: np.random.Generator, channels: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (int(rng.integers(1, 4)), *size_of(rng), channels), np.uint8)


def check(emulator: Emulator, capability: int) -> None:
    """Checks what the suite checks for sm_90."""
    emulator.capability = capability
    for module in (fused_resampling, fused_steps):
        module.check()


def check_tritons(folder: Path) -> list[str]:
    """Checks each version of Triton, in processes of their own. Returns those that fail."""
    failed = []
    for version in TRITONS:
        place = folder / version
        if not (place / "triton").is_dir():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={place}"]
            subprocess.run([*install, f"triton=={version}"], check=True)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *filter(None, sys.path)])}
        command = [sys.executable, __file__, "--checks", "--assemble", "--capabilities", "80", "90"]
        print(f"Triton {version}", flush=True)
        if subprocess.run(command, env=environ).returncode:
            failed.append(version)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--fuzz", type=int, metavar="LAUNCHES")
    parser.add_argument("--tritons", type=Path, metavar="FOLDER")
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES, help="default: 80 90 100 120")
    parser.add_argument("--assemble", action="store_true", help="have ptxas assemble each kernel")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.tritons is not None:
        failed = check_tritons(given.tritons)
        sys.exit(f"FAILED with Triton {', '.join(failed)}" if failed else 0)
    if not given.checks and given.fuzz is None:
        given.checks, given.fuzz = True, 2000
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        emulator = emulate(given.capabilities[0], assemble=given.assemble)
        for capability in given.capabilities if given.checks else ():
            start, before = time.perf_counter(), emulator.num_launches
            check(emulator, capability)
            launches, seconds = emulator.num_launches - before, time.perf_counter() - start
            print(f"sm_{capability}: {launches} launches, {seconds:.0f} s", flush=True)
        if given.fuzz:
            start, before = time.perf_counter(), emulator.num_launches
            cases = fuzz(emulator, given.fuzz, given.capabilities, given.seed)
            launches, seconds = emulator.num_launches - before, time.perf_counter() - start
            print(f"fuzz: {cases:,} cases, {launches:,} launches, all as torch, {seconds:.0f} s, seed {given.seed}")


if __name__ == "__main__":
    main()
