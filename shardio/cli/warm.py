"""`shardio warm`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option, set_argument, workers_option
from shardio.cli.output import next_step, show
from shardio.errors import bytes_text

if TYPE_CHECKING:
    from shardio.reading.warm import WarmReport


@click.command(short_help="Read a set into the page cache.")
@set_argument
@click.option("--split", help="Read only this split.  [default: all]")
@workers_option("Parallel reads.", default=4)
@click.option("--force", is_flag=True, help="Read the set even if it is larger than the available memory.")
@json_option
def warm(out: Path, as_json: bool, **options: Any) -> None:
    """Read the set in OUT into the page cache, so a job's first epoch is as fast as the others.

    The kernel shares its page cache among all processes, so run this once per machine.
    """
    import shardio.reading.warm as warmer
    from shardio.system.progress import BytesBar

    with BytesBar() as bar:
        report = warmer.warm(out, on_progress=bar.add, **options)
    show(dataclasses.asdict(report) if as_json else _summary(report, out))


def _summary(report: WarmReport, out: Path) -> Iterator[str]:
    rate = bytes_text(int(report.nbytes / report.seconds))
    yield f"{out}: read {bytes_text(report.nbytes)} in {report.seconds:,.1f} s ({rate}/s)"
    if report.resident_before is None or report.resident_after is None:
        yield "  the kernel shows what is in the page cache only to users who may write to the files"
    else:
        yield f"  in the page cache before {report.resident_before:.1%}, now {report.resident_after:.1%}"
    yield next_step("bench", out)
