"""The commands `shardio change` and `shardio merge`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from shardio.cli.options import (
    CommonFirst,
    folder,
    json_option,
    path_text,
    selection_options,
    set_argument,
    splits_option,
    together,
)
from shardio.cli.output import next_step, say, show
from shardio.errors import bytes_text, counted, first_of

if TYPE_CHECKING:
    from shardio.changes.carry import ChangeReport, Room
    from shardio.format.layout import ArrayKind
    from shardio.sets.selection import Selection

_MOST_CLASSES = 10

change_options = together(
    json_option,
    click.option("--copy", is_flag=True, help="Copy files instead of sharing them by hard links."),
)
"""Adds --json and --copy, the options that `change` and `merge` share."""


def _run(change: Callable[..., ChangeReport], *arguments: Any, as_json: bool, **options: Any) -> None:
    """Makes a set by calling `change`, either `shardio.change` or `shardio.merge`, and prints the report."""
    from shardio.system.progress import BytesBar

    with BytesBar() as bar:
        report = change(*arguments, on_room=_tell_room, on_progress=bar.add, **options)
    show(report if as_json else _summary(report))


def _tell_room(room: Room) -> None:
    """Prints how many bytes will be copied, and the disk space that the new set needs; nothing if no file is copied."""
    if room.copied_nbytes:
        say(
            f"shardio: copying {bytes_text(room.copied_nbytes)} of files that no link shares with the old set; "
            f"the new set needs {bytes_text(room.needed_nbytes)} of disk space",
            err=True,
        )


def _summary(report: ChangeReport) -> Iterator[str]:
    files = f"{counted(report.num_files, 'file')}, {bytes_text(report.nbytes)}"
    yield f"made {report.path}: {files}, digest {report.digest[:16]}"
    for name, count in report.num_samples.items():
        yield f"  {name:<8}{counted(count, 'sample'):>20}"
    amounts = {
        "shared with the old set": report.linked_nbytes + report.cloned_nbytes,
        "copied": report.copied_nbytes,
        "new": report.written_nbytes,
    }
    yield "  " + ", ".join(f"{bytes_text(nbytes)} {what}" for what, nbytes in amounts.items() if nbytes)
    if report.notes.get("num_relabeled"):
        yield f"  {counted(sum(report.notes['num_relabeled'].values()), 'sample')} relabeled"
    if "new_classes" in report.notes:
        new = report.notes["new_classes"]
        told = f", {len(new):,} of them new: {first_of(new, _MOST_CLASSES)}" if new else ""
        yield f"  {counted(len(report.classes), 'class')}{told}"
    if left := report.notes.get("left_out"):
        yield f"  left out, as it is not the same in all sets: {first_of(left, _MOST_CLASSES)}"
    yield next_step("info", report.path)


def _parse_arrays(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[ArrayKind, Path]]:
    from shardio.format.layout import ArrayKind

    arrays: dict[str, tuple[ArrayKind, Path]] = {}
    for value in values:
        left, _, path = value.partition("=")
        name, _, kind = left.partition(":")
        if not (name and path) or name in arrays:
            raise click.BadParameter(
                f"expected NAME=FILE.npy or NAME:KIND=FILE.npy, with another NAME each time; found {value!r}"
            )
        if kind and kind not in get_args(ArrayKind):
            raise click.BadParameter(f"kind must be one of {', '.join(get_args(ArrayKind))}; found {kind!r}")
        arrays[name] = (kind or "array", Path(path))  # type: ignore[assignment]
    return arrays


@click.command(
    cls=CommonFirst,
    short_help="Keep, drop or relabel samples, add arrays, in a new set.",
    common=("step", "split", "selected", "keys", "where", "labels", "classes", "arrays"),
)
@set_argument
@click.argument("new", type=folder)
@click.option("--keep", "step", flag_value="keep", help="Keep only the samples that match.")
@click.option("--drop", "step", flag_value="drop", help="Drop the samples that match.")
@splits_option
@selection_options("listed", "random", "seed", "indices")
@click.option(
    "--labels",
    type=folder,
    metavar="FILE",
    help="New labels: CSV or parquet with the columns `key` and `label` (the name or number of a class).",
)
@click.option(
    "--classes",
    metavar="used|new|FILE",
    type=path_text,
    help="used: leave out classes without samples. new: add names in --labels that are not classes yet. FILE: all "
    "classes in order, one per line.",
)
@click.option(
    "--array",
    "arrays",
    multiple=True,
    callback=_parse_arrays,
    metavar="NAME[:KIND]=FILE",
    type=path_text,
    help="NPY file with a row for each sample of the result. KIND is array or mask. May be given again.",
)
@click.option(
    "--array-keys", type=folder, metavar="FILE", help="File with the key of each row of --array, in a format of --list."
)
@change_options
def change(
    out: Path,
    new: Path,
    step: str | None,
    split: tuple[str, ...],
    selection: Selection,
    classes: str | None,
    arrays: dict[str, tuple[ArrayKind, Path]],
    **options: Any,
) -> None:
    """Make a new set in NEW from the set in OUT: keep or drop samples, then assign labels, then add arrays.

    Unchanged files are shared between both sets by hard links. NEW appears whole or not at all; OUT stays as it is.

    \b
    shardio change out/ two/ --keep --class tench --class goldfish
    shardio change out/ train-only/ --drop --split val
    shardio change out/ relabeled/ --labels labels.csv --classes new
    shardio change out/ with-masks/ --array seg:mask=masks.npy --split train
    """
    from shardio.changes.change import change as change_set
    from shardio.sets.given import read_keys

    if step is None and not selection.is_all:
        raise click.UsageError("options that choose samples need --keep or --drop: add one of them")
    _run(
        change_set,
        out,
        new,
        keep=selection if step == "keep" else None,
        drop=selection if step == "drop" else None,
        split=split or None,
        classes=classes if classes in (None, "used", "new") else [*map(os.fsdecode, read_keys(Path(classes)))],
        arrays={name: path for name, (_, path) in arrays.items()} or None,
        kinds={name: kind for name, (kind, _) in arrays.items()},
        **options,
    )


@click.command(short_help="Join several sets.")
@click.argument("sets", nargs=-1, metavar="A B ...", required=True, type=path_text)
@click.argument("new", type=folder)
@click.option("--only-common", is_flag=True, help="Keep only the arrays that all sets have.")
@click.option(
    "--same-keys",
    type=click.Choice(["refuse", "allow"]),
    default="refuse",
    help="Whether to allow samples of a split with the same key.",
)
@click.option(
    "--same-images",
    type=click.Choice(["refuse", "keep"]),
    default="refuse",
    help="Whether to keep samples of different sets with the same pixels.",
)
@change_options
def merge(sets: tuple[str, ...], new: Path, **options: Any) -> None:
    """Make a new set in NEW with all samples of the sets A, B, ...

    Splits with the same name become one split, and classes are merged by name. No pixel is rewritten: files are shared
    with the old sets by hard links. NEW appears whole or not at all; the old sets stay as they are.
    """
    from shardio.changes.merge import merge as merge_sets

    _run(merge_sets, list(sets), new, **options)
