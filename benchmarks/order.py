"""The cost of the order: microseconds per batch over a whole run, and for any batch of any epoch at once.

The peer is numpy's Generator.permutation, which needs an array of all samples and cannot begin in the middle.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import islice

import numpy as np
from common import describe_machine, spread

from shardio.order.mixture import Component, MixedOrder
from shardio.order.orders import Endless, Order, make_order
from shardio.order.sampler import Sampler


def batches_of(order: Order, batch_size: int, count: int, epoch: int) -> int:
    return sum(1 for _ in islice(Sampler(order, batch_size).batches(epoch), count))


def mixture_of(n: int, num_sets: int) -> MixedOrder:
    """A mixture of sets with n samples together, whose shares are 1, 2, 3 and so on."""
    sets = tuple(
        Component({}, make_order(n // num_sets, seed=number), number * (n // num_sets)) for number in range(num_sets)
    )
    return MixedOrder(sets, 0, tuple(range(1, num_sets + 1)))


def whole_permutation(n: int, batch_size: int, count: int, epoch: int) -> int:
    indices = np.random.default_rng(epoch).permutation(n)
    return sum(1 for _ in islice(np.split(indices, range(batch_size, n, batch_size)), count))


def one_batch(n: int, batch_size: int, step: int) -> None:
    next(Sampler(make_order(n), batch_size, start=step * batch_size).batches(7))


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    n, batch_size = options.samples, options.batch_size
    count = n // batch_size
    print(describe_machine())

    orders = {
        "stored": make_order(n, shuffle=False),
        "global": make_order(n),
        "block": make_order(n, shuffle="block"),
        "weighted": make_order(n, weights=np.random.default_rng(0).random(n)),
        "stream": Endless(make_order(n)),
        "mixture of 4 sets": mixture_of(n, 4),
        "mixture of 64 sets": mixture_of(n, 64),
    }
    ways: dict[str, Callable[[int], int]] = {
        name: partial(batches_of, order, batch_size, count) for name, order in orders.items()
    }
    ways["Generator.permutation"] = partial(whole_permutation, n, batch_size, count)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(options.rounds):
        for name, way in ways.items():
            taken[name].append(seconds(partial(way, epoch)) / count * 1e6)
    print(f"\n{n:,} samples, whole epochs, medians of {options.rounds}: microseconds per batch of {batch_size}")
    for name, values in taken.items():
        print(f"  {name:<22}{spread(values, 1)}")

    print("\none batch at once, sampler and all: milliseconds, and most bytes allocated")
    for many in (10**6, 10**9, 10**10):
        for step in (0, min(10**6, many // batch_size - 1)):
            act = partial(one_batch, many, batch_size, step)
            taken = spread([seconds(act) * 1e3 for _ in range(options.rounds)], 2)
            tracemalloc.start()
            act()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            print(f"  {many:>14,} samples, step {step:>9,}: {taken} ms {peak:>12,} bytes")


if __name__ == "__main__":
    main()
