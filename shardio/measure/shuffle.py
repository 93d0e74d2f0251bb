"""The quality of a shuffle: statistics of its orders, each beside that of a true random permutation.

Expectations and variances are those of a uniformly random permutation, exact unless said otherwise, so that z is about
normal for a good shuffle. Short orders are taken whole over many epochs, very long ones at random positions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.order.orders import Order

# An order of more positions is sampled at random; one of fewer than the second number is looked at for more epochs.
_MOST_WHOLE = 1 << 22
_ENOUGH = 1 << 20
_MOST_EPOCHS = 1 << 10
_LOW_VALUES = 16
_SHORT_CYCLE = 64
_MOST_BATCHES = 1 << 11
_LEAST_RANDOM_EPOCHS = 48

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Statistic:
    """A statistic as found and as true randomness has it. `z` is the difference in true standard deviations."""

    name: str
    found: float
    expected: float
    z: float


class _Sums(NamedTuple):
    """Sums over independent epochs, or one sample of positions: as found, and their expected mean and variance."""

    found: float
    mean: float
    variance: float

    def as_statistic(self, name: str, unit: float) -> Statistic:
        return Statistic(name, self.found / unit, self.mean / unit, (self.found - self.mean) / math.sqrt(self.variance))


def check_shuffle(order: Order, *, batch_size: int | None = None, num_classes: int | None = None) -> list[Statistic]:
    """Returns the statistics of an order of at least 100 samples, and of batches of consecutive positions.

    `num_classes` equal classes are supposed to be stored one after the other, the worst case. The default is 1000, or a
    tenth of the samples if that is less. The default `batch_size` is 256, or half of the samples if that is less.
    """
    n = order.num_samples
    if n < 100:
        raise ValueError(f"expected at least 100 samples, found {n}: statistics of so few say nothing")
    batch_size = min(256, n // 2) if batch_size is None else batch_size
    if not 2 <= batch_size <= n // 2:
        raise ValueError(f"the batch size must be from 2 to {n // 2}, half of the samples; found {batch_size}")
    num_classes = min(1000, n // 10) if num_classes is None else num_classes
    if not 2 <= num_classes <= n // 2:
        raise ValueError(f"the number of classes must be from 2 to {n // 2}, half of the samples; found {num_classes}")
    whole = _of_sampled_positions(order) if is_sampled(n) else _of_whole_orders(order)
    return [*whole, *_of_batches(order, batch_size, num_classes)]


def num_epochs(n: int) -> int:
    """Returns how many epochs of an order of n samples are looked at."""
    return min(_MOST_EPOCHS, max(1, _ENOUGH // n))


def is_sampled(n: int) -> bool:
    """Tells whether positions are drawn, because the whole order of n samples is too long."""
    return n > _MOST_WHOLE


def _of_whole_orders(order: Order) -> Iterator[Statistic]:
    n, epochs = order.num_samples, num_epochs(order.num_samples)
    positions = np.arange(n)
    tests: dict[str, tuple[Callable[[Indices], _Sums], float]] = {
        "serial correlation": (_serial_products, epochs * n),
        "displacement, of n": (_displacements, epochs * n),
        f"low bits by position, chi2 of {(_LOW_VALUES - 1) ** 2}": (_low_bits, epochs),
        "parity changes, of n": (_parity_changes, epochs * n),
        "cycles": (_cycles, epochs),
    }
    sums = {name: np.zeros(3) for name in tests}
    for epoch in range(epochs):
        indices = order(epoch, positions)
        for name, (test, _) in tests.items():
            sums[name] += test(indices)
    for name, (_, unit) in tests.items():
        yield _Sums(*sums[name].tolist()).as_statistic(name, unit)


def _serial_products(indices: Indices) -> _Sums:
    """Sums products of standardised circular neighbours. Moments: Wald, Wolfowitz, Ann. Math. Statist. 14 (1943)."""
    n = len(indices)
    values = (indices - (n - 1) / 2) / math.sqrt((n * n - 1) / 12)
    second, fourth = float(n), float((values**4).sum())
    mean = -second / (n - 1)
    variance = (second**2 - fourth) / (n - 1) + (second**2 - 2 * fourth) / ((n - 1) * (n - 2)) - mean**2
    return _Sums(float(values @ np.roll(values, -1)), mean, variance)


def _displacements(indices: Indices) -> _Sums:
    """Computes Spearman's footrule over n. Moments: Diaconis and Graham, J. R. Statist. Soc. B 39 (1977)."""
    n = len(indices)
    found = float(np.abs(indices - np.arange(n)).sum())
    return _Sums(found / n, (n * n - 1) / 3 / n, (n + 1) * (2 * n * n + 7) / 45 / n**2)


def _low_bits(indices: Indices) -> _Sums:
    """Computes chi-square of position by index, modulo 16; both margins are fixed. The variance is asymptotic."""
    n, k = len(indices), _LOW_VALUES
    table = np.bincount((np.arange(n) % k) * k + indices % k, minlength=k * k).reshape(k, k)
    margin = np.bincount(np.arange(n) % k, minlength=k)
    expected = np.outer(margin, margin) / n
    freedom = (k - 1) ** 2
    return _Sums(float(((table - expected) ** 2 / expected).sum()), freedom * n / (n - 1), 2 * freedom)


def _parity_changes(indices: Indices) -> _Sums:
    """Counts runs of even and odd indices on a circle. Moments: David and Barton, Combinatorial Chance (1962)."""
    n = len(indices)
    even = (n + 1) // 2
    odd = n - even
    found = int(((indices ^ np.roll(indices, -1)) & 1).sum())
    variance = 4 * even * (even - 1) * odd * (odd - 1) / ((n - 1) ** 2 * (n - 2))
    return _Sums(found, 2 * even * odd / (n - 1), variance)


def _cycles(indices: Indices) -> _Sums:
    """Counts the permutation's cycles: a sum of independent indicators with probabilities 1, 1/2, ... 1/n."""
    following = indices.tolist()
    seen = bytearray(len(following))
    found = 0
    for start in range(len(following)):
        if not seen[start]:
            found += 1
            while not seen[start]:
                seen[start] = 1
                start = following[start]
    probabilities = 1 / np.arange(1, len(following) + 1)
    return _Sums(found, float(probabilities.sum()), float((probabilities * (1 - probabilities)).sum()))


def _of_sampled_positions(order: Order) -> Iterator[Statistic]:
    """Computes the same for random positions: so few of all that they are as good as independent."""
    n = order.num_samples
    rng = np.random.default_rng(0)
    positions = rng.integers(0, n - 1, _ENOUGH)
    count = len(positions)
    here, there = order(0, positions), order(0, positions + 1)
    deviation = math.sqrt((n * n - 1) / 12)
    products = ((here - (n - 1) / 2) / deviation) @ ((there - (n - 1) / 2) / deviation)
    yield _Sums(float(products), 0, count).as_statistic("serial correlation", count)
    found = float((np.abs(here - positions) / n).sum())
    yield _Sums(found, count / 3, count / 18).as_statistic("displacement, of n", count)

    k = _LOW_VALUES
    table = np.bincount((positions % k) * k + here % k, minlength=k * k).reshape(k, k)
    expected = table.sum(axis=1, keepdims=True) / k
    freedom = k * (k - 1)
    chi2 = float(((table - expected) ** 2 / expected).sum())
    yield _Sums(chi2, freedom, 2 * freedom).as_statistic(f"low bits by position, chi2 of {freedom}", 1)
    changes = int(((here ^ there) & 1).sum())
    yield _Sums(changes, count / 2, count / 4).as_statistic("parity changes, of n", count)

    starts = positions[: count // 16]
    current, closed = starts, 0
    for _ in range(_SHORT_CYCLE):
        current = order(0, current)
        closed += int((current == starts).sum())
        current, starts = current[current != starts], starts[current != starts]
    # A random start is in a cycle of any length from 1 to n with the same probability.
    rate = count // 16 * _SHORT_CYCLE / n
    yield Statistic(f"cycles up to {_SHORT_CYCLE}", closed, rate, _poisson_z(closed, rate))


def _poisson_z(found: int, rate: float) -> float:
    """Returns the place of `found` in Poisson(rate): in standard deviations if the rate is large, else as a normal
    quantile, where half of the cases of `found` count as below it."""
    if rate > 30 or found > 30:
        return (found - rate) / math.sqrt(rate)
    terms = [math.exp(-rate)]
    for k in range(1, found + 1):
        terms.append(terms[-1] * rate / k)
    above = max(1 - sum(terms) + terms[-1] / 2, 1e-300)
    return -statistics.NormalDist().inv_cdf(above)


def _of_batches(order: Order, batch_size: int, num_classes: int) -> Iterator[Statistic]:
    """Looks at batches here and there in each epoch, and at the samples that are in a batch together.

    The class variance is that of a class's count in a batch, over that of draws without replacement (hypergeometric).
    The spread of its mean over an epoch is measured on epochs that numpy's generator shuffles: batches of one epoch are
    not independent.
    """
    n, epochs = order.num_samples, num_epochs(order.num_samples)
    class_size = -(-n // num_classes)
    shares = np.bincount(np.arange(0, n, class_size) // class_size) * class_size / n
    shares[-1] = 1 - shares[:-1].sum()
    expected = float((shares * (1 - shares)).sum()) * batch_size * (n - batch_size) / (n - 1)

    def mean_variance(batches: Indices) -> float:
        """Returns the squared deviations of the rows' class counts, summed, over those expected."""
        rows = np.arange(len(batches))[:, None] * len(shares)
        counts = np.bincount((rows + batches // class_size).ravel(), minlength=len(batches) * len(shares))
        deviations = counts.reshape(len(batches), -1) - batch_size * shares
        return float((deviations**2).sum() / len(batches) / expected)

    steps = n // batch_size
    count = min(steps, max(1, _MOST_BATCHES // epochs))
    chosen = np.array([step * (steps - 1) // max(1, count - 1) for step in range(count)])  # evenly spread
    positions = (chosen[:, None] * batch_size + np.arange(batch_size)).ravel()
    found, neighbours = [], 0
    for epoch in range(epochs):
        batches = order(epoch, positions).reshape(-1, batch_size)
        found.append(mean_variance(batches))
        neighbours += int((np.diff(np.sort(batches, axis=1), axis=1) == 1).sum())
    rng = np.random.default_rng(0)
    random = []
    for _ in range(max(epochs, _LEAST_RANDOM_EPOCHS)):
        drawn = rng.integers(0, n, len(positions)) if is_sampled(n) else rng.permutation(n)[: len(positions)]
        random.append(mean_variance(drawn.reshape(-1, batch_size)))

    pairs = epochs * count
    rate = pairs * batch_size * (batch_size - 1) / n
    z = _poisson_z(neighbours, rate)
    yield Statistic(f"stored neighbours in a batch of {batch_size}", neighbours / pairs, rate / pairs, z)
    ratio, spread = statistics.fmean(found), statistics.stdev(random) / math.sqrt(epochs)
    # If no shuffle can change the ratio, all epochs are the same but for rounding.
    z = (ratio - 1) / spread if spread > 1e-9 else 0.0
    yield Statistic(f"class variance of a batch of {batch_size}", ratio, 1.0, z)
