"""What transforms draw: the steps and boxes that they note for many samples, without any pixel; and what numbers are.

Bounds are such that right numbers pass with a probability of more than 1 - 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform

MOST_DEVIATIONS = 5.5


def noted(
    transform: Transform, count: int, shape: tuple[int, int, int] = (3, 16, 16), seed: int = 1, **names: int
) -> Batch:
    """Returns a batch of `count` samples whose pictures are one and the same, after `transform`."""
    images = torch.zeros(1, *shape, dtype=torch.uint8).expand(count, -1, -1, -1)
    sizes = np.tile(np.array(shape[1:]), (count, 1))
    draws = Draws(**{"seed": seed, "epoch": 2, "counters": np.arange(count), **names})  # type: ignore[arg-type]
    return transform.apply(Batch(images, draws, sizes), type(transform).__name__)


def assert_uniform(values: ArrayLike, low: float = 0.0, high: float = 1.0) -> None:
    values = np.asarray(values)
    assert values.min() >= low
    assert values.max() <= high
    assert_distributed((values - low) / (high - low), "uniform")


def assert_distributed(values: ArrayLike, law: Any) -> None:
    from scipy import stats

    assert stats.kstest(np.asarray(values), law).pvalue > 1e-7


def assert_share(chosen: ArrayLike, p: float) -> None:
    """Asserts that each is chosen with probability `p`."""
    chosen = np.asarray(chosen)
    assert chosen.dtype == bool
    assert abs(chosen.mean() - p) <= MOST_DEVIATIONS * math.sqrt(p * (1 - p) / chosen.size)


def assert_shares(numbers: ArrayLike, shares: Sequence[float]) -> None:
    """Asserts that whole numbers from 0 are as frequent as `shares`, whose sum is 1; some of these may be 0."""
    from scipy import stats

    counts = np.bincount(np.asarray(numbers), minlength=len(shares))
    assert len(counts) == len(shares)
    possible = np.array(shares) > 0
    assert not counts[~possible].any()
    if possible.sum() == 1:
        return
    assert stats.chisquare(counts[possible], np.array(shares)[possible] * counts.sum()).pvalue > 1e-7


def assert_independent(*rows: ArrayLike) -> None:
    """Asserts that no two rows are correlated, and no number with the one before it in its row."""
    table = np.stack([np.asarray(row, np.float64) for row in rows])
    most = MOST_DEVIATIONS / math.sqrt(table.shape[1] - 1)
    if len(table) > 1:
        assert np.abs(np.corrcoef(table) - np.eye(len(table))).max() < most
    for row in table:
        assert abs(np.corrcoef(row[1:], row[:-1])[0, 1]) < most
