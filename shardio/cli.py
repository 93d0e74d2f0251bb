"""The command line: options in, exit code out.

0 is success, 1 an error in the world (a bad file, a full disk, damage found), 2 wrong usage, 130 interrupted. Errors
are one or two lines on stderr. Results go to stdout, as JSON with `--json`; progress bars go to stderr if that is a
terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from tqdm import tqdm

from shardio.errors import ShardioError
from shardio.version import __version__

# Commands import what they need when they run: `shardio info` answers before torch would be loaded.

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


T = TypeVar("T")


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError("a size such as 4GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match:
        raise ValueError("pixels such as 256, or HEIGHTxWIDTH such as 224x320")
    return int(match[1]), int(match[2] or match[1])


def _parse_max_bad(text: str) -> int | float:
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text)
    if not match or (match[2] and float(match[2]) > 100):
        raise ValueError("a number of images such as 10, or a share such as 1%")
    return int(match[1]) if match[1] else float(match[2]) / 100


def _parse_counts(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError("numbers such as 1,2,4")
    return tuple(map(int, text.split(",")))


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    """An option's callback: `parse` raises ValueError with what it expected."""

    def callback(context: click.Context, parameter: click.Parameter, value: str) -> T:
        try:
            return parse(value.strip())
        except ValueError as error:
            raise click.BadParameter(f"expected {error}; found {value!r}") from None

    return callback


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
_folder = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="shardio")
def cli() -> None:
    """Image collections as memory-mapped shards, for training that never waits for data.

    \b
    shardio convert imagenet/ out/     decode and resize once, offline
    shardio info out/                  what is in a set
    shardio verify out/                is it still what was published?
    shardio bench out/                 how fast does this machine read it?
    shardio warm out/                  bring it into memory before a job reads it
    shardio check-shuffle 1281167      how random is the order?
    """


@cli.command(short_help="Turn a folder of images into a shard set.")
@click.argument("src", type=_folder)
@click.argument("out", type=_folder)
@click.option(
    "--size",
    callback=_parsed(_parse_size),
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
    callback=_parsed(_parse_bytes),
    metavar="SIZE",
    default="4GiB",
    show_default=True,
    help="Most bytes of one shard file.",
)
@click.option("--workers", type=click.IntRange(1), help="Cores to use.  [default: all]")
@click.option(
    "--order",
    type=click.Choice(["shuffled", "source"]),
    default="shuffled",
    show_default=True,
    help="How samples are stored. shuffled: any contiguous run is a fair sample of the whole.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the shuffled order.")
@click.option(
    "--max-bad",
    callback=_parsed(_parse_max_bad),
    metavar="N|P%",
    default="1%",
    show_default=True,
    help="Refused images to accept, as a number or a share; with more, nothing is published.",
)
@_json_option
def convert(src: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Convert the images in SRC into a shard set in OUT.

    SRC holds class folders (SRC/CLASS/IMAGE), or train, val and test folders of class folders. JPEG, PNG and WebP are
    recognised by content. Damaged images are left out and listed in OUT/rejects.jsonl.

    Interrupted or killed, the same command goes on where it stopped.
    """
    _convert(src, out, as_json, **options)


def _convert(src: Path, out: Path, as_json: bool, **options: Any) -> None:
    import shardio.converter as converter

    with tqdm(unit=" images", disable=None, dynamic_ncols=True, smoothing=0.1) as bar:

        def show(progress: converter.Progress) -> None:
            if bar.total is None:
                bar.reset(progress.total)
            bar.set_postfix(refused=progress.refused, refresh=False)
            bar.update(progress.done - bar.n)

        try:
            report = converter.convert(src, out, on_progress=show, **options)
        except KeyboardInterrupt:
            bar.close()
            click.echo(f"shardio: finished shards are kept in {out}: the same command goes on with them", err=True)
            raise
    if as_json:
        _print_json({**dataclasses.asdict(report), "mended": [os.fsdecode(m.key) for m in report.mended]})
        return
    rate = f" ({report.num_converted / report.seconds:,.0f} images/s)" if report.num_converted else ""
    done = f"converted {report.num_converted:,} images in {report.seconds:,.1f} s{rate}"
    click.echo(done if report.num_converted else "nothing to do: the set is complete")
    for name, count in report.num_samples.items():
        click.echo(f"  {name:<8}{count:>12,} samples")
    click.echo(f"  {report.num_shards:,} shards, {_bytes(report.nbytes)} in {out}, digest {report.digest[:16]}")
    for what, counts, where in (
        ("refused", report.refused, f", listed in {out / 'rejects.jsonl'}"),
        ("mended", {"junk in the header left out": len(report.mended)} if report.mended else {}, ""),
        ("ignored", report.ignored, ""),
    ):
        if counts:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
            click.echo(f"  {what} {sum(counts.values()):,}: {reasons}{where}")


@cli.command(short_help="Say what a set holds.")
@click.argument("out", type=_folder)
@_json_option
def info(out: Path, as_json: bool) -> None:
    """Say what the set in OUT is: splits, samples, shape, classes, size, digest."""
    from shardio.manifest import load_manifest

    manifest = load_manifest(out)
    splits = {
        name: {"num_samples": split.num_samples, "num_shards": len(split.shards)}
        for name, split in manifest.splits.items()
    }
    facts = {
        "path": str(out),
        "digest": manifest.digest,
        "sample_shape": list(manifest.sample_shape),
        "num_classes": len(manifest.classes),
        "splits": splits,
        "nbytes": manifest.nbytes,
        "num_rejects": manifest.rejects.num_rejects,
        "provenance": dict(manifest.provenance),
    }
    if as_json:
        _print_json(facts)
        return
    height, width, channels = manifest.sample_shape
    click.echo(f"{out}: {_bytes(manifest.nbytes)}, {len(manifest.classes):,} classes")
    click.echo(f"  sample  {height} x {width} x {channels} uint8")
    for name, split in splits.items():
        click.echo(f"  {name:<8}{split['num_samples']:,} samples in {split['num_shards']:,} shards")
    click.echo(f"  refused {manifest.rejects.num_rejects:,} images when it was made")
    click.echo(f"  digest  {manifest.digest}")
    for name, value in _flat(manifest.provenance):
        click.echo(f"  {name}: {value}")


@cli.command(short_help="Check a set against its checksums.")
@click.argument("out", type=_folder)
@click.option("--quick", is_flag=True, help="Only sizes and headers, which takes no time.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Files to read at a time.")
@_json_option
def verify(out: Path, quick: bool, workers: int, as_json: bool) -> None:
    """Check the set in OUT against its checksums, and name every damaged file and sample.

    Exit code 1 if anything is damaged.
    """
    import shardio.verifier as verifier

    with tqdm(unit="B", unit_scale=True, disable=True if quick else None, dynamic_ncols=True) as bar:

        def show(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        report = verifier.verify(out, quick=quick, workers=workers, on_progress=show)
    if as_json:
        _print_json({**dataclasses.asdict(report), "ok": report.ok})
    else:
        for problem in report.problems:
            click.echo(f"damaged: {problem.detail}")
        what = "sizes and headers" if quick else "every checksum"
        verdict = "intact" if report.ok else f"{len(report.problems)} damaged"
        click.echo(f"{out}: {verdict}: {what} of {report.num_files:,} files, {_bytes(report.nbytes)}")
    sys.exit(0 if report.ok else 1)


@cli.command(short_help="Bring a set into the page cache.")
@click.argument("out", type=_folder)
@click.option("--split", help="Only this split.  [default: all]")
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True, help="Reads at a time.")
@click.option("--force", is_flag=True, help="Even if the set is larger than the memory that is left.")
@_json_option
def warm(out: Path, split: str | None, workers: int, force: bool, as_json: bool) -> None:
    """Bring the set in OUT into the page cache, so that a job's first epoch is as fast as the others.

    The cache is the kernel's, and shared: one such command serves all processes of the machine.
    """
    import shardio.warmer as warmer

    with tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True) as bar:

        def show(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        report = warmer.warm(out, split=split, workers=workers, force=force, on_progress=show)
    if as_json:
        _print_json(dataclasses.asdict(report))
        return
    rate = _bytes(int(report.nbytes / report.seconds))
    click.echo(f"{out}: read {_bytes(report.nbytes)} in {report.seconds:,.1f} s ({rate}/s)")
    if report.resident_before is None or report.resident_after is None:
        click.echo("  what is in the page cache, the kernel tells only whoever owns the files or may write to them")
    else:
        click.echo(f"  in the page cache before {report.resident_before:.1%}, now {report.resident_after:.1%}")


@cli.command(short_help="Measure how fast this machine reads a set.")
@click.argument("out", type=_folder)
@click.option("--split", default="train", show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True)
@click.option(
    "--threads",
    callback=_parsed(_parse_counts),
    metavar="N,N,...",
    default="1,2",
    show_default=True,
    help="Numbers of gather threads to try.",
)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Medians are over so many.")
@click.option("--seconds", type=click.FloatRange(0.01), default=0.5, show_default=True, help="For each way and round.")
@_json_option
def bench(
    out: Path, split: str, batch_size: int, threads: tuple[int, ...], rounds: int, seconds: float, as_json: bool
) -> None:
    """Read the set in OUT and print images per second, beside np.take and memcpy in the same run.

    Ratios are to np.take into as many aligned buffers as the loader uses in turn, the floor without native code, and to
    copying one large block.
    """
    import shardio.bench as benchmark

    first = benchmark.first_batch_seconds(out, split, batch_size)
    with tqdm(total=rounds, unit=" rounds", disable=None, dynamic_ncols=True) as bar:

        def show(number: int) -> None:
            bar.update(number - bar.n)

        results = benchmark.bench(
            out,
            split=split,
            batch_size=batch_size,
            threads=threads,
            rounds=rounds,
            seconds=seconds,
            on_round=show,
        )
    if as_json:
        _print_json({"first_batch_seconds": round(first, 4), "results": [result.to_dict() for result in results]})
        return
    click.echo(f"{'':<22}{'images/s':>10}{'GB/s':>8}{'CPU us/image':>14}{'to take':>9}{'to memcpy':>11}")
    for result in results:
        click.echo(
            f"{result.name:<22}{result.images_per_second:>10,.0f}{result.gigabytes_per_second:>8.2f}"
            f"{result.cpu_microseconds_per_image:>14.1f}{result.ratio_to_take:>9.2f}{result.ratio_to_memcpy:>11.2f}"
        )
    click.echo(f"first batch of {results[0].batch_size} after {first * 1000:.0f} ms; medians of {rounds} rounds")


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
    from shardio.order import make_order
    from shardio.shufflecheck import check_shuffle, is_sampled, num_epochs

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
        click.echo(f"{'':<36}{'random':>14}{'global':>14}{'z':>8}{'block':>14}{'z':>10}")
        for whole, block in zip(*found.values(), strict=True):
            click.echo(
                f"{whole.name:<36}{whole.expected:>14.6g}{whole.found:>14.6g}{whole.z:>8.2f}"
                f"{block.found:>14.6g}{block.z:>10.2f}"
            )
        block = orders["block"].describe()
        looked_at = "random positions of epoch 0" if is_sampled(n) else f"whole epochs: {num_epochs(n):,}"
        click.echo(
            f"{looked_at}; blocks of {block['block_size']} samples, windows of {block['window_blocks']} blocks; "
            f"global: {'good, every |z| is below 4' if good else 'BAD, a |z| is 4 or more'}"
        )
    sys.exit(0 if good else 1)


@cli.command(short_help="Convert, read and train on a folder of images.")
@click.argument("images", type=_folder)
@click.option("--out", type=_folder, help="Folder of the set, kept.  [default: IMAGES with -shards at its end]")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Training steps.")
@click.option(
    "--size",
    callback=_parsed(_parse_size),
    metavar="N|HxW",
    default="256",
    show_default=True,
    help="Pixels of every sample.",
)
def demo(images: Path, out: Path | None, steps: int, size: tuple[int, int]) -> None:
    """Show the main job on a folder of IMAGES: convert, read some epochs, train a small network.

    Uses the GPU if there is one.
    """
    from shardio.demo import run_demo

    out = images.with_name(images.name + "-shards") if out is None else out
    click.secho(f"$ shardio convert {images} {out} --size {size[0]}x{size[1]}", bold=True)
    _convert(images, out, as_json=False, size=size)
    click.secho(f"\n$ shardio info {out}", bold=True)
    click.get_current_context().invoke(info, out=out, as_json=False)
    run_demo(out, steps, click.echo)


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:,.3g} TB"


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return pairs


def _print_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value))


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def main() -> NoReturn:
    """The console script. Turns every expected error into a line on stderr and an exit code."""
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
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("shardio: interrupted", err=True)
        return 130
    except BrokenPipeError:
        # Whoever read our output went away. Keep the interpreter from writing the rest, and complaining, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ShardioError, OSError) as error:
        hint = ": raise the limit (`ulimit -n`) or use fewer workers" if _errno(error) == errno.EMFILE else ""
        click.echo(f"shardio: error: {error}{hint}", err=True)
        return 1
    except ValueError as error:  # an option's value that only the code behind it can judge
        click.echo(f"shardio: error: {error}", err=True)
        return 2
    return 0
