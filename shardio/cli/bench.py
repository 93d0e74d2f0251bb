"""`shardio bench`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import each, json_option, mix_option, parse_count, set_argument
from shardio.cli.output import Column, show, table
from shardio.cli.pictures import read_chain
from shardio.errors import counted

if TYPE_CHECKING:
    from shardio.measure.result import BenchResult, LimitKind, LimitSpeed, LoaderSpeed, Speed

_LIMITS: dict[LimitKind, str] = {"memcpy": "memcpy", "take": "take", "direct": "direct", "pinned_copy": "pinned"}
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
    help="Samples per batch. auto: 256, or all samples if there are fewer.",
)
@click.option(
    "--threads",
    "num_threads",
    callback=each(parse_count, "auto"),
    metavar="N|auto,...",
    help="Gather threads. auto: the loader's choice.  [default: 1,auto]",
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
    help="Device of the batches.",
)
@click.option(
    "--tune", "tuned", is_flag=True, help="Try many values of --threads, --prefetch and --io, and print the fastest."
)
@click.option(
    "--transform",
    "chain",
    metavar="CHAIN",
    help="The training's transform, if it runs on the CPU: a recipe, or a JSON file of to_dict().",
)
@mix_option
@click.option("--rounds", type=click.IntRange(1), default=7, help="Figures are medians over these rounds.")
@click.option(
    "--seconds", type=click.FloatRange(0.01), default=0.5, help="Duration of a measurement, and of its warm-up."
)
@json_option
def bench(
    out: Path,
    split: str,
    tuned: bool,
    chain: str | None,
    mix: dict[str, str],
    rounds: int,
    seconds: float,
    as_json: bool,
    **values: Any,
) -> None:
    """Read the set in OUT with every combination of the given values, next to the limits of this machine.

    Loaders and limits take turns in rounds. A ratio is the speed of a loader over the speed of a limit in the same
    round. The limits are:

    \b
    memcpy   one large block, copied in memory by one thread
    take     np.take(out=, mode="clip") of random samples into slots like the
             loader's, by one thread
    direct   random samples from the disk past the page cache (O_DIRECT), by
             8 threads
    pinned   a bare copy of batches from pinned memory to the GPU

    mmap and pread read their samples twice, and only the second time counts: samples then come from the page cache, as
    in every epoch but the first if the set fits there. direct reads from the disk.

    Use --tune on the machine that will train, while it is idle. The last line is the call of ShardLoader to paste.
    """
    import shardio.measure.bench as benchmark
    from shardio.reading.shardset import open_shards
    from shardio.system.progress import Bar

    with Bar(unit=" turns") as bar:
        shards = open_shards(out, split)
        transform = None if chain is None else read_chain(chain, len(shards.classes))
        sweep = benchmark.candidates(shards) if tuned else benchmark.Sweep()
        sweep = replace(sweep, **{name: value for name, value in values.items() if value is not None})
        result = benchmark.bench(
            out, sweep, split=split, transform=transform, mix=mix, rounds=rounds, seconds=seconds, on_turn=bar.reach
        )
    chosen, gain = result.fastest()
    if as_json:
        fastest = {"fastest": {"line": python_line(result, chosen), "gain": round(gain, 3)}} if tuned else {}
        show(result.to_dict() | fastest)
        return
    show(summary(result))
    if tuned:
        text = "the defaults are as fast as any:" if gain == 1.0 else f"{gain:.2f} times as fast as the defaults:"
        show(["", text, f"  {python_line(result, chosen)}"])


def python_line(result: BenchResult, chosen: LoaderSpeed) -> str:
    """Returns the line of Python that makes the chosen loader."""
    default = result.loaders[0].combination
    sets = ", ".join(f"{path!r}: {share}" for path, share in {result.path: 1, **result.mix}.items())
    words = [f"{{{sets}}}" if result.mix else repr(result.path), f"batch_size={chosen.combination.batch_size}"]
    words += ["epoch_batches=..."] if result.mix else []
    words += [f"split={result.split!r}"] if result.split != "train" else []
    for name in ("num_threads", "prefetch", "io"):
        value = getattr(chosen.combination, name)
        words += [f"{name}={value!r}"] if value != getattr(default, name) else []
    return f"ShardLoader({', '.join(words)})"


def summary(result: BenchResult) -> Iterator[str]:
    """Yields the lines that summarise a benchmark, at most 100 characters each unless the set's path is long."""
    shape, machine = " x ".join(map(str, result.sample_shape)), result.machine
    shape += " bytes of arrays" if len(result.sample_shape) == 1 else ""
    cached = "" if result.resident_share is None else f", {result.resident_share:.0%} in the page cache before"
    devices = "".join(f", {device}: {name}" for device, name in machine["devices"].items())
    yield f"{result.path}, {result.split}: {counted(result.num_samples, 'sample')} of {shape}"
    yield f"{machine['filesystem']}{cached}; {machine['cores']} cores, kernel {machine['kernel']}{devices}"
    yield f"medians of {counted(result.rounds, 'round')}, {result.seconds:g} s each"
    yield ""
    names = Column("limit", [_name(limit) for limit in result.limits])
    yield from table([names, *_speeds(result, [limit.speed for limit in result.limits])], _WIDTH)
    if "direct" in result.left_out:
        yield f"left out: O_DIRECT reads: {result.left_out['direct']}"
    yield ""
    yield from _loaders(result)


def _name(limit: LimitSpeed) -> str:
    from shardio.measure.limits import DIRECT_THREADS

    return {
        "memcpy": "memcpy of one large block",
        "take": f"np.take into slots, batch {limit.batch_size}",
        "direct": f"O_DIRECT reads, {DIRECT_THREADS} threads",
        "pinned_copy": f"pinned copy to {limit.device}, batch {limit.batch_size}",
    }[limit.kind]


def _loaders(result: BenchResult) -> Iterator[str]:
    """Yields the table of loaders; options with only one value are named above it."""
    loaders = result.loaders
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
    ratios = [result.ratios(loader) for loader in loaders]
    over = [
        Column(title, [_short(row[kind]) if kind in row else "-" for row in ratios], above="over", right=True)
        for kind, title in _LIMITS.items()
        if any(kind in row for row in ratios)
    ]
    yield from table([*swept, *_speeds(result, [loader.speed for loader in loaders]), first, *over], _WIDTH)
    yield "first: from opening the set to the first batch"
    chosen = {loader.engine: loader.io_reason for loader in loaders if loader.combination.io == "auto"}
    for engine, reason in chosen.items():
        yield f"io auto is {engine} here:"
        yield f"  {reason}"


def _speeds(result: BenchResult, speeds: Sequence[Speed]) -> list[Column]:
    return [
        Column(
            "samples/s" if len(result.sample_shape) == 1 else "images/s",
            [f"{speed.images_per_second:,.0f}" for speed in speeds],
            right=True,
        ),
        Column("GB/s", [_short(result.gigabytes_per_second(speed)) for speed in speeds], right=True),
        Column("/image", [_short(speed.cpu_microseconds_per_image) for speed in speeds], above="CPU us", right=True),
    ]


def _short(value: float) -> str:
    """Returns a number with about three digits."""
    decimals = next((count for count, least in enumerate((100, 10, 0.1)) if value >= least), 3)
    return f"{value:,.{decimals}f}"
