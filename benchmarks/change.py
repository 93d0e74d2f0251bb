"""Changes of a set: the seconds that each takes, the bytes that it writes, and what reading the result costs.

The set has small pictures, so that their number counts and not their size. `change` adds embeddings and latents from
NPY files; the plain copy of such a file, synced, is beside it. The others take a hundredth of the samples. Then the
loader reads the set and one of its samples in another order, in turn: rows that a file tells are looked up for each
batch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import BUILD, describe_machine, generated_set, in_turn, print_ratios, spread

from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards
from shardio.sets.selection import Selection
from shardio.system.files import write_all

LATENTS, EMBEDDINGS = (4, 32, 32), (768,)


def own_nbytes(folder: Path) -> int:
    """Returns the bytes that the files of a set take which no other set has, too."""
    stats = [path.stat() for path in folder.iterdir()]
    return sum(stat.st_blocks * 512 for stat in stats if stat.st_nlink == 1)


def save_random(path: Path, shape: tuple[int, ...]) -> Path:
    """Writes an NPY file of float16 numbers, unless it is there."""
    if not path.exists():
        rows = np.lib.format.open_memmap(path.with_suffix(".part"), "w+", np.float16, shape)
        block = np.random.default_rng(0).standard_normal((1000, *shape[1:]), np.float32).astype(np.float16)
        for start in range(0, len(rows), len(block)):
            rows[start : start + len(block)] = block[: len(rows) - start]
        rows.flush()
        path.with_suffix(".part").rename(path)
    return path


def copy_synced(source: Path, target: Path) -> None:
    with open(source, "rb") as file, open(target, "wb", buffering=0) as to:
        while block := file.read(8 << 20):
            write_all(to.fileno(), block)
        os.fsync(to.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=8, help="of the pictures, in pixels")
    parser.add_argument("--latents", action="store_true", help="add 8 kB of latents per sample, too")
    parser.add_argument("--read-samples", type=int, default=5000, help="of 256 x 256, for the order's cost")
    parser.add_argument("--batches", type=int, default=60, help="per way and round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(describe_machine())
    out = generated_set(options.samples, options.size)
    whole = sum(path.stat().st_size for path in out.iterdir())
    arrays = {"embeddings": EMBEDDINGS, **({"latents": LATENTS} if options.latents else {})}
    files = {
        name: save_random(BUILD / f"{name}-{options.samples}.npy", (options.samples, *shape))
        for name, shape in arrays.items()
    }
    some = np.random.default_rng(1).choice(options.samples, options.samples // 100, replace=False)
    keys = open_shards(out).index["key"][some]
    labels = {bytes(key): 7 for key in keys}
    with tempfile.TemporaryDirectory(dir=BUILD) as made:
        here = Path(made)
        ways: dict[str, Callable[[Path], object]] = {
            f"add {name}": lambda new, name=name: change(out, new, arrays={name: files[name]}) for name in files
        }
        ways["relabel 1%"] = lambda new: change(out, new, labels=labels)
        ways["drop 1%"] = lambda new: change(out, new, drop=Selection(indices=some))
        ways["keep 1%"] = lambda new: change(out, new, keep=Selection(indices=some))
        ways["merge"] = lambda new: merge([out, out], new, same_keys="allow", same_images="keep")
        print(f"{options.samples:,} samples, {whole / 1e6:,.0f} MB")
        for name, way in ways.items():
            new = here / name.replace(" ", "-")
            seconds = []
            for _ in range(options.rounds):
                shutil.rmtree(new, ignore_errors=True)
                start = time.perf_counter()
                way(new)
                seconds.append(time.perf_counter() - start)
            written = own_nbytes(new)
            size = f"{written / 1e6:,.1f} MB written, {written / whole:.2%} of the set"
            print(f"{name:<18} {spread(seconds, 2):>24} s  {size}")
            shutil.rmtree(new)
        for name, path in files.items():
            seconds = []
            for _ in range(options.rounds):
                start = time.perf_counter()
                copy_synced(path, here / "copy")
                seconds.append(time.perf_counter() - start)
                (here / "copy").unlink()
            print(f"{f'copy {name}':<18} {spread(seconds, 2):>24} s, of the NPY file, synced")

        plain = generated_set(options.read_samples, 256)
        shuffled = here / "shuffled"
        order = np.random.default_rng(2).permutation(options.read_samples)
        change(plain, shuffled, keep=Selection(indices=order))
        with ShardLoader(plain, 256, device="cpu") as as_stored, ShardLoader(shuffled, 256, device="cpu") as ordered:

            def take(loader: ShardLoader) -> int:
                images = batches = 0
                while batches < options.batches:
                    for _, labels in loader:
                        images += len(labels)
                        batches += 1
                return images

            loaders = {"as stored": as_stored, "in another order": ordered}
            for loader in loaders.values():
                take(loader)
            rates = in_turn(
                {name: lambda loader=loader: take(loader) for name, loader in loaders.items()}, options.rounds
            )
        print_ratios(rates, "as stored", "images/s")


if __name__ == "__main__":
    main()
