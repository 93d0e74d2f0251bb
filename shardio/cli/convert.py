"""`shardio convert` and `shardio plan`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardio.cli.options import convert_options, folder, json_option, table_options, with_tables
from shardio.cli.output import counts_text, next_step, say, show
from shardio.errors import bytes_text, counted, first_of

if TYPE_CHECKING:
    from shardio.conversion.estimate import Estimate
    from shardio.conversion.report import ConvertReport

# Warnings that the text has, each with one image. --json names all images.
_MOST_WARNINGS = 5


@click.command(short_help="Turn images or arrays into a shard set.")
@click.argument("src", type=folder)
@click.argument("out", type=folder)
@convert_options()
@table_options
@json_option
def convert(src: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Convert the images, or the arrays, in SRC into a shard set in OUT.

    \b
    shardio convert imagenet/ out/                    folders of classes or splits
    shardio convert photos/ out/ --table labels.csv   a table with the labels
    shardio convert list.csv out/ --root photos/      a table of paths and labels
    shardio convert imagenet-1k/ out/                 parquet as of Hugging Face
    shardio convert 'tars/{000..146}.tar' out/        WebDataset
    shardio convert latents.npz out/                  arrays without images

    Damaged images are left out and listed in OUT/rejects.jsonl. After an interruption or a kill, the same command keeps
    finished shards and makes the missing shards. docs/guide/sources.md has the command for every kind of SRC.
    """
    import shardio.conversion.convert as converter

    source, options = with_tables(src, **options)
    report = converter.convert(source, out, progress=True, **options)
    if as_json:
        show(
            {
                **dataclasses.asdict(report),
                "mended": [os.fsdecode(mended.key) for mended in report.mended],
                "warned": {os.fsdecode(warned.key): warned.warning for warned in report.warned},
            }
        )
        return
    show(_summary(report, src, out))
    if report.unfinished:
        k, n = options["part"]
        shards = counted(report.unfinished.num_shards, "shard")
        say(
            f"part {k}/{n} done: {report.unfinished.num_finished:,} of {shards} finished; the last "
            f"part to finish publishes. Missing: {first_of(report.unfinished.parts, 16)}"
        )
    elif report.digest:
        say(next_step("view" if _noun(report.source) == "image" else "info", out))


def _noun(source: str) -> str:
    """Returns what a source of this kind is made of."""
    return "sample" if source in ("arrays", "npy", "npz") else "image"


def _summary(report: ConvertReport, src: Path, out: Path) -> Iterator[str]:
    from shardio.conversion.images.decode import JUNK

    noun = _noun(report.source)
    if report.num_converted:
        rate = report.num_converted / report.seconds
        yield f"converted {counted(report.num_converted, noun)} in {report.seconds:,.1f} s ({rate:,.0f} {noun}s/s)"
    else:
        yield f"nothing to do: {'this part is finished' if report.unfinished else 'the set is published'}"
    yield f"  source  {report.source}, {src}"
    for name, count in report.num_samples.items():
        yield f"  {name:<8}{counted(count, 'sample'):>20}{', without labels' if name in report.unlabeled else ''}"
    digest = f", digest {report.digest[:16]}" if report.digest else ""
    yield f"  {counted(report.num_shards, 'shard')}, {bytes_text(report.nbytes)} in {out}{digest}"
    for what, counts, where in (
        ("refused", report.refused, f", listed in {out / 'rejects.jsonl'}" if report.digest else ""),
        ("mended", {JUNK: len(report.mended)} if report.mended else {}, ""),
        ("ignored", report.ignored, ""),
    ):
        if counts:
            yield f"  {what} {sum(counts.values()):,}: {counts_text(counts)}{where}"
    by_warning: dict[str, list[str]] = {}
    for warned in report.warned:
        by_warning.setdefault(warned.warning, []).append(os.fsdecode(warned.key))
    for warning, keys in list(by_warning.items())[:_MOST_WARNINGS]:
        yield f"  warned of {first_of(keys, 1)}: {warning}"
    if rest := list(by_warning.values())[_MOST_WARNINGS:]:
        yield f"  and of {sum(map(len, rest)):,} more images, which --json names"


# --- plan -------------------------------------------------------------------------------------------------------------


@click.command(short_help="Show what convert would do, and how long.")
@click.argument("src", type=folder)
@click.argument("out", type=folder, required=False)
@convert_options(
    "source",
    "labels",
    "empty_classes",
    "size",
    "fit",
    "resample",
    "quality",
    "masks",
    "shard_size",
    "max_bad",
    "workers",
)
@table_options
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

    source, others = with_tables(src, **options)
    report = estimate(source, out, **others)
    if as_json:
        show(
            dataclasses.asdict(report) | {name: getattr(report, name) for name in ("most_bad", "expected_bad", "fits")}
        )
    else:
        show(_estimated(report, src, out))
    is_possible = report.fits is not False and report.expected_bad <= report.most_bad
    context = click.get_current_context()
    options_given = any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in options)
    if is_possible and not as_json and not options_given:
        say(next_step("convert", src, out or "OUT"))
    sys.exit(0 if is_possible else 1)


def _estimated(report: Estimate, src: Path, out: Path | None) -> Iterator[str]:
    noun = _noun(report.source)
    yield f"{src}: {report.source}, {counted(report.num_sources, noun)} of {counted(report.num_classes, 'class')}"
    for name, split in report.splits.items():
        least, most = split.smallest, split.largest
        if least is None or most is None:
            yield f"  {name:<8}{counted(split.num_sources, noun):>19}, without classes"
            continue
        sizes = f"{least.num_sources:,} ({least.name}) to {most.num_sources:,} ({most.name}) of a class"
        if least.num_sources == most.num_sources:
            sizes = f"{most.num_sources:,} of each class"
        yield f"  {name:<8}{counted(split.num_sources, noun):>19}, {sizes}"
    for note in report.notes:
        yield f"  note    {note}"
    if report.ignored:
        yield f"  ignored {counts_text(report.ignored)}"
    if report.refused:
        yield f"  refused, of {report.num_measured:,} that were tried: {counts_text(report.refused)}"
        yield f"  bad     {_verdict_on_bad(report)}"
    yield f"  source  {'of unknown size' if report.source_nbytes is None else bytes_text(report.source_nbytes)}"
    if report.short_sides:
        low, middle, high = report.short_sides
        yield f"  sides   the shorter ones: {middle} pixels in the median, {low} to {high} for most"
    yield f"  set     {bytes_text(report.nbytes)} in {counted(report.num_shards, 'shard')}"
    if report.spool_nbytes:
        what = f"{noun}s out of {report.source}"
        yield f"  copies  {bytes_text(report.spool_nbytes)} of {what}, until the set is published"
    if report.free_nbytes is not None:
        yield f"  room    {bytes_text(report.free_nbytes)} at {out}: {'enough' if report.fits else 'TOO LITTLE'}"
    rate = f"{report.images_per_second:,.0f} {noun}s/s"
    yield f"  time    {_duration(report.seconds)} with {counted(report.workers, 'worker')}, at {rate}"
    without = f"copying out of {report.source} or " if report.spool_nbytes else ""
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
