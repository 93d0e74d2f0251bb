"""`shardio bench`. Its text names, above the table of loaders, the options that have one value only."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardio.cli.options import each, json_option, parse_count, set_argument
from shardio.cli.output import Column, show, table
from shardio.cli.pictures import read_chain
from shardio.system.amounts import counted

if TYPE_CHECKING:
    from shardio.measure.result import LimitKind, LimitResult, Report, Speed

T = TypeVar("T")

# Columns of ratios. There is none for one buffer: that limit shows what the alignment of slots is worth.
_RATIOS: dict[LimitKind, str] = {"memcpy": "memcpy", "take": "take", "direct": "direct", "pinned_copy": "pinned"}
_WIDTH = 100


@click.command(short_help="Measure how fast this machine reads a set.")
@set_argument
@click.option("--split", default="train")
@click.option(
    "--batch-size",
    "batch_sizes",
    callback=each(parse_count, "auto"),
    metavar="N|auto,...",
    default="auto",
    help="Samples of a batch; auto: 256, or all if they are fewer.",
)
@click.option(
    "--threads",
    "num_threads",
    callback=each(parse_count, "auto"),
    metavar="N|auto,...",
    help="Gather threads; auto: as many as the loader chooses.  [default: 1,auto]",
)
@click.option(
    "--io",
    "ios",
    callback=each(str),
    metavar="auto|mmap|pread|direct,...",
    help="How samples are read.  [default: auto]",
)
@click.option(
    "--prefetch",
    "prefetches",
    callback=each(partial(parse_count, least=0)),
    metavar="N,...",
    help="Batches prepared ahead of the training loop.  [default: 2]",
)
@click.option(
    "--device",
    "devices",
    callback=each(str),
    metavar="cpu|cuda|cuda:N,...",
    default="cpu",
    help="Where batches go.",
)
@click.option(
    "--tune", "tuned", is_flag=True, help="Try many values of --threads, --prefetch and --io, and print the fastest."
)
@click.option(
    "--transform",
    "chain",
    metavar="CHAIN",
    help="The training's transform: a recipe, or a JSON file of to_dict(). On the CPU it competes with gather threads.",
)
@click.option("--rounds", type=click.IntRange(1), default=7, help="Rounds, of which figures are medians.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    default=0.5,
    help="Seconds for each way and round, after as long a warm-up.",
)
@json_option
def bench(
    out: Path,
    split: str,
    tuned: bool,
    chain: str | None,
    rounds: int,
    seconds: float,
    as_json: bool,
    **values: Any,
) -> None:
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

    Nothing leaves the page cache for this command: benchmarks/cold.py in the repository measures how fast a first epoch
    is.

    With --tune, run it where the training will run and while nothing else does. A set that fits in memory is read from
    the page cache, a larger one from storage. The last line is the Python to paste.
    """
    import shardio.measure.bench as benchmark
    from shardio.reading.shardset import open_shards
    from shardio.system.progress import Bar

    with Bar(unit=" turns") as bar:
        shards = open_shards(out, split)
        transform = None if chain is None else read_chain(chain, len(shards.classes))
        sweep = benchmark.candidates(shards) if tuned else benchmark.Sweep()
        sweep = replace(sweep, **{name: value for name, value in values.items() if value is not None})
        report = benchmark.bench(
            out, sweep, split=split, transform=transform, rounds=rounds, seconds=seconds, on_turn=bar.reach
        )
    if as_json:
        chosen, gain = report.fastest()
        fastest = {"fastest": {"line": report.line(chosen), "gain": round(gain, 3)}} if tuned else {}
        show(report.to_dict() | fastest)
    else:
        show(summary(report))
        if tuned:
            show(_fastest(report))


def _fastest(report: Report) -> Iterator[str]:
    chosen, gain = report.fastest()
    yield ""
    yield "the defaults are as fast as any:" if gain == 1.0 else f"{gain:.2f} times as fast as the defaults:"
    yield f"  {report.line(chosen)}"


def summary(report: Report) -> Iterator[str]:
    """Yields lines of at most 100 characters, if the set's path is not long."""
    yield from _about(report)
    yield ""
    yield from _limits(report)
    yield ""
    yield from _loaders(report)


def _about(report: Report) -> Iterator[str]:
    shape, machine = " x ".join(map(str, report.sample_shape)), report.machine
    cached = "" if report.resident_share is None else f", {report.resident_share:.0%} in the page cache before"
    yield f"{report.path}, {report.split}: {counted(report.num_samples, 'sample')} of {shape}"
    devices = "".join(f", {device}: {name}" for device, name in machine["devices"].items())
    rounds = f"medians of {report.rounds} round{'s' * (report.rounds > 1)}, {report.seconds:g} s each"
    yield f"{machine['filesystem']}{cached}; {machine['cores']} cores, kernel {machine['kernel']}{devices}"
    yield rounds


def _limits(report: Report) -> Iterator[str]:
    names = Column("limit", [_name(limit) for limit in report.limits])
    yield from table([names, *_speeds([limit.speed for limit in report.limits])], _WIDTH)
    if "direct" in report.left_out:
        yield f"left out: O_DIRECT reads: {report.left_out['direct']}"


def _name(limit: LimitResult) -> str:
    from shardio.measure.limits import DIRECT_THREADS

    batch = f"batch {limit.batch_size}"
    if limit.image_shape is not None:
        batch += f" of {limit.image_shape[0]}x{limit.image_shape[1]}"
    return {
        "memcpy": "memcpy of one large block",
        "take": f"np.take into slots, {batch}",
        "take_one_buffer": f"np.take into one buffer, {batch}",
        "direct": f"O_DIRECT reads, {DIRECT_THREADS} threads",
        "pinned_copy": f"pinned copy to {limit.device}, {batch}",
    }[limit.kind]


def _loaders(report: Report) -> Iterator[str]:
    loaders = report.loaders
    combinations = [loader.combination for loader in loaders]
    options = [
        Column("device", [options.device for options in combinations]),
        Column("batch", [str(options.batch_size) for options in combinations]),
        Column("io", [options.io for options in combinations]),
        Column("threads", [str(options.num_threads) for options in combinations]),
        Column("fetch", [str(options.prefetch) for options in combinations], above="pre-"),
    ]
    swept = [option for option in options if len(set(option.cells)) > 1]
    fixed = [f"{one.above.rstrip('-')}{one.title} {one.cells[0]}" for one in options if one not in swept]
    yield f"ShardLoader: {', '.join(fixed)}" if fixed else "ShardLoader"
    firsts = [f"{statistics.median(loader.first_batch_seconds) * 1000:.0f}" for loader in loaders]
    first = Column("ms", firsts, above="first", right=True)
    yield from table([*swept, *_speeds([loader.speed for loader in loaders]), first, *_ratios(report)], _WIDTH)
    yield "ratios are of GB/s; first: from opening the set to the first batch"
    chosen = {loader.engine: loader.io_reason for loader in loaders if loader.combination.io == "auto"}
    for engine, reason in chosen.items():
        yield f"io auto is {engine} here:"
        yield f"  {reason}"


def _speeds(speeds: Sequence[Speed]) -> list[Column]:
    return [
        Column("images/s", [f"{speed.images_per_second:,.0f}" for speed in speeds], right=True),
        Column("GB/s", [_short(speed.gigabytes_per_second) for speed in speeds], right=True),
        Column("/image", [_short(speed.cpu_microseconds_per_image) for speed in speeds], above="CPU us", right=True),
    ]


def _ratios(report: Report) -> list[Column]:
    rows = [report.ratios(loader) for loader in report.loaders]
    measured = {kind: title for kind, title in _RATIOS.items() if any(kind in row for row in rows)}
    return [
        Column(title, [_short(row[kind]) if kind in row else "-" for row in rows], above="over", right=True)
        for kind, title in measured.items()
    ]


def _short(value: float) -> str:
    """Formats a number with about three digits."""
    decimals = next((count for count, least in enumerate((100, 10, 0.1)) if value >= least), 3)
    return f"{value:,.{decimals}f}"
