"""`shardio info`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option
from shardio.cli.output import Column, bytes_text, show, table, telling_of_servers

if TYPE_CHECKING:
    from shardio.format.entries import ArrayEntry, Split
    from shardio.format.layout import RowType
    from shardio.format.manifest import Manifest
    from shardio.sets.storage import Storage


@click.command(short_help="Say what a set holds.")
@click.argument("out")
@json_option
def info(out: str, as_json: bool) -> None:
    """Say what the set in OUT is: splits, samples, arrays, shape, classes and what people call them, state, size,
    digest.

    OUT is a folder, a URL such as s3://bucket/name, or a name that is found in the roots of SHARDIO_PATH.
    """
    from shardio.sets.names import is_url
    from shardio.sets.storage import open_storage

    with telling_of_servers([out]):
        storage = open_storage(out if is_url(out) else Path(out))
        manifest = storage.load_manifest()
        fault = storage.find_fault(manifest)
        in_use = {} if fault else {name: _in_use(storage, split) for name, split in manifest.splits.items()}
    show((_facts if as_json else _summary)(storage.name, manifest, fault, in_use))


def _in_use(storage: Storage, split: Split) -> list[int]:
    """Returns how many different stored rows each order of the split names."""
    import numpy as np

    from shardio.format.layout import HEADER_NBYTES

    counts = []
    for order in split.orders:
        rows = np.empty(split.num_samples, order.row.dtype)
        storage.read_into(order, HEADER_NBYTES, rows.view(np.uint8).data)
        counts.append(len(np.unique(rows)))
    return counts


def _facts(name: str, manifest: Manifest, fault: str, in_use: Mapping[str, list[int]]) -> dict[str, Any]:
    return {
        "path": name,
        "state": _state(fault),
        "reason": fault,
        "digest": manifest.digest,
        "sample_shape": list(manifest.sample_shape),
        "num_classes": len(manifest.classes),
        "class_names": list(manifest.class_names),
        "splits": {
            name: {
                "num_samples": split.num_samples,
                "num_shards": len(split.shards),
                "num_stored": split.num_rows,
                "order": split.order,
                "in_use": in_use.get(name),
                "arrays": {array: _array_facts(entry) for array, entry in split.arrays.items()},
            }
            for name, split in manifest.splits.items()
        },
        "columns": {name: dict(split.index.columns) for name, split in manifest.splits.items()},
        "nbytes": manifest.nbytes,
        "num_rejects": manifest.rejects.num_rejects,
        "provenance": dict(manifest.provenance),
    }


def _array_facts(array: ArrayEntry) -> dict[str, Any]:
    return {
        "kind": array.kind,
        "dtype": array.row.dtype,
        "shape": list(array.row.shape),
        "nbytes": sum(entry.nbytes for entry in array.files),
        "num_stored": array.num_rows,
        "order": array.order,
    }


def _summary(name: str, manifest: Manifest, fault: str, in_use: Mapping[str, list[int]]) -> Iterator[str]:
    height, width, channels = manifest.sample_shape
    yield f"{name}: {bytes_text(manifest.nbytes)}, {len(manifest.classes):,} classes"
    yield f"  sample  {height} x {width} x {channels} uint8"
    if manifest.class_names:
        named = [f"{name} is {called}" for name, called in zip(manifest.classes, manifest.class_names, strict=True)]
        yield f"  names   {'; '.join(named[:3])}{'; ...' if len(named) > 3 else ''}"
    for name, split in manifest.splits.items():
        yield f"  {name:<8}{split.num_samples:,} samples in {len(split.shards):,} shards"
        if columns := ", ".join(column for column, _ in split.index.columns):
            yield f"          columns {columns}"
        if split.order is not None:
            yield f"          order {_stored(split.order, split.num_rows, in_use.get(name))} samples in use"
        yield from _arrays(split, in_use.get(name))
    yield f"  state   {_state(fault)}{fault and ': '}{fault}"
    yield f"  refused {manifest.rejects.num_rejects:,} images when it was made"
    yield f"  digest  {manifest.digest}"
    for name, value in _flat(manifest.provenance):
        yield f"  {name}: {value}"


def _arrays(split: Split, in_use: list[int] | None) -> Iterator[str]:
    """Yields a table of the split's arrays, if there are any."""
    arrays = split.arrays.items()
    columns = [
        Column("array", [name for name, _ in arrays]),
        Column("kind", [array.kind for _, array in arrays]),
        Column("type", [_type_text(array.row) for _, array in arrays]),
        Column("size", [bytes_text(sum(entry.nbytes for entry in array.files)) for _, array in arrays], right=True),
    ]
    if any(array.order is not None for _, array in arrays):
        stored = [
            "" if array.order is None else f"{_stored(array.order, array.num_rows, in_use)} in use"
            for _, array in arrays
        ]
        columns.append(Column("order", stored))
    if split.arrays:
        yield from (f"          {line}" for line in table(columns))


def _type_text(row: RowType) -> str:
    import numpy as np

    return " ".join([" x ".join(map(str, row.shape)), np.dtype(row.dtype).name]).strip()


def _stored(order: int, num_rows: int, in_use: list[int] | None) -> str:
    return f"{order}: {'?' if in_use is None else f'{in_use[order]:,}'} of {num_rows:,} stored"


def _state(fault: str) -> str:
    return "damaged" if fault else "published"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
