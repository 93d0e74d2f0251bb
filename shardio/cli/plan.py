"""`shardio plan`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardio.cli.options import columns_option, cores_option, folder, image_options, json_option, max_bad_option
from shardio.cli.output import counts_text, next_step, say, show
from shardio.errors import bytes_text, counted

if TYPE_CHECKING:
    from shardio.conversion.estimate import Estimate


@click.command(short_help="Show what convert would do, and how long.")
@click.argument("src", type=folder)
@click.argument("out", type=folder, required=False)
@image_options
@max_bad_option
@cores_option
@columns_option
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    default=2,
    help="Seconds to measure the rate.",
)
@json_option
def plan(src: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    """Show what `convert` would make of SRC, and how long it would take. Nothing is written.

    The command measures the rate on images from all over SRC, and estimates how many images `convert` would refuse.
    Exit code 1 if there are more than --max-bad allows, or, with OUT, if the set would not fit there.
    """
    from shardio.conversion.estimate import estimate

    report = estimate(src, out, **options)
    if as_json:
        show(
            dataclasses.asdict(report) | {name: getattr(report, name) for name in ("most_bad", "expected_bad", "fits")}
        )
    else:
        show(_summary(report, src, out))
    is_possible = report.fits is not False and report.expected_bad <= report.most_bad
    context = click.get_current_context()
    options_given = any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in options)
    if is_possible and not as_json and not options_given:
        say(next_step("convert", src, out or "OUT"))
    sys.exit(0 if is_possible else 1)


def _summary(report: Estimate, src: Path, out: Path | None) -> Iterator[str]:
    yield f"{src}: {report.source}, {counted(report.num_sources, 'image')} of {counted(report.num_classes, 'class')}"
    for name, split in report.splits.items():
        least, most = split.smallest, split.largest
        sizes = f"{least.num_sources:,} ({least.name}) to {most.num_sources:,} ({most.name}) of a class"
        if least.num_sources == most.num_sources:
            sizes = f"{most.num_sources:,} of each class"
        yield f"  {name:<8}{counted(split.num_sources, 'image'):>19}, {sizes}"
    if report.ignored:
        yield f"  ignored {counts_text(report.ignored)}"
    if report.refused:
        yield f"  refused, of {report.num_measured:,} that were tried: {counts_text(report.refused)}"
        yield f"  bad     {_verdict_on_bad(report)}"
    yield f"  source  {'of unknown size' if report.source_nbytes is None else bytes_text(report.source_nbytes)}"
    yield f"  set     {bytes_text(report.nbytes)} in {counted(report.num_shards, 'shard')}"
    if report.spool_nbytes:
        yield f"  copies  {bytes_text(report.spool_nbytes)} of images out of parquet, until the set is published"
    if report.free_nbytes is not None:
        yield f"  room    {bytes_text(report.free_nbytes)} at {out}: {'enough' if report.fits else 'TOO LITTLE'}"
    rate = f"{report.images_per_second:,.0f} images/s"
    yield f"  time    {_duration(report.seconds)} with {counted(report.workers, 'worker')}, at {rate}"
    without = "copying out of parquet or " if report.spool_nbytes else ""
    yield f"          as measured on {report.num_measured:,}, without {without}writing"


def _verdict_on_bad(report: Estimate) -> str:
    bad, tried, total = sum(report.refused.values()), report.num_measured, report.num_sources
    made_of_it = f", which makes about {report.expected_bad:,} of {total:,}" if tried < total else ", which are all"
    limit = f"{100 * report.max_bad:g}%" if isinstance(report.max_bad, float) else report.max_bad
    allowed = f"--max-bad {limit} allows {report.most_bad:,}"
    verdict = f"TOO MANY, {allowed}" if report.expected_bad > report.most_bad else allowed
    return f"{bad:,} of {tried:,} tried were refused{made_of_it}: {verdict}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
