"""`shardio top`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option
from shardio.cli.output import Column, show, table

if TYPE_CHECKING:
    from shardio.loading.report import LoaderReport
    from shardio.loading.status import FoundLoader

# A loader reports twice as often.
_SECONDS = 1.0
# A loader that has reported nothing for this long delivers no batches.
_SILENT_SECONDS = 3.0


@click.command(short_help="Show the loaders that run on this node.")
@json_option
def top(as_json: bool) -> None:
    """Show the ShardLoaders of all your processes on this node, measured over one second.

    root sees the loaders of all users. `watch shardio top` repeats it.

    \b
    images/s   images that the training loop receives
    waited     share of its time that the training loop waits for data
    limits     what limits: storage, gather (copies in memory), copy (to the
               device), transform, or consumer: the training step itself
    """
    if not sys.platform.startswith("linux"):
        raise click.ClickException("shardio top reads /proc, which only Linux has")
    from shardio.loading.status import find_loaders

    before = {seen.inode: seen for seen in find_loaders()}
    time.sleep(_SECONDS)
    found = [(seen, _report(before.get(seen.inode), seen)) for seen in find_loaders()]
    show({"loaders": [_describe(*one) for one in found]} if as_json else _lines(found))


def _report(before: FoundLoader | None, seen: FoundLoader) -> LoaderReport:
    """Returns the report of a loader since `before`; since the loader was made, if it is new or silent since then."""
    from shardio.loading.meter import Counts, Snapshot
    from shardio.loading.report import LoaderReport

    told = seen.told
    earlier = Snapshot(Counts()) if before is None or before.told.snapshot == told.snapshot else before.told.snapshot
    return LoaderReport.between(earlier, told.snapshot, told.source)


def _lines(found: Sequence[tuple[FoundLoader, LoaderReport]]) -> Iterator[str]:
    if not found:
        yield "no ShardLoader runs on this node in a process of yours"
        return
    told = [seen.told for seen, _ in found]
    columns = [
        Column("pid", [str(seen.pid) for seen, _ in found], right=True),
        Column("rank", [f"{one.source.rank}/{one.source.world_size}" for one in told], right=True),
        Column("epoch:step", [f"{one.snapshot.epoch}:{one.snapshot.step}" for one in told], right=True),
        Column("images/s", [_rate(*one) for one in found], right=True),
        Column("waited", [f"{report.waited:.0%}" for _, report in found], right=True),
        Column("limits", [_limit(*one) for one in found]),
        Column("set", [f"{one.source.path} {one.source.split}" for one in told]),
    ]
    if any(one.job for one in told):
        columns.insert(1, Column("job", [one.job for one in told]))
    yield from table(columns)


def _silent_seconds(seen: FoundLoader) -> float:
    """Returns for how many seconds the loader has published nothing; 0 if that is usual."""
    seconds = time.monotonic() - seen.told.moment
    return seconds if seconds > _SILENT_SECONDS else 0.0


def _rate(seen: FoundLoader, report: LoaderReport) -> str:
    return "0" if _silent_seconds(seen) else f"{report.images_per_second:,.0f}"


def _limit(seen: FoundLoader, report: LoaderReport) -> str:
    if waiting := seen.told.waiting_seconds:
        return f"no batch for {waiting:,.0f} s"
    if silent := _silent_seconds(seen):
        return f"not asked for {silent:,.0f} s"
    return report.stage


def _describe(seen: FoundLoader, report: LoaderReport) -> dict[str, Any]:
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
