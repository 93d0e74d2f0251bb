"""`shardio report`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from shardio.cli.options import folder, set_argument
from shardio.cli.output import say
from shardio.system.amounts import bytes_text, counted


@click.command(short_help="Write a page about a set.")
@set_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="report.html",
    help="The page. A file of this name is replaced.",
)
@click.option("--source", type=folder, metavar="SRC", help="Show what can be decoded of the images that were refused.")
@click.option(
    "--pictures",
    type=click.IntRange(1),
    default=20_000,
    help="Pictures to look at, of all, for brightness and for those that look alike.",
)
def report(out: Path, output: Path, source: Path | None, pictures: int) -> None:
    """Write one HTML page about the set in OUT, which needs no network and no other file: what it is and how it was
    made, its classes with pictures, sizes of the original images and what resizing has lost, pictures that repeat, and
    what was refused.

    \b
    shardio report out/
    shardio report out/ -o page.html --source imagenet/
    """
    from shardio.conversion.refused import read_refused_pictures
    from shardio.conversion.writing.set_writer import read_rejects
    from shardio.drawing.thumbnails import SIDE, thumbnail
    from shardio.format.layout import REJECTS_NAME
    from shardio.system.files import write_output
    from shardio.system.progress import Bar
    from shardio.viewing.page.sections import MOST_REFUSED, Refused, normalize_lines
    from shardio.viewing.pictures import open_splits
    from shardio.viewing.report import make_report

    if not output.parent.is_dir():
        raise ValueError(f"--output: expected a file in a folder, found no folder {output.parent}")
    splits = open_splits(out)
    rejects = read_rejects(out / REJECTS_NAME)
    drawn = [] if source is None else read_refused_pictures(source, rejects[:MOST_REFUSED], SIDE)
    thumbnails = [None if picture is None else thumbnail(picture) for picture in drawn]
    thumbnails += [None] * (len(rejects) - len(thumbnails))
    refused = [
        Refused(reject.split, os.fsdecode(reject.key), reject.reason, reject.detail, picture)
        for reject, picture in zip(rejects, thumbnails, strict=True)
    ]
    with Bar(unit=" pictures") as bar:
        made = make_report(
            splits, num_pictures=pictures, refused=refused, source_given=source is not None, on_progress=bar.reach
        )
    write_output(output, made.page)
    say(
        f"{output}: {bytes_text(len(made.page))}, {counted(made.facts.num_samples, 'sample')}, "
        f"{made.facts.num_seen:,} looked at"
    )
    for line in normalize_lines(made.facts).split("\n"):
        say(line)
