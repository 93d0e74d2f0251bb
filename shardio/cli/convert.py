"""The commands `shardio convert`, `plan`, `verify` and `repair`, which make, check and repair sets."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardio.cli.options import (
    CommonFirst,
    convert_options,
    folder,
    json_option,
    parse_share,
    parsed,
    random_seed,
    set_argument,
    table_options,
    with_tables,
    workers_option,
)
from shardio.cli.output import counts_text, next_step, say, show
from shardio.errors import bytes_text, counted, first_of

if TYPE_CHECKING:
    from shardio.conversion.estimate import Estimate
    from shardio.sets.verify import VerifyReport


@click.command(
    cls=CommonFirst,
    short_help="Turn images or arrays into a shard set.",
    common=("size", "fit", "pixels", "labels", "tables", "label_columns", "val", "workers", "max_bad"),
)
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
    shardio convert imagenet-1k/ out/                 parquet from Hugging Face
    shardio convert 'tars/{000..146}.tar' out/        WebDataset
    shardio convert latents.npz out/                  arrays without images

    Damaged images are left out and listed in OUT/rejects.jsonl. After an interruption or a kill, the same command keeps
    finished shards and makes the missing shards. docs/guide/sources.md has the command for every kind of SRC.
    """
    import shardio.conversion.convert as converter
    from shardio.conversion.report import noun_of

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
    show(str(report).splitlines())
    if report.unfinished:
        k, n = options["part"]
        shards = counted(report.unfinished.num_shards, "shard")
        say(
            f"part {k}/{n} done: {report.unfinished.num_finished:,} of {shards} finished; the last "
            f"part to finish publishes. Missing: {first_of(report.unfinished.parts, 16)}"
        )
        if report.unfinished.differing:
            say(
                "the missing parts were made from files of other sizes or times than SRC has here: copy SRC with its "
                "times (cp -p, rsync -t), or run these parts again here"
            )
    elif report.digest:
        say(next_step("view" if noun_of(report.source) == "image" else "info", out))


@click.command(
    cls=CommonFirst,
    short_help="Show what convert would do, and how long.",
    common=("size", "fit", "labels", "tables", "val", "workers", "max_bad", "seconds"),
)
@click.argument("src", type=folder)
@click.argument("out", type=folder, required=False)
@convert_options(
    "source",
    "labels",
    "unlabeled",
    "empty_classes",
    "size",
    "fit",
    "resample",
    "quality",
    "val",
    "masks",
    "mask_suffix",
    "shard_size",
    "max_bad",
    "workers",
)
@table_options
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    default=2,
    help="How long to measure the rate, in seconds.",
)
@json_option
def plan(src: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    """Show what `convert` would make from SRC, and how long it would take. Nothing is written.

    The command measures the rate on images from all over SRC, and estimates how many images `convert` would refuse.
    Exit code 1 if these are more than --max-bad allows, or, with OUT, if the disk of OUT is too full for the set.
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
    from shardio.conversion.report import noun_of

    noun = noun_of(report.source)
    yield f"{src}: {report.source}, {counted(report.num_sources, noun)}"
    yield from (f"  found   {note}" for note in report.notes)
    if report.refused:
        yield f"  refused, of {report.num_measured:,} that were tried: {counts_text(report.refused)}"
        yield f"  bad     {_verdict_on_bad(report)}"
    yield f"  source  {'of unknown size' if report.source_nbytes is None else bytes_text(report.source_nbytes)}"
    if report.short_sides:
        low, middle, high = report.short_sides
        yield f"  sides   the shorter ones: {middle} pixels in the median, {low} to {high} for most"
    others = {pixels: nbytes for pixels, nbytes in report.nbytes_as.items() if nbytes != report.nbytes}
    more = "".join(f"; {bytes_text(nbytes)} with --pixels {pixels}" for pixels, nbytes in others.items())
    yield f"  set     {bytes_text(report.nbytes)} in {counted(report.num_shards, 'shard')}{more}"
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


@click.command(short_help="Check a set against its checksums.")
@set_argument
@click.option("--quick", is_flag=True, help="Check sizes, headers, labels and orders, but no pixels.")
@click.option(
    "--subset",
    callback=parsed(parse_share),
    metavar="P%",
    help="Read only this share of the samples in the shards, at random: for routine checks of large sets.",
)
@click.option("--seed", type=random_seed, help="Seed of the subset.  [default: random, printed]")
@click.option("--digest", metavar="HEX", help="Expected digest of the set, or at least its first 12 digits.")
@workers_option("Files to read at a time.", default=2)
@json_option
def verify(out: Path, quick: bool, as_json: bool, **options: Any) -> None:
    """Check the set in OUT against its checksums, and name every damaged file and sample.

    Exit code 1 if anything is damaged, or if the set has another digest.
    """
    import shardio.sets.verify as verifier
    from shardio.system.progress import BytesBar

    with BytesBar(shown=not quick) as bar:
        report = verifier.verify(out, quick=quick, on_progress=bar.add, **options)
    show({**dataclasses.asdict(report), "ok": report.ok} if as_json else _verdict(report, out, quick))
    sys.exit(0 if report.ok else 1)


def _way_out(report: VerifyReport, out: Path) -> Iterator[str]:
    """Yields lines on how to repair a damaged set. Suggests `shardio repair` only for sets made by `convert`."""
    from shardio.format.layout import MANIFEST_NAME
    from shardio.format.manifest_file import load_manifest

    if any(problem.file == MANIFEST_NAME for problem in report.problems):
        yield "no command repairs a manifest: copy the right set here, or convert again"
        return
    provenance = load_manifest(out).provenance
    if "conversion" in provenance:
        yield next_step("repair", out, "SRC")
        return
    if "change" in provenance:
        yield "the set was made from other sets: verify and repair those sets, then make it again"
    else:
        yield "`convert` did not make the set: copy it again, or write it again"
    yield next_step("info", "-v", out)


def _verdict(report: VerifyReport, out: Path, quick: bool) -> Iterator[str]:
    for problem in report.problems:
        yield f"damaged: {problem.detail}"
    what = "sizes, headers, labels and orders" if quick else "every checksum"
    if report.subset is not None:
        samples = counted(report.subset.num_samples, "sample")
        values = f"{report.subset.num_values:,} values of arrays"
        some = [*([samples] if report.subset.num_samples else []), *([values] if report.subset.num_values else [])]
        what = f"{' and '.join(some)} (seed {report.subset.seed}), sizes, headers and indexes"
    verdict = "intact" if report.ok else f"{len(report.problems)} damaged"
    yield f"{out}: {verdict}: {what} of {counted(report.num_files, 'file')}, {bytes_text(report.nbytes)}"
    yield from [next_step("bench", out)] if report.ok else _way_out(report, out)


@click.command(
    cls=CommonFirst,
    short_help="Make damaged files of a set again.",
    common=["workers", "tables", "masks"],
)
@set_argument
@click.argument("src", type=folder)
@convert_options("source", "masks", "workers")
@table_options
@json_option
def repair(out: Path, src: Path, as_json: bool, **options: Any) -> None:
    """Make the damaged files of OUT again from SRC, the images that OUT was converted from.

    Reads all of OUT to find damaged files. A new file replaces a damaged file only if it has the checksum in the
    manifest. Exit code 1 if a file comes out different because images or libraries have changed. Arrays from a table
    need the table (--table, --column), and masks need their files (--masks).
    """
    import shardio.conversion.repair as repairer
    from shardio.system.progress import Bar, BytesBar

    with BytesBar(desc="verify") as read, Bar(unit=" images", desc="repair") as made:
        source, options = with_tables(src, **options)
        report = repairer.repair(out, source, on_verify=read.add, on_progress=made.reach, **options)
    lines = [f"repaired: {out / file}" for file in report.repaired]
    lines += [f"{out}: intact, {counted(len(report.repaired), 'file')} repaired", next_step("verify", out)]
    show(report if as_json else lines)
