"""`shardio bench`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option, mix_option, read_chain, set_argument, split_option
from shardio.cli.output import show, table
from shardio.errors import counted

if TYPE_CHECKING:
    from shardio.measure.bench import BenchResult


@click.command(short_help="Measure how fast this machine reads a set.")
@set_argument
@split_option
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    show_default="256, or all samples if there are fewer",
    help="Samples per batch.",
)
@click.option(
    "--threads", "num_threads", type=click.IntRange(1), show_default="the loader's choice", help="Gather threads."
)
@click.option("--io", metavar="auto|mmap|pread|direct", default="auto", help="How samples are read.")
@click.option("--prefetch", type=click.IntRange(0), default=2, help="Batches prepared ahead of the training loop.")
@click.option("--device", metavar="cpu|cuda|cuda:N", default="cpu", help="Device of the batches.")
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
def bench(out: Path, split: str, chain: str | None, as_json: bool, **options: Any) -> None:
    """Read the set in OUT, next to the limits of this machine.

    The loader and the limits take turns in rounds. A ratio is the speed of the loader over the speed of a limit in the
    same round. The limits are:

    \b
    memcpy   one large block, copied in memory by one thread
    take     np.take(out=, mode="clip") of random samples into slots like the
             loader's, by one thread
    direct   random samples from the disk past the page cache (O_DIRECT), by
             8 threads
    pinned   a bare copy of batches from pinned memory to the GPU

    mmap and pread read their samples twice, and only the second time counts: samples then come from the page cache, as
    in every epoch but the first if the set fits there. direct reads from the disk.
    """
    import shardio.measure.bench as benchmark
    from shardio.reading.shardset import open_shards
    from shardio.system.progress import Bar

    with Bar(unit=" turns") as bar:
        shards = open_shards(out, split)
        transform = None if chain is None else read_chain(chain, len(shards.classes))
        result = benchmark.bench(out, split=split, transform=transform, on_turn=bar.reach, **options)
    show(result.to_dict() if as_json else summary(result))


def summary(result: BenchResult) -> Iterator[str]:
    """Yields the lines that summarize a benchmark, at most 100 characters each unless the set's path is long."""
    from shardio.measure.limits import DIRECT_THREADS

    shape, machine, options = " x ".join(map(str, result.sample_shape)), result.machine, result.options
    shape += " bytes of arrays" if len(result.sample_shape) == 1 else ""
    cached = "" if result.resident_share is None else f", {result.resident_share:.0%} in the page cache before"
    gpu = "" if machine["gpu"] is None else f", {options['device']}: {machine['gpu']}"
    yield f"{result.path}, {result.split}: {counted(result.num_samples, 'sample')} of {shape}"
    yield f"{machine['filesystem']}{cached}; {machine['cores']} cores, kernel {machine['kernel']}{gpu}"
    yield f"medians of {counted(result.rounds, 'round')}, {result.seconds:g} s each"
    yield ""
    names = {
        "memcpy": "memcpy of one large block",
        "take": f"np.take into slots, batch {options['batch_size']}",
        "direct": f"O_DIRECT reads, {DIRECT_THREADS} threads",
        "pinned_copy": f"pinned copy to {options['device']}, batch {options['batch_size']}",
    }
    rows = {names[kind]: speed for kind, speed in result.limits.items()} | {"ShardLoader": result.loader}
    speeds, title = rows.values(), "samples/s" if len(result.sample_shape) == 1 else "images/s"
    ratios = [_short(result.loader.ratio_to(speed)) for speed in result.limits.values()]
    columns = {
        "": [*rows],
        title: [f"{speed.images_per_second:,.0f}" for speed in speeds],
        "GB/s": [_short(result.gigabytes_per_second(speed)) for speed in speeds],
        "CPU us/image": [_short(speed.cpu_microseconds_per_image) for speed in speeds],
        "loader's ratio": [*ratios, ""],
    }
    yield from table(columns, right=[*columns][1:])
    if "direct" in result.left_out:
        yield f"left out: O_DIRECT reads: {result.left_out['direct']}"
    yield ""
    first = statistics.median(result.first_batch_seconds) * 1000
    given = {"device": "device", "batch_size": "batch", "num_threads": "threads", "prefetch": "prefetch", "io": "io"}
    yield f"ShardLoader: {', '.join(f'{word} {options[name]}' for name, word in given.items())}"
    yield f"  {options['io_reason']}"
    yield f"  {first:.0f} ms from opening the set to the first batch"


def _short(value: float) -> str:
    """Returns a number with about three digits."""
    decimals = next((count for count, least in enumerate((100, 10, 0.1)) if value >= least), 3)
    return f"{value:,.{decimals}f}"
