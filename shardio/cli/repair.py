"""`shardio repair`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from shardio.cli.options import (
    columns_option,
    cores_option,
    folder,
    json_option,
    masks_option,
    set_argument,
    source_option,
)
from shardio.cli.output import next_step, say, show
from shardio.errors import counted


@click.command(short_help="Make damaged files of a set again.")
@set_argument
@click.argument("src", type=folder)
@source_option
@columns_option
@masks_option
@cores_option
@json_option
def repair(out: Path, src: Path, as_json: bool, **options: Any) -> None:
    """Make the damaged files of OUT again from SRC, the images that OUT was converted from.

    Reads all of OUT to find them. A new file replaces a damaged file only if it has the checksum in the manifest. Exit
    code 1 if a file comes out different because images or libraries have changed. An index with columns needs their
    file (--columns), masks need their folder (--masks).
    """
    import shardio.conversion.repair as repairer
    from shardio.system.progress import Bar, BytesBar

    with BytesBar(desc="verify") as read, Bar(unit=" images", desc="repair") as made:
        report = repairer.repair(out, src, on_verify=read.add, on_progress=made.reach, **options)
    if as_json:
        show(dataclasses.asdict(report))
    else:
        show(f"repaired: {out / file}" for file in report.repaired)
        say(f"{out}: intact, {counted(len(report.repaired), 'file')} repaired")
        say(next_step("verify", out))
