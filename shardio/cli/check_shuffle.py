"""`shardio check-shuffle`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from shardio.cli.options import json_option
from shardio.cli.output import Column, say, show, table

if TYPE_CHECKING:
    from shardio.measure.shuffle import Statistic


@click.command(short_help="Show how random the order of N samples is.")
@click.argument("n", type=click.IntRange(100), metavar="N")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--block-size", type=click.IntRange(1), help="Samples of a block.  [default: that of the loader]")
@click.option("--window-blocks", type=click.IntRange(1), help="Blocks of a window.  [default: that of the loader]")
@click.option("--batch-size", type=click.IntRange(2), help="[default: 256, at most N/2]")
@click.option("--classes", "num_classes", type=click.IntRange(2), help="Equal classes.  [default: 1000, at most N/10]")
@json_option
def check_shuffle(
    n: int, seed: int, batch_size: int | None, num_classes: int | None, as_json: bool, **block: int | None
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

    orders = {"global": make_order(n, seed=seed), "block": make_order(n, seed=seed, shuffle="block", **block)}
    found = {name: check_shuffle(o, batch_size=batch_size, num_classes=num_classes) for name, o in orders.items()}
    good = all(abs(statistic.z) < 4 for statistic in found["global"])
    described = orders["block"].describe()
    if as_json:
        statistics = {name: [dataclasses.asdict(statistic) for statistic in found[name]] for name in found}
        show({**described, "ok": good, "sampled": is_sampled(n), **statistics})
    else:
        looked_at = "random positions of epoch 0" if is_sampled(n) else f"whole epochs: {num_epochs(n):,}"
        show(_table(found))
        say(f"{looked_at}; blocks of {described['block_size']} samples, windows of {described['window_blocks']} blocks")
        say(f"global: {'good, every |z| is below 4' if good else 'BAD, a |z| is 4 or more'}")
    sys.exit(0 if good else 1)


def _table(found: Mapping[str, Sequence[Statistic]]) -> Iterator[str]:
    columns = [
        Column("", [statistic.name for statistic in found["global"]]),
        Column("random", [f"{statistic.expected:.4g}" for statistic in found["global"]], right=True),
    ]
    for name, statistics in found.items():
        columns.append(Column(name, [f"{statistic.found:.4g}" for statistic in statistics], right=True))
        columns.append(Column("z", [f"{statistic.z:.2f}" for statistic in statistics], right=True))
    return table(columns, 80)
