"""`shardio stats`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option, splits_option
from shardio.cli.output import Column, levels_text, next_step, show, table, telling_of_servers
from shardio.errors import shortened
from shardio.system.amounts import counted

if TYPE_CHECKING:
    from shardio.format.manifest import Manifest
    from shardio.sets.levels import Levels
    from shardio.sets.statistics import ClassCounts, Range, SplitStatistics

_MOST_CLASSES = 5
_WIDEST_NAME = 24


@click.command(short_help="Count classes, sizes and columns of a set.")
@click.argument("out")
@splits_option
@json_option
def stats(out: str, split: Sequence[str], as_json: bool) -> None:
    """Print samples per class, sizes of the original images, and the range of each column of the set in OUT.

    OUT is a folder or a URL. The command reads the indexes and the manifest, and no pixels.
    """
    from shardio.sets.find import read_indexes
    from shardio.sets.levels import stored_levels
    from shardio.sets.statistics import statistics_of

    with telling_of_servers([out]):
        indexed = read_indexes(out, split)
    manifest = indexed.manifest
    found = {one.name: statistics_of(one.rows, len(manifest.classes)) for one in indexed.splits}
    levels = stored_levels(manifest.provenance, manifest.sample_shape[2])
    if as_json:
        splits = {name: _split_facts(manifest, statistics) for name, statistics in found.items()}
        show({"path": indexed.place, "splits": splits, "pixels": levels and levels.describe()})
    else:
        show(_summary(out, indexed.place, manifest, found, levels))


def _split_facts(manifest: Manifest, statistics: SplitStatistics) -> dict[str, Any]:
    classes = statistics.classes

    def named(pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        return [
            {
                "label": label,
                "class": manifest.classes[label] if manifest.classes else None,
                "class_name": manifest.class_names[label] if manifest.class_names else None,
                "num_samples": count,
            }
            for label, count in pairs
        ]

    return {
        "num_samples": statistics.num_samples,
        "num_labels": len(classes.labels),
        "num_empty": classes.num_empty,
        "per_class": _range_facts(classes.range),
        "rarest": named(classes.rarest(_MOST_CLASSES)),
        "most_frequent": named(classes.most_frequent(_MOST_CLASSES)),
        "source_width": _range_facts(statistics.widths),
        "source_height": _range_facts(statistics.heights),
        "aspect_ratio": _range_facts(statistics.aspects),
        "columns": {name: _range_facts(each) for name, each in statistics.columns.items()},
    }


def _range_facts(found: Range | None) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)


def _summary(
    out: str, place: str, manifest: Manifest, found: dict[str, SplitStatistics], levels: Levels | None
) -> Iterator[str]:
    for name, statistics in found.items():
        classes = statistics.classes
        empty = f", {classes.num_empty:,} of them without a sample" if classes.num_empty else ""
        samples = counted(statistics.num_samples, "sample")
        yield f"{place}, {name}: {samples} of {counted(len(classes.labels), 'class')}{empty}"
        yield from _ranges(statistics)
        if classes.range.least < classes.range.most:
            yield from _classes(manifest, classes)
    if levels:
        yield f"  pixels  {levels_text(levels)}"
    yield next_step("report", out)


def _ranges(statistics: SplitStatistics) -> Iterator[str]:
    ranges = {
        "samples per class": statistics.classes.range,
        "source_width": statistics.widths,
        "source_height": statistics.heights,
        "width / height": statistics.aspects,
        **statistics.columns,
    }
    known = {name: each for name, each in ranges.items() if each is not None}
    columns = [
        Column("", [shortened(name, 30) for name in known]),
        *(
            Column(title, [_number(getattr(each, title)) for each in known.values()], right=True)
            for title in ("least", "median", "most")
        ),
    ]
    if any(each.num_missing for each in known.values()):
        columns.append(
            Column(
                "missing", [f"{each.num_missing:,}" if each.num_missing else "" for each in known.values()], right=True
            )
        )
    yield from (f"  {line}" for line in table(columns))


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.4g}"


def _classes(manifest: Manifest, classes: ClassCounts) -> Iterator[str]:
    """Yields the classes with the fewest samples, and those with the most."""
    most = min(_MOST_CLASSES, len(classes.labels) // 2)
    pairs = [*classes.rarest(most), *classes.most_frequent(most)]
    columns = [
        Column("", ["rarest", *[""] * (most - 1), "most frequent", *[""] * (most - 1)]),
        Column("", [str(label) for label, _ in pairs], right=True),
        *(
            Column("", [shortened(names[label], _WIDEST_NAME) for label, _ in pairs])
            for names in (manifest.classes, manifest.class_names)
            if names
        ),
        Column("", [f"{count:,}" for _, count in pairs], right=True),
    ]
    yield from (f"  {line}" for line in list(table(columns))[1:])
