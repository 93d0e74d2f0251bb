"""`shardio stage`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import click

from shardio.cli.options import folder, json_option, workers_option
from shardio.cli.output import say, show
from shardio.errors import printable


@click.command(short_help="Copy a set to a node's own disk.")
@click.argument("src")
@click.argument("cache", type=folder)
@click.option("--digest", metavar="HEX", help="Expected digest of the set at SRC, or at least its first 12 digits.")
@workers_option("Number of files to copy at a time.", default=4)
@click.option("--verify", is_flag=True, help="Read all of an existing copy, and copy damaged files again.")
@json_option
def stage(src: str, cache: Path, as_json: bool, **options: Any) -> None:
    """Copy the set at SRC, a folder or URL, into the folder CACHE, verify the copy, and print its path.

    However many processes of a node ask at once, one copies, and the others wait for it. After an interruption or a
    kill, any of them continues with the finished files. Unused copies are evicted to make room, least recently used
    first. The copy may be evicted once the command has ended, unless a job holds it.
    """
    import shardio.cache.stage as staging
    from shardio.sets.names import is_url, without_credentials
    from shardio.system.progress import BytesBar

    def tell_wait(process: int | None) -> None:
        who = "another process" if process is None else f"process {process}"
        source = without_credentials(src) if is_url(src) else src
        say(f"shardio: {who} is copying {source} to {cache}: waiting for it", err=True)

    # The delay hides the bar until something is copied, and for ever if another process copies.
    with BytesBar(delay=1e-3) as bar:
        try:
            report = staging.stage(src, cache, on_progress=bar.add, on_wait=tell_wait, **options)
        except KeyboardInterrupt:
            bar.close()
            say(f"shardio: finished files are kept in {cache}: the same command continues with them", err=True)
            raise
    if as_json:
        show(dataclasses.asdict(report))
        return
    for digest in report.evicted:
        say(f"shardio: removed {digest[:16]} from {cache}, to make room", err=True)
    # A script gets the path unchanged. It may have any bytes.
    click.echo(printable(report.path) if sys.stdout.isatty() else os.fsencode(report.path))
