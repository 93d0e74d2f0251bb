"""The cost of arrays beside the pixels: the loader with latents and embeddings, and with pixels alone, in turn.

The added bytes alone would make the loader slower; "allowed" is the rate of the pixels alone times the share of the
pixels in all bytes. The set must be in the page cache, or this measures the disk.

Then the latents without pixels, next to np.take of the same rows in as many threads, and what an epoch of them reads.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from common import BUILD, describe_machine, generated_set, in_turn, print_ratios
from numpy.typing import NDArray

from shardio.format.layout import MANIFEST_NAME, RowType
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.loading.loader import ShardLoader
from shardio.reading.choose import Io
from shardio.reading.shardset import ShardSet
from shardio.sets.rows import ArrayWriter

ROWS = {"latents": RowType("<f2", (4, 32, 32)), "embeddings": RowType("<f2", (768,))}


def set_with_arrays(num_samples: int, size: int) -> Path:
    """Returns a generated set with the arrays of ROWS, whose shards are links to those of the set without them."""
    plain = generated_set(num_samples, size)
    out = BUILD / f"{plain.name}-arrays"
    if (out / MANIFEST_NAME).exists():
        return out
    out.mkdir(exist_ok=True)
    manifest = load_manifest(plain)
    content = manifest.splits["train"]
    for entry in (*content.files, manifest.rejects):
        (out / entry.file).unlink(missing_ok=True)
        (out / entry.file).hardlink_to(plain / entry.file)
    rng = np.random.default_rng(0)
    arrays = {}
    for name, row in ROWS.items():
        with ArrayWriter(out, "train", name, "array", row, 1 << 30) as writer:
            for start in range(0, num_samples, 1000):
                count = min(1000, num_samples - start)
                writer.append(rng.standard_normal((count, *row.shape), np.float32).astype(row.dtype))
            arrays[name] = writer.finish()
    commit_manifest(out, replace(manifest, splits={"train": replace(content, arrays=arrays)}))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--io", choices=["mmap", "pread", "direct"], default="mmap")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, help="gather threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=60, help="per way and round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    path = set_with_arrays(options.samples, options.size)
    pixels, added = 3 * options.size**2, sum(row.nbytes for row in ROWS.values())
    print(describe_machine())
    print(f"io={options.io}, batches of {options.batch_size}; {pixels} bytes of pixels, {added} of arrays a sample")

    def load(arrays: Sequence[str], images: str | None = "", io: Io = options.io) -> ShardLoader:
        return ShardLoader(
            path,
            options.batch_size,
            io=io,
            images=images,
            num_threads=options.threads,
            device=options.device,
            arrays=arrays,
        )

    def take(loader: ShardLoader) -> int:
        images = left = 0
        while left < options.batches:
            for batch in islice(loader, options.batches - left):
                images += len(batch[0])
                left += 1
        return images

    with load(()) as alone, load(tuple(ROWS)) as beside:
        for loader in (alone, beside):  # brings samples into the page cache, and the page tables
            for _ in loader:
                pass
        rates = in_turn({"pixels alone": lambda: take(alone), "with arrays": lambda: take(beside)}, options.rounds)
    rates["allowed"] = [rate * pixels / (pixels + added) for rate in rates["pixels alone"]]
    print_ratios(rates, "allowed", "images/s")

    row = ROWS["latents"]
    with load(("latents",), images=None) as latents, ThreadPoolExecutor(latents.num_threads) as pool:
        assert isinstance(latents.shards, ShardSet)
        stored = np.concatenate(latents.shards.mapped("latents").file_rows)
        # As many as the loader has slots, which a cache does not hold either.
        slots = [np.empty((options.batch_size, row.nbytes), np.uint8) for _ in range(4)]
        rng = np.random.default_rng(0)

        def copy(out: NDArray[np.uint8], indices: NDArray[np.int64], some: NDArray[np.int64]) -> None:
            np.take(stored, indices[some], axis=0, out=out[some[0] : some[-1] + 1], mode="clip")

        def gather() -> int:
            parts = np.array_split(np.arange(options.batch_size), latents.num_threads)
            for number in range(options.batches):
                indices = rng.integers(0, len(stored), options.batch_size)
                list(pool.map(partial(copy, slots[number % 4], indices), parts))
            return int(options.batches * options.batch_size)

        take(latents)
        rates = in_turn({"np.take": gather, "latents alone": lambda: take(latents)}, options.rounds)
    print_ratios(rates, "np.take", "samples/s")
    with load(("latents",), images=None, io="pread") as latents:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        count = sum(len(labels) for labels, _ in latents)
        read, grown = latents.stats()["read_nbytes"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"an epoch by pread: {read:,} bytes read, {count * row.nbytes:,} bytes of latents; memory + {grown:,} kB")


if __name__ == "__main__":
    main()
