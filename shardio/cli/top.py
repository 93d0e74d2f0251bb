"""`shardio top`."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option
from shardio.cli.output import Column, show, table
from shardio.errors import printable

if TYPE_CHECKING:
    from shardio.loading.report import Report
    from shardio.loading.status import Seen

# A loader tells twice as often.
_EVERY_SECONDS = 1.0
# A loader that has told nothing for so long gives no batches.
_SILENT_SECONDS = 3.0


@click.command(short_help="Show the loaders that run on this node.")
@json_option
def top(as_json: bool) -> None:
    """Show the ShardLoaders of all processes on this node that you may look into: yours, or as root all of them.

    In a terminal the table is live, until q or Ctrl-C; elsewhere it is printed once, after a second of looking.

    \b
    images/s   images that the training loop receives
    waited     the share of its time that it waits for data
    limits     what limits: storage, gather (copies in memory), copy (to the
               device), transform, or consumer: the training step itself
    """
    if not sys.platform.startswith("linux"):
        raise click.ClickException("shardio top looks into /proc, which only Linux has")
    from shardio.loading.status import find_loaders

    before = _by_inode(find_loaders())
    if as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        time.sleep(_EVERY_SECONDS)
        found = find_loaders()
        reports = _reports(before, found)
        if as_json:
            show({"loaders": [_facts(seen, reports[seen.inode]) for seen in found]})
        else:
            show(_lines(found, reports, None))
        return
    with _screen() as quits:
        while not quits(_EVERY_SECONDS):
            found = find_loaders()
            columns, rows = shutil.get_terminal_size()
            lines = [*_lines(found, _reports(before, found), columns), "", "q ends"]
            text = "".join(f"{printable(line)[:columns]}\x1b[K\r\n" for line in lines[: rows - 1])
            click.echo(f"\x1b[H{text}\x1b[J", nl=False)
            before = _by_inode(found)


def _by_inode(found: Sequence[Seen]) -> dict[int, Seen]:
    return {seen.inode: seen for seen in found}


def _reports(before: Mapping[int, Seen], found: Sequence[Seen]) -> dict[int, Report]:
    """Returns what happened since `before`; to a loader that is new, since it was made."""
    from shardio.loading.meter import Counts, Snapshot
    from shardio.loading.report import Report

    reports = {}
    for seen in found:
        told = seen.told
        earlier = before[seen.inode].told.snapshot if seen.inode in before else Snapshot(Counts())
        if earlier == told.snapshot:  # it has told nothing since: what it has told of all its time stands
            earlier = Snapshot(Counts())
        reports[seen.inode] = Report.between(earlier, told.snapshot, told.source)
    return reports


def _lines(found: Sequence[Seen], reports: Mapping[int, Report], width: int | None) -> Iterator[str]:
    if not found:
        yield "no ShardLoader runs on this node in a process that you may look into"
        return
    told = [seen.told for seen in found]
    columns = [
        Column("pid", [str(seen.pid) for seen in found], right=True),
        Column("rank", [f"{one.source.rank}/{one.source.world_size}" for one in told], right=True),
        Column("epoch:step", [f"{one.snapshot.epoch}:{one.snapshot.step}" for one in told], right=True),
        Column("images/s", [_rate(seen, reports[seen.inode]) for seen in found], right=True),
        Column("waited", [f"{reports[seen.inode].waited:.0%}" for seen in found], right=True),
        Column("limits", [_limit(seen, reports[seen.inode]) for seen in found]),
        Column("set", [f"{one.source.path} {one.source.split}" for one in told]),
    ]
    if any(one.job for one in told):
        columns.insert(1, Column("job", [one.job for one in told]))
    yield from table(columns, width)


def _silent_seconds(seen: Seen) -> float:
    """Returns for how long the loader has told nothing, if that is long."""
    seconds = time.monotonic() - seen.told.moment
    return seconds if seconds > _SILENT_SECONDS else 0.0


def _rate(seen: Seen, report: Report) -> str:
    return "0" if _silent_seconds(seen) else f"{report.images_per_second:,.0f}"


def _limit(seen: Seen, report: Report) -> str:
    if waiting := seen.told.waiting_seconds:
        return f"no batch for {waiting:,.0f} s"
    if silent := _silent_seconds(seen):
        return f"not asked for {silent:,.0f} s"
    return report.stage


def _facts(seen: Seen, report: Report) -> dict[str, Any]:
    told = seen.told
    return {
        "pid": seen.pid,
        "job": told.job,
        **vars(told.source),
        "epoch": told.snapshot.epoch,
        "step": told.snapshot.step,
        "images_per_second": report.images_per_second,
        "waited": report.waited,
        "transformed": report.transformed,
        "limited_by": report.stage,
        "waiting_seconds": told.waiting_seconds,
        "silent_seconds": time.monotonic() - told.moment,
    }


@contextlib.contextmanager
def _screen() -> Iterator[Any]:
    """Gives the terminal's other screen, and a function that waits, and returns whether q was pressed meanwhile."""
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def quits(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([stdin], [], [], left)[0] and os.read(stdin, 1) in (b"q", b"Q", b"\x04", b""):
                return True
        return False

    try:
        tty.setcbreak(stdin)
        click.echo("\x1b[?1049h\x1b[?25l", nl=False)
        yield quits
    finally:
        click.echo("\x1b[?25h\x1b[?1049l", nl=False)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
