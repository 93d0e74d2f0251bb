"""The command line: options in, exit code out.

0 is success, 1 an error in the world (a bad file, a full disk, damage found), 2 wrong usage, 130 interrupted. Errors
are one or two lines on stderr, and some more where a list has many faults. Results go to stdout, as JSON with
`--json`; progress bars go to stderr if that is a terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from tqdm import tqdm

from shardio.conversion.amounts import parse_max_bad, parse_nbytes, parse_part, parse_size
from shardio.errors import ShardioError, printable
from shardio.version import __version__

if TYPE_CHECKING:
    from shardio.conversion.estimate import Estimate
    from shardio.sets.cache.folder import CachedCopy
    from shardio.sets.catalogue import Listing

# Commands import what they need when they run: `shardio info` answers before torch would be loaded.

# A server that answers sooner needs no word.
_TELL_SECONDS = 5.0
# Images by name, in what convert sums up.
_MOST_WARNINGS = 5
# One under the other. The rows of a terminal need not be known.
_MOST_BARS = 20

T = TypeVar("T")


def _parse_share(text: str) -> float:
    match = re.fullmatch(r"(\d*\.?\d+)(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ValueError("a share such as 5% or 0.05, more than 0 and at most 100%")
    return share


def _parse_count(text: str, least: int = 1) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise ValueError(f"numbers from {least} on, such as 1,2,4")
    return int(text)


def _parse_each(parse: Callable[[str], T], word: str | None = None) -> Callable[[str], tuple[T | None, ...]]:
    """Values with commas between them, each once; `word` stands for None."""

    def parse_each(text: str) -> tuple[T | None, ...]:
        parts = [part.strip() for part in text.split(",")]
        return tuple(dict.fromkeys(None if part == word else parse(part) for part in parts))

    return parse_each


def _parse_background(text: str) -> tuple[int, int, int]:
    from shardio.conversion.images.decode import parse_colour

    try:
        return parse_colour(text)
    except ValueError:
        raise ValueError("a colour such as 255,255,255, #ffffff or white") from None


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """An option's callback: `parse` raises ValueError with what it expected. Without a value or a default, None."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return parse(value.strip())
        except ValueError as error:
            raise click.BadParameter(f"expected {error}; found {value!r}") from None

    return callback


def _find_set(context: click.Context, parameter: click.Parameter, value: str) -> Path:
    """The folder of a set, which may be called by its name in the catalogue."""
    from shardio.sets.names import find_folder

    return Path(find_folder(value))


def _in_a_folder(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A file that is written at the end must not turn out then to be nowhere."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"expected a file in a folder that exists; found {str(value)!r}")
    return value


class _Bar(tqdm):  # type: ignore[type-arg]  # generic for type checkers only
    """Progress on stderr, if that is a terminal."""

    def __init__(self, *, shown: bool = True, **options: Any) -> None:
        super().__init__(disable=None if shown else True, ncols=_columns(), nrows=_MOST_BARS, **options)

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        return {**super().format_dict, "ncols": _columns()}


def _columns() -> int:
    """How wide a bar may be. Terminals of containers, CI or launchers may say 0, where tqdm would show nothing."""
    columns = 0
    with contextlib.suppress(OSError, ValueError):  # no terminal, or closed
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return (columns or shutil.get_terminal_size().columns) - 1  # a full line would break


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
_folder = click.Path(path_type=Path)
_set_argument = click.argument("out", callback=_find_set)
_source_option = click.option(
    "--source",
    type=click.Choice(["auto", "tree", "ilsvrc", "kaggle", "list", "webdataset", "parquet"]),
    default="auto",
    show_default=True,
    help="What SRC is. auto: told by what is there.",
)
_layout_options = (
    click.option(
        "--accept-layout", is_flag=True, help="Convert SRC as it is understood although that looks like a mistake."
    ),
    click.option(
        "--empty-classes",
        type=click.Choice(["refuse", "omit", "keep"]),
        default="refuse",
        show_default=True,
        help="Class folders without images. omit: labels number the other classes. keep: a label without samples.",
    ),
)
_columns_option = click.option(
    "--columns",
    type=_folder,
    metavar="FILE",
    help="CSV or parquet with a column `path`, and numbers that the index shall hold for each image.",
)


_workers_option = click.option("--workers", type=click.IntRange(1), help="Cores to use.  [default: all]")


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    click.echo(f"shardio, version {__version__}")
    from shardio.system.kernels import kernels_in_use, missing_kernels

    click.echo(f"kernels: {', '.join(f'{name} by {kernel}' for name, kernel in kernels_in_use().items())}")
    if missing := missing_kernels():
        click.echo(missing)
    context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, and which kernels run here, and exit.",
)
def cli() -> None:
    """Image collections as memory-mapped shards, for training that never waits for data.

    \b
    shardio plan imagenet/ out/        what would convert do, and how long would it take?
    shardio convert imagenet/ out/     decode and resize once, offline
    shardio info out/                  what is in a set
    shardio verify out/                is it still what was published?
    shardio repair out/ imagenet/      if not, make the damaged files again
    shardio bench out/                 how fast does this machine read it?
    shardio warm out/                  bring it into memory before a job reads it
    shardio stage out/ /nvme/cache     copy it to a node's own disk, once for all its jobs
    shardio evict /nvme/cache          remove copies there that nobody uses
    shardio check-shuffle 1281167      how random is the order?
    shardio publish out/ /sets/name    share it with the other users of a cluster
    shardio list /sets                 which sets are there
    """


@cli.command(short_help="Turn images into a shard set.")
@click.argument("src", type=_folder)
@click.argument("out", type=_folder)
@_source_option
@_layout_options[0]
@_layout_options[1]
@click.option(
    "--size",
    callback=_parsed(parse_size),
    metavar="N|HxW",
    default="256",
    show_default=True,
    help="Pixels of every sample.",
)
@click.option(
    "--fit",
    type=click.Choice(["crop", "squash", "pad"]),
    default="crop",
    show_default=True,
    help="crop: short side to SIZE, then the centre. squash: ignore the aspect ratio. pad: black margins.",
)
@click.option(
    "--resample",
    type=click.Choice(["bicubic", "bilinear", "lanczos"]),
    default="bicubic",
    show_default=True,
    help="Filter, always antialiased.",
)
@click.option(
    "--quality",
    type=click.Choice(["exact", "fast"]),
    default="exact",
    show_default=True,
    help="fast: decode JPEGs of four times SIZE and more to a half or less, for about 50 dB PSNR.",
)
@click.option(
    "--shard-size",
    callback=_parsed(parse_nbytes),
    metavar="SIZE",
    default="4GiB",
    show_default=True,
    help="Most bytes of one shard file.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Cores to use; with --scheduler, for each shard.  [default: all; with --scheduler, 1]",
)
@click.option(
    "--order",
    type=click.Choice(["shuffled", "source"]),
    default="shuffled",
    show_default=True,
    help="How samples are stored. shuffled: any contiguous run is a fair sample of the whole.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the shuffled order.")
@click.option("--exif-rotate", is_flag=True, help="Turn pictures as their Exif orientation says.")
@click.option(
    "--background",
    callback=_parsed(_parse_background),
    metavar="COLOUR",
    default="white",
    show_default=True,
    help="What transparent pixels are laid over: R,G,B or #rrggbb or a name.",
)
@click.option(
    "--max-bad",
    callback=_parsed(parse_max_bad),
    metavar="N|P%",
    default="1%",
    show_default=True,
    help="Refused images to accept, as a number or a share; with more, nothing is published.",
)
@click.option(
    "--report-duplicates",
    "duplicates_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_in_a_folder,
    metavar="FILE",
    help="List images that have the same bytes in FILE: first those under different labels.",
)
@_columns_option
@click.option("--scheduler", metavar="ADDRESS", help="Of a Dask cluster that does the work, such as tcp://host:8786.")
@click.option(
    "--part",
    callback=_parsed(parse_part),
    metavar="K/N",
    help="Make every N-th shard, from the K-th on: for array jobs. The part that ends last publishes the set.",
)
@_json_option
def convert(src: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Convert the images in SRC into a shard set in OUT.

    SRC is a folder of class folders (SRC/CLASS/IMAGE), or of train, val and test folders of them; the folder of
    ImageNet's archives, or of Kaggle's ILSVRC; a list of lines `PATH LABEL` or a CSV; WebDataset tars, as a folder or a
    quoted pattern; parquet files in the style of Hugging Face. JPEG, PNG and WebP are recognised by content. Damaged
    images are left out and listed in OUT/rejects.jsonl.

    Interrupted or killed, the same command goes on where it stopped.
    """
    _convert(src, out, as_json, **options)


def _convert(src: Path, out: Path, as_json: bool, duplicates_file: Path | None = None, **options: Any) -> None:
    import shardio.conversion.convert as converter
    from shardio.conversion.images.decode import JUNK
    from shardio.conversion.report import Progress
    from shardio.system.files import write_atomic

    with _Bar(unit=" images", smoothing=0.1) as bar:

        def show(progress: Progress) -> None:
            if bar.total is None:
                bar.reset(progress.total)
                if progress.found:
                    kept = f"going on: {progress.found:,} of {progress.total:,} images were kept"
                    bar.write(f"shardio: {kept}", file=sys.stderr)
            if not bar.disable:  # the rate, and the time that is left, are those of what this call does itself
                more_kept = progress.kept - bar.initial
                bar.n, bar.initial, bar.last_print_n = bar.n + more_kept, progress.kept, bar.last_print_n + more_kept
            spooling = progress.spooled and not progress.done
            bar.set_description(f"copying out of parquet: {progress.spooled:,}" if spooling else None, refresh=False)
            bar.set_postfix(refused=progress.refused, refresh=False)
            bar.update(progress.done - bar.n)

        try:
            report = converter.convert(
                src, out, report_duplicates=duplicates_file is not None, on_progress=show, **options
            )
        except KeyboardInterrupt as error:
            bar.close()
            if error.args:
                _say(f"shardio: {error}; run the same command again to go on", err=True)
            raise
    duplicates = None if report.duplicates is None else [group.to_line() for group in report.duplicates]
    if duplicates_file is not None:
        write_atomic(duplicates_file, *(duplicates or ()))
    if as_json:
        facts = dataclasses.asdict(report)
        facts["mended"] = [os.fsdecode(mended.key) for mended in report.mended]
        facts["warned"] = {os.fsdecode(warned.key): warned.warning for warned in report.warned}
        facts["duplicates"] = duplicates and [json.loads(line) for line in duplicates]
        _print_json(facts)
        return
    rate = f" ({report.num_converted / report.seconds:,.0f} images/s)" if report.num_converted else ""
    done = f"converted {report.num_converted:,} images in {report.seconds:,.1f} s{rate}"
    found = "this part is finished" if report.unfinished else "the set is published"
    _say(done if report.num_converted else f"nothing to do: {found}")
    _say(f"  source  {report.source}, {src}")
    for name, count in report.num_samples.items():
        _say(f"  {name:<8}{count:>12,} samples")
    digest = f", digest {report.digest[:16]}" if report.digest else ""
    _say(f"  {report.num_shards:,} shards, {_bytes(report.nbytes)} in {out}{digest}")
    for what, counts, where in (
        ("refused", report.refused, f", listed in {out / 'rejects.jsonl'}" if report.digest else ""),
        ("mended", {JUNK: len(report.mended)} if report.mended else {}, ""),
        ("ignored", report.ignored, ""),
    ):
        if counts:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
            _say(f"  {what} {sum(counts.values()):,}: {reasons}{where}")
    for warned in report.warned[:_MOST_WARNINGS]:
        _say(f"  warned of {os.fsdecode(warned.key)}: {warned.warning}")
    if len(report.warned) > _MOST_WARNINGS:
        _say(f"  and of {len(report.warned) - _MOST_WARNINGS:,} more images, which --json names")
    if report.duplicates is not None:
        across = sum(group.splits_differ for group in report.duplicates)
        _say(
            f"  duplicates: {len(report.duplicates):,} images are there more than once, "
            f"{sum(group.labels_differ for group in report.duplicates):,} of them under different labels, "
            f"{across:,} in different splits, listed in {duplicates_file}"
        )

    if report.unfinished:
        k, n = options["part"]
        _say(
            f"part {k}/{n} done: {report.unfinished.num_finished:,} of {report.unfinished.num_shards:,} shards are "
            f"finished; the last part to finish publishes. Missing: {_some(report.unfinished.parts)}"
        )


@cli.command(short_help="Say what convert would do.")
@click.argument("src", type=_folder)
@click.argument("out", type=_folder, required=False)
@_workers_option
@_columns_option
@click.option("--seconds", type=click.FloatRange(0.01), default=2, show_default=True, help="To measure the rate for.")
@_json_option
def plan(src: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    """Say what `convert` would make of SRC, and how long it would take, before anything is written.

    The rate is measured on images from all over SRC, and from those of them that are refused follows how many of all
    would be. Exit code 1 if these are more than --max-bad allows, or, with OUT, if the set would not fit there.
    """
    from shardio.conversion.estimate import estimate

    report = estimate(src, out, **options)
    if as_json:
        facts = {name: getattr(report, name) for name in ("most_bad", "expected_bad", "fits")}
        _print_json({**dataclasses.asdict(report), **facts})
    else:
        _say(f"{src}: {report.source}, {report.num_sources:,} images of {report.num_classes:,} classes")
        for name, split in report.splits.items():
            sizes = f"{split.smallest.num_sources:,} ({split.smallest.name}) to {split.largest.num_sources:,}"
            _say(f"  {name:<8}{split.num_sources:>12,} images, {sizes} ({split.largest.name}) of a class")
        for what, counts in (
            ("ignored", report.ignored),
            (f"refused, of {report.num_measured:,} that were tried:", report.refused),
        ):
            if counts:
                _say(f"  {what} " + ", ".join(f"{reason} {count:,}" for reason, count in counts.items()))
        if report.refused:
            _say(f"  bad     {_verdict_on_bad(report)}")
        _say(f"  source  {'of unknown size' if report.source_nbytes is None else _bytes(report.source_nbytes)}")
        _say(f"  set     {_bytes(report.nbytes)} in {report.num_shards:,} shards")
        if report.spool_nbytes:
            _say(f"  copies  {_bytes(report.spool_nbytes)} of images out of parquet, until the set is published")
        if report.free_nbytes is not None:
            _say(f"  room    {_bytes(report.free_nbytes)} at {out}: {'enough' if report.fits else 'TOO LITTLE'}")
        _say(
            f"  time    {_duration(report.seconds)} with {report.workers} workers, at {report.images_per_second:,.0f} "
            f"images/s as measured on {report.num_measured:,} (without "
            f"{'copying out of parquet or ' if report.spool_nbytes else ''}writing)"
        )
    sys.exit(1 if report.fits is False or report.expected_bad > report.most_bad else 0)


def _verdict_on_bad(report: Estimate) -> str:
    bad, tried, total = sum(report.refused.values()), report.num_measured, report.num_sources
    made_of_it = f", which makes about {report.expected_bad:,} of {total:,}" if tried < total else ", which are all"
    limit = f"{100 * report.max_bad:g}%" if isinstance(report.max_bad, float) else report.max_bad
    allowed = f"--max-bad {limit} allows {report.most_bad:,}"
    verdict = f"TOO MANY, {allowed}" if report.expected_bad > report.most_bad else allowed
    return f"{bad:,} of {tried:,} tried were refused{made_of_it}: {verdict}"


# What they have in common, they have from one place.
plan.params[2:2] = [
    option
    for option in convert.params
    if option.name
    in ("source", "accept_layout", "empty_classes", "size", "fit", "resample", "quality", "shard_size", "max_bad")
]


@cli.command(short_help="Say what a set holds.")
@click.argument("out")
@_json_option
def info(out: str, as_json: bool) -> None:
    """Say what the set in OUT is: splits, samples, shape, classes and what people call them, state, size, digest.

    OUT is a folder, a URL such as s3://bucket/name, or a name that is found in the roots of SHARDIO_PATH.
    """
    from shardio.sets.names import is_url
    from shardio.sets.storage import open_storage

    with _telling_of_servers([out]):
        storage = open_storage(out if is_url(out) else Path(out))
        manifest = storage.load_manifest()
        fault = storage.find_fault(manifest)
    splits = {
        name: {"num_samples": split.num_samples, "num_shards": len(split.shards)}
        for name, split in manifest.splits.items()
    }
    facts = {
        "path": storage.name,
        "state": "damaged" if fault else "published",
        "reason": fault,
        "digest": manifest.digest,
        "sample_shape": list(manifest.sample_shape),
        "num_classes": len(manifest.classes),
        "class_names": list(manifest.class_names),
        "splits": splits,
        "columns": {name: dict(split.index.columns) for name, split in manifest.splits.items()},
        "nbytes": manifest.nbytes,
        "num_rejects": manifest.rejects.num_rejects,
        "provenance": dict(manifest.provenance),
    }
    if as_json:
        _print_json(facts)
        return
    height, width, channels = manifest.sample_shape
    _say(f"{storage.name}: {_bytes(manifest.nbytes)}, {len(manifest.classes):,} classes")
    _say(f"  sample  {height} x {width} x {channels} uint8")
    if manifest.class_names:
        named = [f"{name} is {called}" for name, called in zip(manifest.classes, manifest.class_names, strict=True)]
        _say(f"  names   {'; '.join(named[:3])}{'; ...' if len(named) > 3 else ''}")
    for name, split in splits.items():
        _say(f"  {name:<8}{split['num_samples']:,} samples in {split['num_shards']:,} shards")
        if columns := ", ".join(column for column, _ in manifest.splits[name].index.columns):
            _say(f"          columns {columns}")
    _say(f"  state   {facts['state']}{fault and ': '}{fault}")
    _say(f"  refused {manifest.rejects.num_rejects:,} images when it was made")
    _say(f"  digest  {manifest.digest}")
    for name, value in _flat(manifest.provenance):
        _say(f"  {name}: {value}")


@cli.command(short_help="Check a set against its checksums.")
@_set_argument
@click.option("--quick", is_flag=True, help="Only sizes and headers, which takes no time.")
@click.option(
    "--subset",
    callback=_parsed(_parse_share),
    metavar="P%",
    help="Of the shards, read only this share of the samples, at random: for routine checks of large sets.",
)
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), help="Of the subset.  [default: a new one, printed]")
@click.option("--digest", metavar="HEX", help="Of the set that it must be, or its first 12 digits or more.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Files to read at a time.")
@_json_option
def verify(out: Path, quick: bool, as_json: bool, **options: Any) -> None:
    """Check the set in OUT against its checksums, and name every damaged file and sample.

    Exit code 1 if anything is damaged.
    """
    import shardio.sets.verify as verifier

    with _Bar(unit="B", unit_scale=True, shown=not quick) as bar:

        def show(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        report = verifier.verify(out, quick=quick, on_progress=show, **options)
    if as_json:
        _print_json({**dataclasses.asdict(report), "ok": report.ok})
    else:
        for problem in report.problems:
            _say(f"damaged: {problem.detail}")
        what = "sizes and headers" if quick else "every checksum"
        if report.subset is not None:
            what = f"{report.subset.num_samples:,} samples (seed {report.subset.seed}), sizes, headers and indexes"
        verdict = "intact" if report.ok else f"{len(report.problems)} damaged"
        _say(f"{out}: {verdict}: {what} of {report.num_files:,} files, {_bytes(report.nbytes)}")
    sys.exit(0 if report.ok else 1)


@cli.command(short_help="Make the damaged files of a set again.")
@_set_argument
@click.argument("src", type=_folder)
@_source_option
@_columns_option
@_workers_option
@_json_option
def repair(out: Path, src: Path, as_json: bool, **options: Any) -> None:
    """Make what `shardio verify` finds damaged in OUT again from SRC, which it was converted from.

    A file is replaced only by one that has the checksum of the manifest: the set is then what was published, to the
    byte. Exit code 1 if that cannot be, since images or libraries have changed. An index with columns needs their file.
    """
    import shardio.conversion.repair as repairer

    with (
        _Bar(unit="B", unit_scale=True, desc="verify") as read,
        _Bar(unit=" images", desc="repair") as made,
    ):

        def show_read(nbytes: int, total: int) -> None:
            read.total = total
            read.update(nbytes)

        def show_made(done: int, total: int) -> None:
            made.total = total
            made.update(done - made.n)

        report = repairer.repair(out, src, on_verify=show_read, on_progress=show_made, **options)
    if as_json:
        _print_json(dataclasses.asdict(report))
        return
    for file in report.repaired:
        _say(f"repaired: {out / file}")
    _say(f"{out}: intact, {len(report.repaired):,} files repaired")


@cli.command(short_help="Bring a set into the page cache.")
@_set_argument
@click.option("--split", help="Only this split.  [default: all]")
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True, help="Reads at a time.")
@click.option("--force", is_flag=True, help="Even if the set is larger than the memory that is left.")
@_json_option
def warm(out: Path, split: str | None, workers: int, force: bool, as_json: bool) -> None:
    """Bring the set in OUT into the page cache, so that a job's first epoch is as fast as the others.

    The cache is the kernel's, and shared: one such command serves all processes of the machine.
    """
    import shardio.reading.warm as warmer

    with _Bar(unit="B", unit_scale=True) as bar:

        def show(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        report = warmer.warm(out, split=split, workers=workers, force=force, on_progress=show)
    if as_json:
        _print_json(dataclasses.asdict(report))
        return
    rate = _bytes(int(report.nbytes / report.seconds))
    _say(f"{out}: read {_bytes(report.nbytes)} in {report.seconds:,.1f} s ({rate}/s)")
    if report.resident_before is None or report.resident_after is None:
        _say("  what is in the page cache, the kernel tells only whoever owns the files or may write to them")
    else:
        _say(f"  in the page cache before {report.resident_before:.1%}, now {report.resident_after:.1%}")


@cli.command(short_help="Copy a set to a node's own disk.")
@click.argument("src")
@click.argument("cache", type=_folder)
@click.option("--digest", metavar="HEX", help="Of the set that SRC must be, or its first 12 digits or more.")
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True, help="Files to copy at a time.")
@click.option("--verify", is_flag=True, help="Read all of a copy that is there, and copy again what is damaged.")
@_json_option
def stage(src: str, cache: Path, as_json: bool, **options: Any) -> None:
    """Have a verified copy of the set in SRC, a folder or URL, in the folder CACHE, and print its path.

    However many processes of a node ask at once, one copies, and the others wait for it. Interrupted or killed, any of
    them goes on with the files that are finished. Copies that nobody uses make room, those not used for longest first.
    The copy may be evicted once the command has ended, unless a job holds it.
    """
    import shardio.sets.cache.stage as staging
    from shardio.sets.names import is_url, without_credentials

    def tell_wait(process: int | None) -> None:
        who = "another process" if process is None else f"process {process}"
        source = without_credentials(src) if is_url(src) else src
        _say(f"shardio: {who} is copying {source} to {cache}: waiting for it", err=True)

    # With a delay the bar is not there before something is copied, and never where another process copies.
    with _Bar(unit="B", unit_scale=True, delay=1e-3) as bar:

        def show(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        try:
            report = staging.stage(src, cache, on_progress=show, on_wait=tell_wait, **options)
        except KeyboardInterrupt:
            bar.close()
            _say(f"shardio: finished files are kept in {cache}: the same command goes on with them", err=True)
            raise
    if as_json:
        _print_json(dataclasses.asdict(report))
        return
    for digest in report.evicted:
        _say(f"shardio: removed {digest[:16]} from {cache}, to make room", err=True)
    # A script gets the path as it is. It may have any bytes.
    click.echo(printable(report.path) if sys.stdout.isatty() else os.fsencode(report.path))


@cli.command(short_help="Remove copies that nobody uses from a cache.")
@click.argument("cache", type=_folder)
@click.option(
    "--keep",
    callback=_parsed(parse_nbytes),
    metavar="SIZE",
    required=True,
    help="Most bytes of copies that may stay, such as 500GB; 0 for none.",
)
@_json_option
def evict(cache: Path, keep: int, as_json: bool) -> None:
    """Remove copies from CACHE, those not used for longest first, until they have SIZE together.

    What a job uses is never removed, nor is anything that `shardio stage` has not put there.
    """
    from shardio.sets.cache.folder import Cache

    report = Cache(cache).evict(keep=keep)
    if as_json:
        _print_json(dataclasses.asdict(report))
        return
    for copy in report.removed:
        _say(f"removed  {copy.digest[:16]}  {_bytes(copy.nbytes):>8}  {copy.source}")
    for copy in report.kept:
        why = copy.problem or ("in use" if copy.in_use else "another user's")
        if copy.processes:
            why += f" by process {_some(copy.processes)}"
        _say(f"kept     {copy.digest[:16]}  {_bytes(copy.nbytes):>8}  {copy.source}: {why}")
    _say(f"{cache}: {_bytes(report.nbytes)} of copies remain")


@cli.command(short_help="Measure how fast this machine reads a set.")
@_set_argument
@click.option("--split", default="train", show_default=True)
@click.option(
    "--batch-size",
    "batch_sizes",
    callback=_parsed(_parse_each(_parse_count, "auto")),
    metavar="N|auto,...",
    default="auto",
    show_default=True,
    help="Samples of a batch; auto: 256, or all if they are fewer.",
)
@click.option(
    "--threads",
    "num_threads",
    callback=_parsed(_parse_each(_parse_count, "auto")),
    metavar="N|auto,...",
    default="1,auto",
    show_default=True,
    help="Gather threads; auto: as many as the loader takes by itself.",
)
@click.option(
    "--io",
    "ios",
    callback=_parsed(_parse_each(str)),
    metavar="auto|mmap|pread|direct,...",
    default="auto",
    show_default=True,
    help="How samples are read.",
)
@click.option(
    "--crop",
    "crops",
    callback=_parsed(_parse_each(parse_size, "none")),
    metavar="none|N|HxW,...",
    default="none",
    show_default=True,
    help="Pixels of the window in the centre that is read of each sample.",
)
@click.option(
    "--prefetch",
    "prefetches",
    callback=_parsed(_parse_each(partial(_parse_count, least=0))),
    metavar="N,...",
    default="2",
    show_default=True,
    help="Batches ready ahead of the consumer.",
)
@click.option(
    "--device",
    "devices",
    callback=_parsed(_parse_each(str)),
    metavar="cpu|cuda|cuda:N,...",
    default="cpu",
    show_default=True,
    help="Where batches go.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=7, show_default=True, help="Figures are medians over so many."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    default=0.5,
    show_default=True,
    help="For each way and round, after as long a warm-up.",
)
@_json_option
def bench(out: Path, as_json: bool, **options: Any) -> None:
    """Read the set in OUT with every combination of the values given, beside the limits of this machine.

    All of them take turns in one run, and each ratio is of GB/s over those of a limit in the same round:

    \b
    memcpy   one large block, copied from memory to memory by one thread
    take     np.take(out=, mode="clip") of random samples into as many aligned
             buffers as the loader has in turn, by one thread
    direct   random samples from the disk past the page cache (O_DIRECT), whatever
             is in there, by 8 threads
    pinned   such batches from pinned memory to the GPU, and nothing else

    With mmap and pread, each turn reads its samples twice and the second time counts: they come from the page cache,
    as in every epoch but the first if the set fits there, so that memcpy and take are the limits. With direct they
    come from the disk, and direct is the limit. On the way to a GPU, pinned is one more.

    With a crop, GB/s are those of its windows, while memcpy, take and direct move whole samples. Nothing leaves the
    page cache for this command: how fast a first epoch is, benchmarks/cold.py in the repository measures.
    """
    import shardio.measure.bench as benchmark
    from shardio.measure.table import table

    with _Bar(unit=" turns") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        report = benchmark.bench(out, on_turn=show, **options)
    if as_json:
        _print_json(report.to_dict())
        return
    for line in table(report):
        _say(line)


@cli.command(short_help="Copy or move a set into a shared root.")
@_set_argument
@click.argument("target", metavar="ROOT/NAME", type=_folder)
@click.option("--move", is_flag=True, help="Leave nothing in OUT: a rename, if ROOT is on the same filesystem.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Files to copy at a time.")
@_json_option
def publish(out: Path, target: Path, as_json: bool, **options: Any) -> None:
    """Copy the finished set in OUT into the folder ROOT, as NAME, for others to read.

    It appears whole or not at all, never over anything, and verified: copies are compared with their checksums, and a
    set that is renamed is checked as `verify --quick` does. Permissions and group are those that new files have in
    ROOT. With ROOT in SHARDIO_PATH, jobs call the set by its NAME.
    """
    import shardio.sets.publish as publisher

    with _Bar(unit="B", unit_scale=True) as bar:

        def show(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        report = publisher.publish(out, target, on_progress=show, **options)
    if as_json:
        _print_json(dataclasses.asdict(report))
        return
    done = "moved" if options["move"] else "copied"
    _say(f"{done} {report.num_files:,} files, {_bytes(report.nbytes)}, digest {report.digest[:16]}")
    _say(f"  published as {report.path}")
    if report.readable_by != "all":
        whom = {"owner": "its owner", "group": "its owner and group"}[report.readable_by]
        _say(
            f"  only {whom} can read it, as the umask says: `chmod -R a+rX {report.path}` lets the others read it, too"
        )


@cli.command("list", short_help="Show which sets there are.")
@click.argument("roots", metavar="[ROOT]...", nargs=-1)
@click.option(
    "--cache",
    type=_folder,
    envvar="SHARDIO_CACHE",
    show_envvar=True,
    help="Say which of them this cache of the machine has, and whether they are in use.",
)
@_json_option
def list_sets(roots: Sequence[str], cache: Path | None, as_json: bool) -> None:
    """Show the sets in each ROOT, a folder or a URL: samples, shape, size, digest, and what state they are in.

    published: the manifest is there, and each file has the size that it says. damaged: one of these has not, or the
    manifest is none. unfinished: a conversion that has not published its set yet. `shardio verify` tells whether the
    bytes are right, too.

    Without a ROOT, those of SHARDIO_PATH, in the order in which a name is looked for there. Exit code 1 if a root
    cannot be looked into.
    """
    import shardio.sets.catalogue as catalogue
    from shardio.sets.names import catalogue_roots

    if not (roots := roots or catalogue_roots()):
        raise click.UsageError("expected a ROOT, or roots in SHARDIO_PATH with colons between them; found neither")
    with _telling_of_servers(roots):
        listings = catalogue.list_sets(roots)
    copies = None if cache is None else {copy.digest: copy for copy in _copies_in(cache)}
    if as_json:
        described = [dataclasses.asdict(listing) for listing in listings]
        for entry in (entry for listing in described for entry in listing["sets"]):
            copy = copies and copies.get(entry["digest"])
            entry["cached"] = copy and dataclasses.asdict(copy)
        _print_json({"roots": described})
    else:
        for line in _aligned(list(_catalogue_rows(listings, copies))):
            _say(line)
        for found in (found for listing in listings for found in listing.sets if found.reason):
            _say(f"{found.state}: {found.reason}")
        for copy in (copies or {}).values():
            if copy.problem:
                _say(f"cached: {copy.problem}")
        for left in (left for listing in listings for left in listing.left_overs):
            whose = (
                "the next `shardio publish` there removes it, if it may"
                if left.abandoned
                else "a publisher may be at work"
            )
            _say(f"left over: {left.path}: {_bytes(left.nbytes)}; {whose}")
    problems = [listing for listing in listings if listing.problem]
    for listing in problems:
        _say(f"shardio: error: {listing.root}: {listing.problem}", err=True)
    sys.exit(1 if problems else 0)


def _copies_in(cache: Path) -> list[CachedCopy]:
    from shardio.sets.cache.folder import Cache

    return Cache(cache).copies() if cache.is_dir() else []  # nobody has staged anything there yet


def _catalogue_rows(listings: Sequence[Listing], copies: Mapping[str, CachedCopy] | None) -> Iterator[list[str]]:
    """The table of `list`. Whether sets are cached is told if somebody asked, and their root if there are several."""
    header = ["name", "samples", "shape", "size", "digest", "state", "cached", "root"]
    columns = [name for name in header if name != "cached" or copies is not None]
    columns = [name for name in columns if name != "root" or len(listings) > 1]
    yield columns
    for listing in listings:
        for found in listing.sets:
            texts = {
                "name": printable(found.name),
                "samples": ", ".join(f"{split} {count:,}" for split, count in found.num_samples.items()),
                "shape": " x ".join(map(str, found.sample_shape)),
                "size": _bytes(found.nbytes) if found.digest else "",
                "digest": found.digest[:12],
                "state": found.state,
                "cached": _cached((copies or {}).get(found.digest)),
                "root": printable(listing.root),
            }
            yield [texts[name] for name in columns]


def _cached(copy: CachedCopy | None) -> str:
    """What `list` says of a set's copy in a cache, if there is one."""
    if copy is None:
        return "no"
    users = f", in use by {len(copy.processes)}" if copy.processes else ", in use" if copy.in_use else ""
    return ("yes" if copy.complete else "unfinished") + users


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of texts, each column as wide as it must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


@cli.command(short_help="Show how random the order of N samples is.")
@click.argument("n", type=click.IntRange(100), metavar="N")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--block-size", type=click.IntRange(1), help="Samples of a block.  [default: that of the loader]")
@click.option("--window-blocks", type=click.IntRange(1), help="Blocks of a window.  [default: that of the loader]")
@click.option("--batch-size", type=click.IntRange(2), help="[default: 256, at most N/2]")
@click.option("--classes", type=click.IntRange(2), help="Equal classes.  [default: 1000, at most N/10]")
@_json_option
def check_shuffle(
    n: int,
    seed: int,
    block_size: int | None,
    window_blocks: int | None,
    batch_size: int | None,
    classes: int | None,
    as_json: bool,
) -> None:
    """Show how random the loader's order of N samples is, with shuffle=True and with shuffle="block".

    z is the distance from a true random permutation in standard deviations of one: a good shuffle stays below 4, and
    block shuffling need not. The class variance supposes that the samples are stored sorted by class, the worst case: a
    set that `shardio convert` has made is stored shuffled, so that its classes are mixed with any block size. Stored
    neighbours that meet in a batch again and again are what blocks cost in any set.

    Exit code 1 if a statistic of the global shuffle is beyond 4.
    """
    from shardio.measure.shuffle import check_shuffle, is_sampled, num_epochs
    from shardio.order.orders import make_order

    orders = {
        "global": make_order(n, seed=seed),
        "block": make_order(n, seed=seed, shuffle="block", block_size=block_size, window_blocks=window_blocks),
    }
    found = {name: check_shuffle(o, batch_size=batch_size, num_classes=classes) for name, o in orders.items()}
    good = all(abs(statistic.z) < 4 for statistic in found["global"])
    if as_json:
        statistics = {name: [dataclasses.asdict(statistic) for statistic in found[name]] for name in found}
        _print_json({**orders["block"].describe(), "ok": good, "sampled": is_sampled(n), **statistics})
    else:
        _say(f"{'':<36}{'random':>14}{'global':>14}{'z':>8}{'block':>14}{'z':>10}")
        for whole, block in zip(*found.values(), strict=True):
            _say(
                f"{whole.name:<36}{whole.expected:>14.6g}{whole.found:>14.6g}{whole.z:>8.2f}"
                f"{block.found:>14.6g}{block.z:>10.2f}"
            )
        block = orders["block"].describe()
        looked_at = "random positions of epoch 0" if is_sampled(n) else f"whole epochs: {num_epochs(n):,}"
        _say(
            f"{looked_at}; blocks of {block['block_size']} samples, windows of {block['window_blocks']} blocks; "
            f"global: {'good, every |z| is below 4' if good else 'BAD, a |z| is 4 or more'}"
        )
    sys.exit(0 if good else 1)


@cli.command(short_help="Convert, read and train on a folder of images.")
@click.argument("images", type=_folder)
@click.option(
    "--out", type=_folder, help="Keep the set in this folder.  [default: a temporary one, removed at the end]"
)
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Training steps.")
@click.option(
    "--size",
    callback=_parsed(parse_size),
    metavar="N|HxW",
    default="256",
    show_default=True,
    help="Pixels of every sample.",
)
def demo(images: Path, out: Path | None, steps: int, size: tuple[int, int]) -> None:
    """Show the main job on a folder of IMAGES: convert, read some epochs, train a small network.

    Uses the GPU if there is one. Without --out nothing is kept; TMPDIR chooses the disk then.
    """
    from shardio.cli.demo import run_demo

    if is_temporary := out is None:
        folder = click.get_current_context().with_resource(tempfile.TemporaryDirectory(prefix="shardio-demo-"))
        out = Path(folder, "shards")
    click.secho(printable(f"$ shardio convert {images} {out} --size {size[0]}x{size[1]}"), bold=True)
    _convert(images, out, as_json=False, size=size)
    click.secho("\n" + printable(f"$ shardio info {out}"), bold=True)
    click.get_current_context().invoke(info, out=str(out), as_json=False)
    run_demo(out, steps, click.echo)
    if is_temporary:
        click.echo("\n" + printable(f"{out} is removed now; `--out FOLDER` keeps the set"))


def _some(numbers: Sequence[int], most: int = 16) -> str:
    more = f" and {len(numbers) - most:,} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:,.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def _telling_of_servers(places: Sequence[str]) -> Iterator[None]:
    """Say that a server lets us wait, and for how long that can be, once it does for some seconds."""
    from shardio.sets.names import is_url, without_credentials
    from shardio.sets.remote import SMALL_FILE_SECONDS

    names = ", ".join(without_credentials(place) for place in places if is_url(place))
    line = f"shardio: still waiting for {names}: for each manifest and listing at most {SMALL_FILE_SECONDS:g} seconds"
    timer = threading.Timer(_TELL_SECONDS, _say, [line], {"err": True})
    timer.daemon = True
    if names:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(line: str, err: bool = False) -> None:
    """Print one line, which remains one whatever is in it."""
    click.echo(printable(line), err=err)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return pairs


def _print_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value))


def main() -> NoReturn:
    """The console script. Turns every expected error into a line on stderr and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # as stderr: the terminal may have fewer characters than names
    codes: list[int] = []
    # What is registered first is run last, when threads, files and semaphores are done with.
    atexit.register(_end_at_once, codes)
    codes.append(_run())
    sys.exit(codes[0])


def _end_at_once(codes: Sequence[int]) -> None:
    """Spare the interpreter the taking apart of torch, which would take most of the time that a Ctrl-C may."""
    if codes:  # or there is a traceback to be printed
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(codes[0])


def _run() -> int:
    """Run the command that sys.argv says; the exit code."""
    try:
        cli(prog_name="shardio", standalone_mode=False)
    except SystemExit as verdict:  # of a command that checks something
        return int(verdict.code or 0)
    except click.ClickException as error:
        vars(error).update(message=printable(error.message))  # click repeats some words as they were given
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("shardio: interrupted", err=True)
        return 130
    except BrokenPipeError:
        # Whoever read our output went away. Keep the interpreter from writing the rest, and complaining, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ShardioError as error:
        click.echo(f"shardio: error: {error}", err=True)
        return 1
    except OSError as error:
        hint = ": raise the limit (`ulimit -n`) or use fewer workers" if error.errno == errno.EMFILE else ""
        _say(f"shardio: error: {error}{hint}", err=True)
        return 1
    except ImportError as error:  # a library that is missing or broken, or a kernel that is not here
        _say(f"shardio: error: {error}", err=True)
        return 1
    except ValueError as error:  # an option's value that only the code behind it can judge
        _say(f"shardio: error: {error}", err=True)
        return 2
    return 0
