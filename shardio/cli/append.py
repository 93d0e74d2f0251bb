"""`shardio append`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.change import change_options, merge_options, new_argument, show_change, tell_room
from shardio.cli.options import columns_option, cores_option, folder, max_bad_option, set_argument, source_option
from shardio.cli.output import say
from shardio.errors import counted, shortened

if TYPE_CHECKING:
    from shardio.conversion.report import ConvertReport


@click.command(short_help="Add images to a set, in a new one.")
@set_argument
@click.argument("src", type=folder)
@new_argument
@source_option
@click.option("--accept-layout", is_flag=True, help="Accept a layout of SRC that looks like a mistake.")
@click.option(
    "--empty-classes",
    type=click.Choice(["refuse", "omit", "keep"]),
    default="refuse",
    help="Class folders without images, as for `convert`.",
)
@columns_option
@cores_option
@max_bad_option
@merge_options
@change_options
def append(out: Path, src: Path, new: Path, as_json: bool, **options: Any) -> None:
    """Make a new set in NEW from the set in OUT and the images in SRC, converted with the options of OUT.

    Classes are merged by name. Both sets share the files of OUT by hard links. After an interruption or a kill, the
    same command keeps finished shards and makes the others.
    """
    from shardio.conversion.append import append as append_images
    from shardio.conversion.report import ImagesBar

    with ImagesBar() as bar, bar.before_it_begins(f"scanning {shortened(str(src), 30)}"):

        def tell(report: ConvertReport) -> None:
            bar.close()
            if not as_json:
                say(f"converted {counted(sum(report.num_samples.values()), 'image')} in {report.seconds:,.1f} s")

        report = append_images(out, src, new, on_converted=tell, on_progress=bar.show, on_room=tell_room, **options)
    show_change(report, as_json=as_json)
