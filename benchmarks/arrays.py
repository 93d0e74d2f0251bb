"""The cost of arrays beside the pixels: the loader with latents and embeddings, and with pixels alone, in turn.

The added bytes alone would make the loader slower; "allowed" is the rate of the pixels alone times the share of the
pixels in all bytes. The set must be in the page cache, or this measures the disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from common import BUILD, describe_machine, generated_set, in_turn, print_ratios

from shardio.format.layout import MANIFEST_NAME, RowType
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.loading.loader import ShardLoader
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
    for entry in manifest.files:
        (out / entry.file).unlink(missing_ok=True)
        (out / entry.file).hardlink_to(plain / entry.file)
    rng = np.random.default_rng(0)
    arrays = {}
    for name, row in ROWS.items():
        writer = ArrayWriter(out, "train", name, "array", row, 1 << 30)
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

    def load(arrays: Sequence[str]) -> ShardLoader:
        return ShardLoader(
            path,
            options.batch_size,
            io=options.io,
            num_threads=options.threads,
            device=options.device,
            arrays=arrays,
        )

    def take(loader: ShardLoader) -> int:
        images = left = 0
        while left < options.batches:
            for _, labels, *_ in islice(loader, options.batches - left):
                images += len(labels)
                left += 1
        return images

    with load(()) as alone, load(tuple(ROWS)) as beside:
        for loader in (alone, beside):  # brings samples into the page cache, and the page tables
            for _ in loader:
                pass
        rates = in_turn({"pixels alone": lambda: take(alone), "with arrays": lambda: take(beside)}, options.rounds)
    rates["allowed"] = [rate * pixels / (pixels + added) for rate in rates["pixels alone"]]
    print_ratios(rates, "allowed", "images/s")


if __name__ == "__main__":
    main()
