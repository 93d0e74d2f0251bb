"""`shardio tune`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import each, json_option, parse_count, parsed, set_argument
from shardio.cli.output import Column, next_step, show, table
from shardio.cli.pictures import read_chain
from shardio.conversion.amounts import parse_size

if TYPE_CHECKING:
    from shardio.measure.report import Combination
    from shardio.measure.tune import Tuning

_MOST_SHOWN = 8
_ENOUGH_TRIALS = 5


@click.command(short_help="Find the fastest options on this machine.")
@set_argument
@click.option("--split", default="train")
@click.option(
    "--batch-size",
    "batch_sizes",
    callback=each(parse_count),
    metavar="N,...",
    default="256",
    help="That of the training, or several that it may have.",
)
@click.option("--crop", callback=parsed(parse_size), metavar="N|HxW", help="That of the training's loader.")
@click.option("--device", metavar="cpu|cuda|cuda:N", help="Where batches go.  [default: as the loader's]")
@click.option("--transform", "chain", metavar="CHAIN", help="The training's: a recipe, or a JSON file of to_dict().")
@click.option("--seconds", type=click.FloatRange(0.1), default=60.0, help="How long ways of reading are tried.")
@json_option
def tune(out: Path, as_json: bool, seconds: float, split: str, chain: str | None, **options: Any) -> None:
    """Try gather threads, prefetch and engines on this machine, and print the line of Python to paste.

    A set that fits in the memory that is left is measured as all epochs but the first read it, from the page cache; a
    larger one as all epochs read it, from storage. Run it where the training will run, and while nothing else does:
    other processes take cores and the disk. Ctrl-C ends it early.
    """
    import time

    import shardio.measure.tune as tuning
    from shardio.reading.shardset import open_shards
    from shardio.system.progress import Bar

    transform = None if chain is None else read_chain(chain, len(open_shards(out, split).classes))
    begun = time.monotonic()
    with Bar(
        total=round(seconds), unit=" s", bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s"
    ) as bar:

        def tell(way: Combination) -> None:
            bar.set_description_str(f"{_words(way)} ", refresh=False)
            bar.reach(min(round(time.monotonic() - begun), round(seconds)), round(seconds))

        result = tuning.tune(out, split=split, transform=transform, seconds=seconds, on_turn=tell, **options)
    show(_facts(result) if as_json else _lines(result))


def _words(way: Combination) -> str:
    threads = "default threads" if way.num_threads is None else f"{way.num_threads} threads"
    return f"{threads}, prefetch {way.prefetch}, io {way.io}"


def _lines(result: Tuning) -> Iterator[str]:
    from shardio.measure.race import ratio
    from shardio.measure.tune import sorted_rates

    where = {"memory": "from memory", "storage": "from storage, as every epoch"}[result.situation]
    yield f"{result.path}, {result.split}: read {where}: {result.reason}"
    found = sorted_rates(result)
    default = result.rates[result.default]
    shown = found[:_MOST_SHOWN]
    several = len({way.batch_size for way in result.rates}) > 1
    if result.default not in dict(shown):
        shown = [*shown[:-1], (result.default, default)]
    yield from table(
        [
            *([Column("batch", [str(way.batch_size) for way, _ in shown], right=True)] if several else []),
            Column("threads", [_threads(way) for way, _ in shown], right=True),
            Column("prefetch", [str(way.prefetch) for way, _ in shown], right=True),
            Column("io", [way.io for way, _ in shown]),
            Column("images/s", [f"{statistics.median(some):,.0f}" for _, some in shown], right=True),
            Column("of default", [f"{ratio(some, default):.2f}" for _, some in shown], right=True),
            Column("trials", [str(len(some)) for _, some in shown], right=True),
        ]
    )
    if len(found) > len(shown):
        yield f"and {len(found) - len(shown)} slower ways"
    if result.chosen == result.default:
        yield "the defaults are as good as any:"
    else:
        yield f"{result.gain:.2f} of the default's speed:"
    yield f"  {result.line}"
    if min(len(result.rates[result.chosen]), len(default)) < _ENOUGH_TRIALS:
        yield "so few trials tell little: give it more --seconds"
    if result.situation == "memory" and not result.is_resident:
        yield next_step("warm", result.path) + "  # or the first epoch reads from storage, which was not measured"
        return
    yield next_step("doctor", result.path)


def _threads(way: Combination) -> str:
    return "default" if way.num_threads is None else str(way.num_threads)


def _facts(result: Tuning) -> dict[str, Any]:
    return {
        "path": result.path,
        "split": result.split,
        "situation": result.situation,
        "reason": result.reason,
        "line": result.line,
        "gain": result.gain,
        "chosen": vars(result.chosen),
        "ways": [{**vars(way), "images_per_second": some} for way, some in result.rates.items()],
    }
