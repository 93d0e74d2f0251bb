"""What the commands that make a set of others share: their arguments, what is said beforehand, and the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import Command, folder, json_option
from shardio.cli.output import next_step, say, show
from shardio.system.amounts import bytes_text, counted

if TYPE_CHECKING:
    from shardio.changes.carry import ChangeReport, Room

_MOST_CLASSES = 10

new_argument = click.argument("new", type=folder)
"""The folder of the new set."""
split_option = click.option("--split", help="Split that is meant. It may be left out if there is one only.")
_copy_option = click.option("--copy", is_flag=True, help="Share no file with the old set: no hard links, but copies.")


def change_options(command: Command) -> Command:
    """Adds the options that all of these commands have."""
    return _copy_option(json_option(command))


def run_change(change: Callable[..., ChangeReport], *arguments: Any, as_json: bool, **options: Any) -> None:
    """Makes the set, and prints what is done. `change` is a function such as `shardio.select`."""
    from shardio.system.progress import BytesBar

    with BytesBar() as bar:
        report = change(*arguments, on_room=tell_room, on_progress=bar.add, **options)
    show_change(report, as_json=as_json)


def tell_room(room: Room) -> None:
    """Says what has to be copied, before it is."""
    if room.copied_nbytes:
        say(
            f"shardio: copying {bytes_text(room.copied_nbytes)}, as the files cannot be shared with the old set by "
            f"links; {bytes_text(room.needed_nbytes)} are needed",
            err=True,
        )


def show_change(report: ChangeReport, *, as_json: bool) -> None:
    show(dataclasses.asdict(report) if as_json else _summary(report))


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
    if report.notes.get("num_relabelled"):
        yield f"  {counted(sum(report.notes['num_relabelled'].values()), 'sample')} relabelled"
    if "new_classes" in report.notes:
        yield f"  {counted(len(report.classes), 'class')}{_some(report.notes['new_classes'])}"
    if report.notes.get("refused"):
        yield f"  refused {sum(report.notes['refused'].values()):,} of the new images, listed in rejects.jsonl"
    yield next_step("info", report.path)


def _some(new_classes: list[str]) -> str:
    if not new_classes:
        return ""
    more = f" and {len(new_classes) - _MOST_CLASSES:,} more" if len(new_classes) > _MOST_CLASSES else ""
    return f", {len(new_classes):,} of them new: {', '.join(new_classes[:_MOST_CLASSES])}{more}"
