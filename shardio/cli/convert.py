"""`shardio convert`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import columns_option, folder, image_options, json_option, max_bad_option, parse_part, parsed
from shardio.cli.output import counts_text, next_step, say, show, some
from shardio.errors import bytes_text, counted

if TYPE_CHECKING:
    from shardio.conversion.report import ConvertReport

# Images that the text names. --json names all.
_MOST_WARNINGS = 5


def _parse_background(text: str) -> tuple[int, int, int]:
    from shardio.conversion.images.decode import parse_colour

    try:
        return parse_colour(text)
    except ValueError:
        raise ValueError("a colour such as 255,255,255, #ffffff or white") from None


def _in_a_folder(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Checks now that a file which is written at the end has a folder."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"expected a file in a folder that exists; found {str(value)!r}")
    return value


@click.command(short_help="Turn images into a shard set.")
@click.argument("src", type=folder)
@click.argument("out", type=folder)
@image_options
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Cores to use; with --scheduler, for each shard.  [default: all; with --scheduler, 1]",
)
@click.option(
    "--order",
    type=click.Choice(["shuffled", "source"]),
    default="shuffled",
    help="How samples are stored. shuffled: any contiguous run is a fair sample of the whole.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the shuffled order.")
@click.option("--exif-rotate", is_flag=True, help="Apply the Exif orientation of pictures.")
@click.option(
    "--background",
    callback=parsed(_parse_background),
    metavar="COLOUR",
    default="white",
    help="Colour under transparent pixels: R,G,B or #rrggbb or a name.",
)
@max_bad_option
@click.option(
    "--report-duplicates",
    "duplicates_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_in_a_folder,
    metavar="FILE",
    help="List images with the same bytes in FILE, images under different labels first.",
)
@columns_option
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Do the work on a Dask cluster; the address of its scheduler, such as tcp://host:8786.",
)
@click.option(
    "--part",
    callback=parsed(parse_part),
    metavar="K/N",
    help="Make every N-th shard, from the K-th: for array jobs. The last part to finish publishes the set.",
)
@json_option
def convert(src: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Convert the images in SRC into a shard set in OUT.

    SRC is a folder of class folders (SRC/CLASS/IMAGE), or of train, val and test folders of them; the folder of
    ImageNet's archives, or of Kaggle's ILSVRC; a list of lines `PATH LABEL` or a CSV; WebDataset tars, as a folder or a
    quoted pattern; parquet files in the style of Hugging Face. JPEG, PNG and WebP are recognised by content. Damaged
    images are left out and listed in OUT/rejects.jsonl.

    After an interruption or a kill, the same command keeps finished shards and makes the others.
    """
    run_convert(src, out, as_json, **options)


def run_convert(src: Path, out: Path, as_json: bool, duplicates_file: Path | None = None, **options: Any) -> None:
    """Converts, and prints progress and the result. `options` are options of `shardio.convert`."""
    import shardio.conversion.convert as converter
    from shardio.conversion.report import run_with_bar
    from shardio.system.files import write_output

    report = run_with_bar(
        lambda tell: converter.convert(
            src, out, report_duplicates=duplicates_file is not None, on_progress=tell, **options
        ),
        src,
    )
    duplicates = [group.to_line() for group in report.duplicates or ()]
    if duplicates_file is not None:
        write_output(duplicates_file, *duplicates)
    if as_json:
        show(
            {
                **dataclasses.asdict(report),
                "mended": [os.fsdecode(mended.key) for mended in report.mended],
                "warned": {os.fsdecode(warned.key): warned.warning for warned in report.warned},
                "duplicates": None if report.duplicates is None else [json.loads(line) for line in duplicates],
            }
        )
        return
    show(_summary(report, src, out))
    if report.duplicates is not None:
        say(
            f"  duplicates: {counted(len(report.duplicates), 'image')} found more than once, "
            f"{sum(group.labels_differ for group in report.duplicates):,} of them under different labels, "
            f"{sum(group.splits_differ for group in report.duplicates):,} in different splits, "
            f"listed in {duplicates_file}"
        )
    if report.unfinished:
        k, n = options["part"]
        shards = counted(report.unfinished.num_shards, "shard")
        say(
            f"part {k}/{n} done: {report.unfinished.num_finished:,} of {shards} finished; the last "
            f"part to finish publishes. Missing: {some(report.unfinished.parts)}"
        )
    elif report.digest:
        say(next_step("view", out))


def _summary(report: ConvertReport, src: Path, out: Path) -> Iterator[str]:
    from shardio.conversion.images.decode import JUNK

    if report.num_converted:
        rate = report.num_converted / report.seconds
        yield f"converted {counted(report.num_converted, 'image')} in {report.seconds:,.1f} s ({rate:,.0f} images/s)"
    else:
        yield f"nothing to do: {'this part is finished' if report.unfinished else 'the set is published'}"
    yield f"  source  {report.source}, {src}"
    for name, count in report.num_samples.items():
        yield f"  {name:<8}{counted(count, 'sample'):>20}"
    digest = f", digest {report.digest[:16]}" if report.digest else ""
    yield f"  {counted(report.num_shards, 'shard')}, {bytes_text(report.nbytes)} in {out}{digest}"
    for what, counts, where in (
        ("refused", report.refused, f", listed in {out / 'rejects.jsonl'}" if report.digest else ""),
        ("mended", {JUNK: len(report.mended)} if report.mended else {}, ""),
        ("ignored", report.ignored, ""),
    ):
        if counts:
            yield f"  {what} {sum(counts.values()):,}: {counts_text(counts)}{where}"
    for warned in report.warned[:_MOST_WARNINGS]:
        yield f"  warned of {os.fsdecode(warned.key)}: {warned.warning}"
    if len(report.warned) > _MOST_WARNINGS:
        yield f"  and of {len(report.warned) - _MOST_WARNINGS:,} more images, which --json names"
