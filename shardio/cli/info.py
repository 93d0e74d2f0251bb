"""The command `shardio info`, which shows what a set holds."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option, path_text
from shardio.cli.output import next_step, show, table, telling_of_servers
from shardio.errors import bytes_text, counted, printable, shortened

if TYPE_CHECKING:
    from shardio.format.entries import SplitEntry
    from shardio.format.manifest import Manifest
    from shardio.sets.index import Spread
    from shardio.sets.storage import Storage

# Larger indexes are fetched from a server only if --verbose asks for it.
_MOST_FETCHED_NBYTES = 8 << 20
_MOST_CLASSES = 3


@click.command(short_help="Show what a set holds.")
@click.argument("out", type=path_text)
@click.option("-v", "--verbose", is_flag=True, help="Show everything known about how the set was made.")
@json_option
def info(out: str, verbose: bool, as_json: bool) -> None:
    """Show what the set in OUT holds: samples, size, arrays, classes, state, how it was made, and how to use it.

    OUT is a folder, or a URL such as s3://bucket/name.
    """
    from shardio.sets.storage import open_storage

    with telling_of_servers([out]):
        storage = open_storage(out)
        manifest = storage.load_manifest()
        fault = storage.find_fault(manifest)
        counts = {name: _count(storage, manifest, name, verbose) for name in ({} if fault else manifest.splits)}
    if as_json:
        show(_facts(storage.name, manifest, fault, counts))
    else:
        show(_summary(storage.name, manifest, fault, counts, verbose))


@dataclass(frozen=True)
class _Counts:
    """Counts of a split, from its orders and its index. `reason` says why one of these files was not read, or is ""."""

    in_use: list[int] | None
    """For each order of the split, how many different stored rows it refers to; None if an order was not read."""
    classes: list[tuple[int, int]] = field(default_factory=list)
    """(label, number of samples), rarest first."""
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    reason: str = ""


def _count(storage: Storage, manifest: Manifest, split: str, verbose: bool) -> _Counts:
    import numpy as np

    from shardio.errors import FormatError
    from shardio.sets.index import count_classes, numbers_of, read_index, read_rows, spread_of, spreads_of
    from shardio.sets.names import is_url

    entry = manifest.splits[split]
    in_use: list[int] | None = None
    tables = [entry.index, *chain.from_iterable(one.shards for one in entry.arrays.values() if not one.row.shape)]
    nbytes = sum(table.nbytes for table in tables)
    try:
        in_use = [len(np.unique(read_rows(storage, order))) for order in entry.orders]
        if is_url(storage.name) and nbytes > _MOST_FETCHED_NBYTES and not verbose:
            return _Counts(in_use, reason=f"not counted: --verbose reads {bytes_text(nbytes)}")
        rows = read_index(storage, manifest, split)
        spreads = spreads_of(rows, numbers_of(storage, entry))
    except (FormatError, OSError) as error:
        return _Counts(in_use, reason=f"not counted: {error}")
    classes = count_classes(rows["label"], len(manifest.classes)) if entry.index.has_label else []
    if per_class := spread_of(np.array([count for _, count in classes])):
        spreads = {"samples per class": per_class, **spreads}
    return _Counts(in_use, classes, spreads)


def _facts(name: str, manifest: Manifest, fault: str, counts: Mapping[str, _Counts]) -> dict[str, Any]:
    return {
        "path": name,
        "state": "damaged" if fault else "published",
        "reason": fault,
        "digest": manifest.digest,
        "sample_shape": manifest.sample_shape and list(manifest.sample_shape),
        "pixels": manifest.pixels if manifest.sample_shape else None,
        "num_classes": len(manifest.classes),
        "class_names": list(manifest.class_names),
        "splits": {name: _split_facts(split, counts.get(name)) for name, split in manifest.splits.items()},
        "nbytes": manifest.nbytes,
        "num_rejects": manifest.num_rejects,
        "provenance": dict(manifest.provenance),
    }


def _split_facts(split: SplitEntry, counts: _Counts | None) -> dict[str, Any]:
    row = split.label_row
    facts = {
        "num_samples": split.num_samples,
        "num_shards": len(split.shards),
        "labels": row and [row.dtype, *row.shape],
        "squashed": split.squashed,
        "num_stored": split.num_rows,
        "order": split.order,
        "in_use": counts and counts.in_use,
        "arrays": {
            name: {
                "kind": array.kind,
                "dtype": array.row.dtype,
                "shape": list(array.row.shape),
                "nbytes": sum(entry.nbytes for entry in array.files),
                "num_stored": array.num_rows,
                "order": array.order,
            }
            for name, array in split.arrays.items()
        },
    }
    if counts is None or counts.reason:
        return facts
    # JSON has no infinities: they are text, which most languages read as numbers.
    spreads = {
        name: {what: n if math.isfinite(n) else str(n) for what, n in dataclasses.asdict(spread).items()}
        for name, spread in counts.spreads.items()
    }
    of_labels = {str(label): count for label, count in sorted(counts.classes)}
    return {**facts, "spreads": spreads, "samples_of_labels": of_labels}


def _summary(name: str, manifest: Manifest, fault: str, counts: Mapping[str, _Counts], verbose: bool) -> Iterator[str]:
    """Yields the lines that the command prints, the most important first."""
    from shardio.sets.history import describe_making, flattened
    from shardio.sets.levels import first_split, stored_levels
    from shardio.sets.names import is_url

    shape = manifest.sample_shape
    num_samples = sum(split.num_samples for split in manifest.splits.values())
    classes = f"{counted(len(manifest.classes), 'class')}, " if manifest.classes else ""
    state = "damaged" if fault else "published"
    yield f"{name}: {counted(num_samples, 'sample')}, {bytes_text(manifest.nbytes)}, {classes}{state}"
    if fault:
        yield f"  state   damaged: {fault}"
    stored = "" if manifest.pixels == "rgb" else f", stored as {manifest.pixels}"
    yield f"  sample  {' x '.join(map(str, shape))} uint8{stored}" if shape else "  sample  arrays, and no pixels"
    for split_name, split in manifest.splits.items():
        squashed = ", squashed" if split.squashed else ""
        shards = f" in {counted(len(split.shards), 'shard')}" if shape else ""
        unlabeled = "" if split.label_row else ", no labels"
        yield f"  {split_name:<7} {counted(split.num_samples, 'sample')}{shards}{squashed}{unlabeled}"
        if split.order is not None:
            yield f"          order {_stored(split.order, split.num_rows, counts.get(split_name))} samples in use"
        yield from _arrays(split, counts.get(split_name))
    main = first_split(manifest.splits)
    for split_name in sorted(counts, key=lambda name: name != main):
        yield from _classes(manifest, split_name, counts[split_name], in_full=split_name == main)
    yield f"  refused {counted(manifest.num_rejects, 'image' if shape else 'sample')} when it was made"
    if isinstance(left := manifest.provenance.get("left_out"), dict) and left:
        yield f"  left out {', '.join(f'{count}: {reason}' for reason, count in left.items())}"
    if made := describe_making(manifest):
        yield from textwrap.wrap(
            printable(f"  made by {made}"),
            80,
            subsequent_indent=" " * 10,
            break_long_words=False,  # a word may be a path
            break_on_hyphens=False,
            max_lines=None if verbose else 3,
            placeholder=" ...",
        )
    if shape and (levels := stored_levels(manifest.provenance, shape[2])):
        mean, std = (", ".join(f"{number:.3f}" for number in numbers) for numbers in (levels.mean, levels.std))
        yield f"  pixels  mean {mean}; std {std} ({levels.num_samples:,} of {levels.split})"
    yield f"  digest  {manifest.digest}"
    if verbose:
        for key, value in flattened(manifest.provenance):
            yield f"  {key}: {value}"
    yield f"  use     {_use(name, manifest)}"
    yield next_step("verify" if fault else "find" if is_url(name) or not shape else "view", name)


def _classes(manifest: Manifest, split: str, counts: _Counts, in_full: bool) -> Iterator[str]:
    """Yields a line with the number of classes of a split. If `in_full` is true, also yields lines with the rarest and
    the most frequent classes, and with the min, median and max of each column of numbers."""
    if counts.reason:
        yield from [f"  classes {counts.reason}"] * in_full
        return
    classes, spreads = counts.classes, counts.spreads
    if classes:
        empty = sum(not count for _, count in classes)
        unused = f", {empty:,} of them without a sample" if empty else ""
        yield f"  classes {split} has {counted(len(classes), 'class')}{unused}"
        if in_full and len({count for _, count in classes}) > 1:
            some = min(_MOST_CLASSES, len(classes) // 2)
            most = sorted(classes, key=lambda pair: (-pair[1], pair[0]))
            yield f"          rarest         {_counted_classes(manifest, classes[:some])}"
            yield f"          most frequent  {_counted_classes(manifest, most[:some])}"
    if not in_full:
        return
    columns = {
        "": [shortened(name, 24) for name in spreads],
        **{
            name: [_number(getattr(spread, name)) for spread in spreads.values()]
            for name in ("minimum", "median", "maximum")
        },
        "missing": [f"{one.num_missing:,}" if one.num_missing else "" for one in spreads.values()],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    yield from table(shown, right=[*columns][1:], indent=" " * 10)


def _counted_classes(manifest: Manifest, classes: Sequence[tuple[int, int]]) -> str:
    """Returns the classes with their numbers of samples as text. A class without a name is shown as its label."""
    names, called = manifest.classes, manifest.class_names
    words = []
    for label, count in classes:
        name = shortened(names[label], 20) if names else str(label)
        words.append(f"{name} {shortened(called[label], 20)} {count:,}" if called else f"{name} {count:,}")
    return ", ".join(words)


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.4g}"


def _use(place: str, manifest: Manifest) -> str:
    """Returns the line of Python that opens the set for training."""
    from shardio.sets.levels import first_split
    from shardio.sets.names import is_url

    split = first_split(manifest.splits)
    arguments = [json.dumps(place, ensure_ascii=False), f"batch_size={min(256, manifest.splits[split].num_samples)}"]
    if split != "train":
        arguments.append(f"split={json.dumps(split)}")
    if is_url(place):
        arguments.append('cache="/local/disk"')
    return f"ShardLoader({', '.join(arguments)})"


def _arrays(split: SplitEntry, counts: _Counts | None) -> Iterator[str]:
    """Yields the lines of a table of the split's arrays; nothing if the split has no arrays."""
    import numpy as np

    arrays = split.arrays.items()
    columns: dict[str, list[str]] = {
        "array": [name for name, _ in arrays],
        "kind": [array.kind for _, array in arrays],
        "type": [
            f"{' x '.join(map(str, array.row.shape))} {np.dtype(array.row.dtype).name}".strip() for _, array in arrays
        ],
        "size": [bytes_text(sum(entry.nbytes for entry in array.files)) for _, array in arrays],
    }
    if any(array.order is not None for _, array in arrays):
        columns["order"] = [
            "" if array.order is None else f"{_stored(array.order, array.num_rows, counts)} in use"
            for _, array in arrays
        ]
    if split.arrays:
        yield from table(columns, right=["size"], indent=" " * 10)


def _stored(order: int, num_rows: int, counts: _Counts | None) -> str:
    in_use = None if counts is None else counts.in_use
    return f"{order}: {'?' if in_use is None else f'{in_use[order]:,}'} of {num_rows:,} stored"
