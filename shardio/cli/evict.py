"""`shardio evict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardio.cli.options import folder, json_option, parse_nbytes, parsed
from shardio.cli.output import show, some
from shardio.errors import bytes_text

if TYPE_CHECKING:
    from shardio.cache.folder import EvictReport


@click.command(short_help="Remove unused copies from a cache.")
@click.argument("cache", type=folder)
@click.option(
    "--keep",
    callback=parsed(parse_nbytes),
    metavar="SIZE",
    required=True,
    help="Maximum total size of the remaining copies, such as 500GB; 0 for none.",
)
@json_option
def evict(cache: Path, keep: int, as_json: bool) -> None:
    """Remove copies from CACHE, least recently used first, until the remaining copies take at most SIZE.

    A copy that a job uses is never removed, nor is anything that `shardio stage` has not put there.
    """
    from shardio.cache.folder import Cache

    report = Cache(cache).evict(keep=keep)
    show(dataclasses.asdict(report) if as_json else _summary(report, cache))


def _summary(report: EvictReport, cache: Path) -> Iterator[str]:
    for copy in report.removed:
        yield f"removed  {copy.digest[:16]}  {bytes_text(copy.nbytes):>8}  {copy.source}"
    for copy in report.kept:
        why = copy.problem or ("in use" if copy.in_use else "another user's")
        if copy.processes:
            why += f" by process {some(copy.processes)}"
        yield f"kept     {copy.digest[:16]}  {bytes_text(copy.nbytes):>8}  {copy.source}: {why}"
    yield f"{cache}: {bytes_text(report.nbytes)} of copies remain"
