"""`shardio info`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option
from shardio.cli.output import Column, levels_text, next_step, show, table, telling_of_servers
from shardio.errors import printable, shortened
from shardio.system.amounts import bytes_text, counted

if TYPE_CHECKING:
    from shardio.format.entries import ArrayEntry, SplitEntry
    from shardio.format.layout import RowType
    from shardio.format.manifest import Manifest
    from shardio.sets.statistics import ClassCounts
    from shardio.sets.storage import Storage


# An index of more bytes is not fetched from a server for a few counts.
_MOST_FETCHED_NBYTES = 8 << 20
_MOST_CLASSES = 5


@click.command(short_help="Show what a set holds.")
@click.argument("out")
@click.option("-v", "--verbose", is_flag=True, help="Say all that is known of how the set was made.")
@json_option
def info(out: str, verbose: bool, as_json: bool) -> None:
    """Say what the set in OUT is: samples, size, arrays, classes, state, how it was made, and how to use it.

    OUT is a folder, a URL such as s3://bucket/name, or a name that is found in the roots of SHARDIO_PATH.
    """
    from shardio.sets.names import is_url
    from shardio.sets.storage import open_storage

    with telling_of_servers([out]):
        storage = open_storage(out if is_url(out) else Path(out))
        manifest = storage.load_manifest()
        fault = storage.find_fault(manifest)
        in_use = {} if fault else {name: _in_use(storage, split) for name, split in manifest.splits.items()}
        counts = "" if as_json or fault else _counts(storage, manifest)
    if as_json:
        show(_facts(storage.name, manifest, fault, in_use))
    else:
        show(_summary(storage.name, manifest, fault, in_use, counts, verbose))


def _counts(storage: Storage, manifest: Manifest) -> ClassCounts | str:
    """Returns how many samples each class has in the main split, or why that is not known."""
    from shardio.errors import FormatError
    from shardio.sets.index import read_index
    from shardio.sets.levels import first_split
    from shardio.sets.names import is_url
    from shardio.sets.statistics import count_classes

    name = first_split(manifest.splits)
    nbytes = manifest.splits[name].index.nbytes
    if is_url(storage.name) and nbytes > _MOST_FETCHED_NBYTES:
        return f"not counted: `shardio stats` would read {bytes_text(nbytes)}"
    try:
        return count_classes(read_index(storage, manifest, name)["label"], len(manifest.classes))
    except (FormatError, OSError) as error:
        return f"not counted: {error}"


def _in_use(storage: Storage, split: SplitEntry) -> list[int]:
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
        "splits": {name: _split_facts(split, in_use.get(name)) for name, split in manifest.splits.items()},
        "columns": {name: dict(split.index.columns) for name, split in manifest.splits.items()},
        "nbytes": manifest.nbytes,
        "num_rejects": manifest.rejects.num_rejects,
        "provenance": dict(manifest.provenance),
    }


def _split_facts(split: SplitEntry, in_use: list[int] | None) -> dict[str, Any]:
    return {
        "num_samples": split.num_samples,
        "num_shards": len(split.shards),
        "squashed": split.squashed,
        "num_stored": split.num_rows,
        "order": split.order,
        "in_use": in_use,
        "arrays": {name: _array_facts(array) for name, array in split.arrays.items()},
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


def _summary(
    name: str,
    manifest: Manifest,
    fault: str,
    in_use: Mapping[str, list[int]],
    counts: ClassCounts | str,
    verbose: bool,
) -> Iterator[str]:
    """Yields what matters first. `counts` are those of the main split, or why they are not known."""
    from shardio.sets.history import describe_making
    from shardio.sets.levels import stored_levels
    from shardio.sets.names import is_url

    height, width, channels = manifest.sample_shape
    num_samples = sum(split.num_samples for split in manifest.splits.values())
    classes = f"{counted(len(manifest.classes), 'class')}, " if manifest.classes else ""
    yield f"{name}: {counted(num_samples, 'sample')}, {bytes_text(manifest.nbytes)}, {classes}{_state(fault)}"
    if fault:
        yield f"  state   {_state(fault)}: {fault}"
    yield f"  sample  {height} x {width} x {channels} uint8"
    for split_name, split in manifest.splits.items():
        squashed = ", squashed" if split.squashed else ""
        held = f"{counted(split.num_samples, 'sample')} in {counted(len(split.shards), 'shard')}"
        yield f"  {split_name:<7} {held}{squashed}"
        if columns := ", ".join(column for column, _ in split.index.columns):
            yield from _wrapped("", f"columns {columns}", verbose)
        if split.order is not None:
            yield f"          order {_stored(split.order, split.num_rows, in_use.get(split_name))} samples in use"
        yield from _arrays(split, in_use.get(split_name))
    yield from _classes(manifest, counts)
    yield f"  refused {counted(manifest.rejects.num_rejects, 'image')} when it was made"
    if made := describe_making(manifest):
        yield from _wrapped("made by", made, verbose)
    if levels := stored_levels(manifest.provenance, channels):
        yield f"  pixels  {levels_text(levels)}"
    yield f"  digest  {manifest.digest}"
    if verbose:
        for key, value in _flat(manifest.provenance):
            yield f"  {key}: {value}"
    yield f"  use     {_use(name, manifest)}"
    yield next_step("verify" if fault else "stats" if is_url(name) else "view", name)


def _classes(manifest: Manifest, counts: ClassCounts | str) -> Iterator[str]:
    """Yields how many samples the classes have, and the first of them."""
    from shardio.sets.levels import first_split

    if isinstance(counts, str):
        if counts:
            yield f"  classes {counts}"
        return
    split, each = first_split(manifest.splits), counts.range
    spread = f"{each.least:,} to {each.most:,} samples of each, median {each.median:,}"
    if each.least == each.most:
        spread = f"{counted(int(each.least), 'sample')} of each"
    yield f"  classes {split} has {spread}"
    shown = counts.first(_MOST_CLASSES)
    names, called = manifest.classes, manifest.class_names
    cells = [
        Column("label", [str(label) for label, _ in shown], right=True),
        Column("class", [shortened(names[label], 24) if names else "" for label, _ in shown]),
        Column("called", [shortened(called[label], 24) if called else "" for label, _ in shown]),
        Column("samples", [f"{count:,}" for _, count in shown], right=True),
    ]
    lines = list(table([column for column in cells if any(column.cells)]))
    yield from (f"          {line}" for line in lines[1:])
    if more := len(counts.labels) - len(shown):
        yield f"          and {more:,} more"


def _use(place: str, manifest: Manifest) -> str:
    """Returns the call that trains on the set."""
    from shardio.sets.levels import first_split
    from shardio.sets.names import is_url

    split = first_split(manifest.splits)
    arguments = [json.dumps(place, ensure_ascii=False), f"batch_size={min(256, manifest.splits[split].num_samples)}"]
    if split != "train":
        arguments.append(f"split={json.dumps(split)}")
    if is_url(place):
        arguments.append('cache="/local/disk"')
    return f"ShardLoader({', '.join(arguments)})"


def _wrapped(title: str, text: str, whole: bool) -> list[str]:
    """Returns a text behind a title, in lines of 80 columns: in three at most, unless it is to be `whole`."""
    return textwrap.wrap(
        printable(text),
        79,
        initial_indent=f"  {title:<7} ",
        subsequent_indent=" " * 10,
        break_on_hyphens=False,
        max_lines=None if whole else 3,
        placeholder=" ...",
    )


def _arrays(split: SplitEntry, in_use: list[int] | None) -> Iterator[str]:
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


def _flat(values: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields each single value of nested ones, as JSON writes it if it is no text, and where it is."""
    for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(x, (dict, list)) for x in value)):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(map(_text, value))
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
