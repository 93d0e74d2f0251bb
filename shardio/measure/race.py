"""A race of several ways to do one thing, on a machine whose speed changes while they are measured.

All take turns, round after round, and those that are clearly slower drop out, so that the time goes to those that are
hard to tell apart. Two ways are compared by the median of the ratios of the rounds that both have run: what slows the
machine down for a while slows down both. This is successive halving (Karnin, Koren, Somekh, "Almost optimal exploration
in multi-armed bandits", ICML 2013) with the median in place of the mean.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Way = TypeVar("Way")

# After so many rounds, ways below this share of the best one drop out.
_LEAST_SHARES = {2: 0.6, 3: 0.72, 4: 0.8, 6: 0.87, 9: 0.91, 12: 0.93, 16: 0.95, 24: 0.97}
_ROUNDS_TO_TELL = 3


def race(
    ways: Sequence[Way],
    measure: Callable[[Way, int], float],
    is_over: Callable[[], bool],
    on_turn: Callable[[Way], None] = lambda way: None,
    seed: int = 0,
) -> dict[Way, list[float]]:
    """Returns the rates of each way, one for each round that it has run, from the first round on.

    `measure(way, number)` measures a rate in turn `number`, which is another one each time. The first way never drops
    out. The race goes on until `is_over`, and for one whole round at least.
    """
    rng = random.Random(seed)
    rates: dict[Way, list[float]] = {way: [] for way in ways}
    running = list(ways)
    turn = rounds = 0
    while not (rounds and is_over()):
        for way in rng.sample(running, len(running)):
            rates[way].append(measure(way, turn))
            turn += 1
            on_turn(way)
            if rounds and is_over():
                return rates
        rounds += 1
        if rounds in _LEAST_SHARES:
            best = best_of({way: rates[way] for way in running})
            running = [
                way for way in running if way == ways[0] or ratio(rates[way], rates[best]) >= _LEAST_SHARES[rounds]
            ]
    return rates


def ratio(rates: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median of the ratios of the rounds that both have."""
    pairs = list(zip(rates, others, strict=False))
    return statistics.median(one / other for one, other in pairs)


def best_of(rates: Mapping[Way, Sequence[float]]) -> Way:
    """Returns the fastest of those that have run the most rounds, or nearly as many."""
    most = max(map(len, rates.values()))
    told = {way: some for way, some in rates.items() if len(some) >= min(most, max(_ROUNDS_TO_TELL, most - 1))}
    first = max(told, key=lambda way: statistics.median(told[way]))
    # The medians of few rounds may be of other moments: of those near the first, the one that wins most rounds.
    near = [way for way in told if ratio(told[way], told[first]) >= 0.9]
    return max(near, key=lambda way: ratio(told[way], told[first]))


def choose(rates: Mapping[Way, Sequence[float]], cost: Callable[[Way], object], good_enough: float = 0.98) -> Way:
    """Returns the way of the least `cost`, whose values can be compared, among those that are about as fast as the
    best."""
    best = best_of(rates)
    near = [
        way
        for way, some in rates.items()
        if len(some) >= len(rates[best]) - 1 and ratio(some, rates[best]) >= good_enough
    ]
    return min(near, key=cost)  # type: ignore[arg-type]
