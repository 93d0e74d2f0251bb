"""`shardio diff`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from shardio.cli.options import json_option
from shardio.cli.output import show

if TYPE_CHECKING:
    from shardio.changes.diff import DiffReport, Some, SplitDiff


@click.command(short_help="Show what differs between two sets.")
@click.argument("a")
@click.argument("b")
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """Say what is different in the set B, seen from the set A: samples by their keys, labels, pixels, columns, arrays.

    Pixels and arrays are compared by their checksums. Exit code 1 if anything is different.
    """
    from shardio.changes.diff import diff as diff_sets

    report = diff_sets(a, b)
    show({**dataclasses.asdict(report), "equal": report.equal} if as_json else _summary(report))
    sys.exit(0 if report.equal else 1)


def _summary(report: DiffReport) -> Iterator[str]:
    if report.equal:
        yield "the same samples" + (", in the same files" if report.a == report.b else "")
        return
    first, second = report.sample_shapes
    if first != second:
        yield f"samples of {second}, not of {first}"
    for what, names in (("added", report.added_classes), ("removed", report.removed_classes)):
        if names:
            yield f"classes {what}: {_names(names)}"
    if report.reordered_classes:
        yield "classes have other numbers"
    for what, counts in (("added", report.added_splits), ("removed", report.removed_splits)):
        for name, count in counts.items():
            yield f"{name}: {what}, {count:,} samples"
    for name, split in report.splits.items():
        yield from (f"{name}: {line}" for line in _split_lines(split))


def _split_lines(split: SplitDiff) -> Iterator[str]:
    for what, some in (("added", split.added), ("removed", split.removed), ("other pixels", split.other_pixels)):
        if some:
            yield f"{what}: {_some(some)}"
    if split.relabelled:
        moves = [f"{key} from {then} to {now}" for key, then, now in split.relabelled.first]
        yield f"relabelled: {_listed(split.relabelled.count, moves)}"
    for what, names in (
        ("columns added", split.added_columns),
        ("columns removed", split.removed_columns),
        ("arrays added", split.added_arrays),
        ("arrays removed", split.removed_arrays),
    ):
        if names:
            yield f"{what}: {_names(names)}"
    for name, some in split.other_columns.items():
        yield f"other numbers in the column {name}: {_some(some)}"
    for name, some in split.other_arrays.items():
        yield f"other values of the array {name}: {_some(some)}"
    if split.reordered:
        yield "samples of both sets come in another order"
    if split.squashed:
        yield "squashed in one of the sets alone"


def _some(some: Some) -> str:
    return _listed(some.count, list(some.first))


def _listed(count: int, shown: list[str]) -> str:
    return f"{count:,} samples: {', '.join(shown)}{', ...' if count > len(shown) else ''}"


def _names(names: tuple[str, ...], most: int = 10) -> str:
    return f"{len(names):,}: {', '.join(names[:most])}{', ...' if len(names) > most else ''}"
