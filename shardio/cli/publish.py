"""`shardio publish`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import folder, json_option, set_argument, workers_option
from shardio.cli.output import next_step, show
from shardio.errors import bytes_text, counted

if TYPE_CHECKING:
    from shardio.sets.publish import PublishReport


@click.command(short_help="Copy or move a set into a shared root.")
@set_argument
@click.argument("target", metavar="ROOT/NAME", type=folder)
@click.option("--move", is_flag=True, help="Leave nothing in OUT: a rename, if ROOT is on the same filesystem.")
@workers_option("Files to copy at a time.", default=2)
@json_option
def publish(out: Path, target: Path, as_json: bool, **options: Any) -> None:
    """Copy the finished set in OUT into the folder ROOT, as NAME, for others to read.

    It appears whole or not at all, never over anything, and verified: copies are compared with their checksums, and a
    set that is renamed is checked as `verify --quick` does. Permissions and group are those that new files have in
    ROOT. With ROOT in SHARDIO_PATH, jobs call the set by its NAME.
    """
    import shardio.sets.publish as publisher
    from shardio.system.progress import BytesBar

    with BytesBar() as bar:
        report = publisher.publish(out, target, on_progress=bar.add, **options)
    show(dataclasses.asdict(report) if as_json else _summary(report, "moved" if options["move"] else "copied"))


def _summary(report: PublishReport, done: str) -> Iterator[str]:
    yield f"{done} {counted(report.num_files, 'file')}, {bytes_text(report.nbytes)}, digest {report.digest[:16]}"
    yield f"  published as {report.path}"
    if report.readable_by != "all":
        whom = {"owner": "its owner", "group": "its owner and group"}[report.readable_by]
        chmod = f"`chmod -R a+rX {report.path}` lets the others read it, too"
        yield f"  only {whom} can read it, as the umask says: {chmod}"
    yield next_step("list", Path(report.path).parent)
