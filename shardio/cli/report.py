"""`shardio report`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardio.cli.options import folder, output_file, set_argument
from shardio.cli.output import say
from shardio.errors import DecodeError, bytes_text, counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardio.conversion.writing.publish import Reject


@click.command(short_help="Write a page about a set.")
@set_argument
@click.option(
    "-o",
    "--output",
    type=output_file,
    default="report.html",
    help="Path of the page. An existing file is replaced.",
)
@click.option(
    "--source", type=folder, metavar="SRC", help="Also show the refused images of SRC, as far as they decode."
)
@click.option(
    "--pictures",
    type=click.IntRange(1),
    default=20_000,
    help="Pictures to read for brightness and for pictures that look alike. More take longer and find more.",
)
def report(out: Path, output: Path, source: Path | None, pictures: int) -> None:
    """Write one self-contained HTML page about the set in OUT.

    It shows how the set was made, its classes with pictures, the sizes of the original images and what resizing lost,
    repeated pictures, and refused images.

    \b
    shardio report out/
    shardio report out/ -o page.html --source imagenet/
    """
    from shardio.conversion.writing.publish import read_rejects
    from shardio.drawing.sheet import THUMBNAIL_SIDE, thumbnail
    from shardio.format.layout import REJECTS_NAME
    from shardio.system.files import write_output
    from shardio.system.progress import Bar
    from shardio.viewing.pictures import open_splits
    from shardio.viewing.report import MAX_REFUSED, RefusedImage, make_report, normalize_lines

    if not output.parent.is_dir():
        raise ValueError(f"--output: the folder {output.parent} does not exist: create it first")
    splits = open_splits(out)
    rejects = read_rejects(out / REJECTS_NAME)
    drawn = [] if source is None else refused_pictures(source, rejects[:MAX_REFUSED], THUMBNAIL_SIDE)
    thumbnails = [None if picture is None else thumbnail(picture) for picture in drawn]
    thumbnails += [None] * (len(rejects) - len(thumbnails))
    refused = [
        RefusedImage(reject.split, os.fsdecode(reject.key), reject.reason, reject.detail, picture)
        for reject, picture in zip(rejects, thumbnails, strict=True)
    ]
    with Bar(unit=" pictures") as bar:
        page, overview = make_report(
            splits, num_pictures=pictures, refused=refused, source_given=source is not None, on_progress=bar.reach
        )
    write_output(output, page)
    say(
        f"{output}: {bytes_text(len(page))}, {counted(overview.num_samples, 'sample')}, "
        f"{overview.num_read:,} pictures read"
    )
    for line in filter(None, normalize_lines(overview.levels).split("\n")):
        say(line)


def refused_pictures(src: Path, rejects: Sequence[Reject], side: int) -> list[NDArray[np.uint8] | None]:
    """Decodes the refused images of `src`. Returns (height, width, 3), at most `side` pixels per side, for each reject.

    None stands for an image that is missing, cannot be decoded even in part, or was refused for its size. Raises
    SourceError as `convert` does.
    """
    from shardio.conversion.images.decode import decode_leniently
    from shardio.conversion.sources.detect import scan_again

    collection = scan_again(src, {reject.key for reject in rejects})
    wanted = {(reject.split, reject.key) for reject in rejects if reject.reason not in ("too large", "empty")}
    pictures = {}
    for split, sources in collection.splits.items():
        for source in sources:
            if (split, source.key) in wanted:
                with contextlib.suppress(DecodeError, OSError):
                    data = collection.origin.read(source)
                    pictures[split, source.key] = decode_leniently(data, side) if isinstance(data, bytes) else None
    return [pictures.get((reject.split, reject.key)) for reject in rejects]
