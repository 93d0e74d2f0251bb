"""Writes arrays and orders next to the shards of a set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import ArrayEntry
from shardio.format.layout import HEADER_NBYTES, ArrayKind, RowType
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.sets.rows import ArrayWriter, write_index, write_order

Given = tuple[ArrayKind, NDArray[Any]]


def write_array(
    folder: Path, split: str, name: str, kind: ArrayKind, values: NDArray[Any], most: int = 7
) -> ArrayEntry:
    """Writes an array of so many values a file at most."""
    row = RowType(values.dtype.str, values.shape[1:])
    writer = ArrayWriter(folder, split, name, kind, row, HEADER_NBYTES + most * row.nbytes)
    writer.append(values)
    return writer.finish()


def change_split(
    out: Path,
    arrays: Mapping[str, Given] | None = None,
    order: NDArray[np.int64] | None = None,
    split: str = "train",
    most: int = 7,
) -> Manifest:
    """Gives a split arrays of its stored rows, and has sample i in the stored row order[i], in all of them."""
    manifest = load_manifest(out)
    content = manifest.splits[split]
    made = {name: write_array(out, split, name, kind, values, most) for name, (kind, values) in (arrays or {}).items()}
    content = replace(content, arrays={**content.arrays, **made})
    if order is not None:
        rows = np.fromfile(out / content.index.file, content.index.dtype, offset=HEADER_NBYTES)[order]
        content = replace(
            content,
            num_samples=len(order),
            index=write_index(out, split, rows),
            orders=(write_order(out, split, 0, order),),
            order=0,
            arrays={name: replace(array, order=0) for name, array in content.arrays.items()},
        )
    changed = replace(manifest, splits={**manifest.splits, split: content})
    commit_manifest(out, changed)
    return changed


def some_arrays(count: int, height: int, width: int, seed: int = 0) -> dict[str, Given]:
    """Returns arrays of every kind for pictures of this size, but of another size of the same pictures."""
    rng = np.random.default_rng(seed)
    return {
        "mask": ("mask", rng.integers(0, 256, (count, height, width), dtype=np.uint8)),
        "depth": ("mask", rng.integers(0, 1 << 16, (count, height, width, 2), dtype=np.uint16)),
        "clip": ("array", rng.standard_normal((count, 16)).astype("<f2")),
        "number": ("array", rng.integers(-(1 << 62), 1 << 62, count)),
        "flags": ("array", rng.integers(0, 2, (count, 5)).astype(bool)),
    }
