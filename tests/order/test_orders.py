"""Every order follows its definition, at any position at any time, and stays the same for ever."""

from __future__ import annotations

import json
import math
import tracemalloc
from bisect import bisect_right
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import torch
from plain_arithmetic import (
    plain_inverse,
    plain_keys,
    plain_permute,
    plain_random_bits,
    plain_round_keys,
    plain_uniform,
)

import shardio.order.orders
from shardio.order.orders import (
    BlockOrder,
    BlockShuffle,
    GlobalShuffle,
    Order,
    StoredOrder,
    Subset,
    WeightedDraws,
    make_order,
)
from shardio.order.permutation import Permutation

SMALL = list(product((*range(1, 17), 24, 31, 40), (1, 2, 3, 5, 9), (1, 2, 3, 5)))
"""(num_samples, block_size, window_blocks)."""
LARGE = [2**62, 2**62 - 1, 2**62 - 63, 2**61 + 1]

# (num_samples, seed, epoch, block_size, window_blocks) -> the first and the last numbers of the order. Never to be
# rewritten: a training run that is taken up again depends on them.
GOLDEN_BLOCKS: dict[tuple[int, int, int, int, int], tuple[list[int], list[int]]] = {
    (10, 0, 0, 32, 256): ([0, 8, 1, 6, 2], [9, 7, 5, 4, 3]),
    (10, 0, 0, 3, 2): ([9, 5, 3, 4, 2], [1, 7, 8, 6, 0]),
    (10, 7, 3, 32, 256): ([0, 5, 6, 4, 3], [1, 8, 7, 2, 9]),
    (10, 7, 3, 3, 2): ([7, 8, 6, 9, 4], [1, 5, 2, 0, 3]),
    (1000, 0, 0, 32, 256): ([650, 589, 327, 372, 973], [796, 493, 976, 562, 934]),
    (1000, 0, 0, 10, 7): ([454, 453, 114, 924, 110], [630, 637, 390, 635, 900]),
    (1000, 7, 3, 32, 256): ([581, 252, 279, 960, 951], [728, 690, 808, 199, 852]),
    (1000, 7, 3, 10, 7): ([460, 419, 468, 597, 37], [717, 330, 765, 719, 103]),
    (1281167, 0, 0, 32, 256): ([935082, 255999, 1006553, 734942, 721530], [817956, 59900, 95802, 747857, 1221667]),
    (1281167, 0, 0, 10, 7): ([407214, 407213, 127344, 587394, 127340], [122438, 122435, 1105835, 122432, 266016]),
    (1281167, 7, 3, 32, 256): ([735879, 86767, 364933, 1120150, 1046109], [124817, 738513, 59277, 1129568, 290971]),
    (1281167, 7, 3, 10, 7): ([246440, 1174659, 246448, 139617, 1061007], [583960, 583969, 469759, 956493, 1280918]),
    (10**10, 0, 0, 32, 256): (
        [9261163914, 5561217887, 9305696985, 2789139806, 1206186202],
        [3261738780, 2577668365, 351871475, 8046776631, 3302096144],
    ),
    (10**10, 0, 0, 10, 7): (
        [7227400714, 7227400713, 241747364, 6522887764, 241747360],
        [4374288608, 8632618006, 4555261668, 7831622346, 4374288606],
    ),
    (10**10, 7, 3, 32, 256): (
        [3779784967, 8808170063, 9489174693, 3207658742, 2899812477],
        [3119005480, 8902315578, 1641017696, 7057193292, 8152754972],
    ),
    (10**10, 7, 3, 10, 7): (
        [3027642240, 8988630519, 3027642248, 6288927357, 5976072707],
        [742837562, 3724183252, 4691822312, 4691822313, 7039297167],
    ),
}

# (number of weights, seed, epoch, num_draws) -> the first and the last draws, where sample i weighs i % 7.
GOLDEN_DRAWS: dict[tuple[int, int, int, int], tuple[list[int], list[int]]] = {
    (10, 0, 0, 10): ([4, 6, 9, 1, 5], [8, 5, 4, 6, 4]),
    (10, 7, 3, 10**10): ([4, 8, 4, 6, 1], [8, 4, 6, 6, 8]),
    (1000, 0, 0, 1000): ([384, 807, 927, 19, 432], [794, 682, 143, 683, 530]),
    (1000, 7, 3, 50): ([397, 894, 349, 734, 37], [53, 962, 864, 422, 832]),
    (1281167, 0, 0, 1281167): ([492351, 1033275, 1186681, 22762, 553670], [772594, 902921, 947847, 1070745, 926386]),
    (1281167, 7, 3, 10**10): ([508835, 1144804, 448137, 940293, 45961], [1159443, 528594, 1031832, 885972, 1140577]),
}


def whole(order: Order, epoch: int = 0) -> np.ndarray:
    return order(epoch, np.arange(order.num_samples))


def even_cuts(num_blocks: int, window_blocks: int) -> list[int]:
    """How many blocks each window has."""
    num_windows = -(-num_blocks // window_blocks)
    return [len(part) for part in np.array_split(np.arange(num_blocks), num_windows)]


def window_keys(seed: int, epoch: int, window: int) -> list[int]:
    return [plain_random_bits(key, window) for key in plain_round_keys(seed, epoch, "window")]


def plain_block_shuffle(n: int, seed: int, epoch: int, block_size: int, window_blocks: int) -> list[int]:
    """The definition once more, with lists."""
    samples = list(range(n))
    stored = [samples[i : i + block_size] for i in range(0, n, block_size)]
    keys = plain_round_keys(seed, epoch)
    blocks = [stored[plain_permute(place, len(stored), keys)] for place in range(len(stored))]
    order = []
    for window, count in enumerate(even_cuts(len(blocks), window_blocks)):
        inside = [sample for block in blocks[:count] for sample in block]
        del blocks[:count]
        theirs = window_keys(seed, epoch, window)
        order += [inside[plain_permute(i, len(inside), theirs)] for i in range(len(inside))]
    return order


def plain_block_sample(n: int, seed: int, epoch: int, block_size: int, window_blocks: int, position: int) -> int:
    """One number of `plain_block_shuffle`, in integers that cannot overflow, for any n."""
    num_blocks = -(-n // block_size)
    keys = plain_round_keys(seed, epoch)
    lacking = num_blocks * block_size - n
    place_of_short = plain_inverse(num_blocks - 1, num_blocks, keys)
    num_windows = -(-num_blocks // window_blocks)

    def begin_of_block(place: int) -> int:
        return place * block_size - (lacking if place > place_of_short else 0)

    def begin_of_window(window: int) -> int:
        longer = num_blocks % num_windows
        return begin_of_block(window * (num_blocks // num_windows) + min(window, longer))

    window = bisect_right(range(num_windows), position, key=begin_of_window) - 1
    begin, end = begin_of_window(window), begin_of_window(window + 1)
    position = begin + plain_permute(position - begin, end - begin, window_keys(seed, epoch, window))
    place = bisect_right(range(num_blocks), position, key=begin_of_block) - 1
    return plain_permute(place, num_blocks, keys) * block_size + position - begin_of_block(place)


def plain_draws(weights: list[float], seed: int, epoch: int, positions: list[int]) -> list[int]:
    """The definition once more, with lists."""
    (key,) = plain_keys(b"shardio weighted 1", seed, epoch, 1)
    # Scaled by the power of two that brings the largest into [1/2, 1): neither too large nor too small to be added up.
    ends = list(accumulate(math.ldexp(weight, -math.frexp(max(weights))[1]) for weight in weights))
    return [bisect_right(ends, plain_uniform(key, position) * ends[-1]) for position in positions]


# Blocks and windows.


def test_every_small_block_order_is_its_definition_with_lists() -> None:
    for number, (n, block_size, window_blocks) in enumerate(SMALL):
        seed, epoch = number % 97, number % 5
        found = whole(BlockOrder(n, seed, BlockShuffle(block_size, window_blocks)), epoch)
        assert found.dtype == np.int64
        expected = plain_block_shuffle(n, seed, epoch, block_size, window_blocks)
        assert found.tolist() == expected, (n, seed, epoch, block_size, window_blocks)


@pytest.mark.parametrize("n", [*LARGE, 10**10 + 1, 10**10, 1281167, 1000, 10])
def test_block_orders_are_their_definition_in_plain_integers(n: int) -> None:
    sizes = [(1, 1), (1, 128), (1, 2**62), (64, 1), (64, 128), (64, 2**62), (3, 2**70), (2**31 + 1, 2**30)]
    sizes += [(2**61 + 1, 1), (2**61 + 1, 2), (2**62 - 1, 1), (2**62 - 1, 2), (2**62, 1), (2**70, 2**70)]
    sizes += [(64, 128), (2, 1)]
    for epoch, (block_size, window_blocks) in enumerate(sizes):
        positions = [0, 1, n // 3, n // 2, n - 2, n - 1, *np.random.default_rng(5).integers(0, n, 10).tolist()]
        if block_size >= n:
            expected = [plain_permute(position, n, window_keys(5, epoch, 0)) for position in positions]
        else:
            num_blocks = -(-n // block_size)
            place = plain_inverse(num_blocks - 1, num_blocks, plain_round_keys(5, epoch))
            end = (place + 1) * block_size - (num_blocks * block_size - n)  # of the short block
            positions += [position for position in range(end - 3, end + 3) if 0 <= position < n]
            expected = [plain_block_sample(n, 5, epoch, block_size, window_blocks, position) for position in positions]
        order = BlockOrder(n, 5, BlockShuffle(block_size, window_blocks))
        assert order(epoch, np.array(positions)).tolist() == expected, order


def test_the_block_order_is_what_it_has_always_been() -> None:
    for (n, seed, epoch, block_size, window_blocks), (first, last) in GOLDEN_BLOCKS.items():
        order = BlockOrder(n, seed, BlockShuffle(block_size, window_blocks))
        assert order(epoch, np.arange(len(first))).tolist() == first
        assert order(epoch, np.arange(n - len(last), n)).tolist() == last


@pytest.mark.parametrize(
    "order",
    [
        GlobalShuffle(2**62, 0),
        *(BlockOrder(10**10, 0, BlockShuffle(*sizes)) for sizes in ((32, 256), (1, 1), (1, 10_000), (10**9, 3))),
        WeightedDraws(np.arange(100), 0, 2**62),
    ],
)
def test_memory_does_not_grow_with_the_set(order: Order) -> None:
    n = order.num_samples
    for positions in (np.linspace(0, n * 0.9, 256).astype(np.int64), np.arange(n - 256, n), np.array([0, n - 1])):
        tracemalloc.start()
        try:
            found = order(1, positions)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert order.redraws or len(set(found.tolist())) == len(positions)
        assert peak < 2 << 20


# Positions in any company.


ORDERS: dict[str, Order] = {
    "stored": StoredOrder(1000),
    "global": GlobalShuffle(1000, 3),
    "block": BlockOrder(1000, 3, BlockShuffle(7, 5)),
    "block, ones": BlockOrder(1000, 3, BlockShuffle(1, 1)),
    "block, default": BlockOrder(1000, 3),
    "block, short": BlockOrder(1000, 3, BlockShuffle(999, 1)),
    "weighted": WeightedDraws(np.arange(37.0) % 5, 3, 1000),
    "subset": Subset(BlockOrder(1000, 3, BlockShuffle(16, 3)), np.random.default_rng(6).permutation(1000) * 5),
    "weighted subset": Subset(WeightedDraws(np.arange(1.0, 38), 3, 1000), np.arange(37) * 3),
}
each_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@each_order
def test_positions_give_the_same_in_any_company(order: Order) -> None:
    rng = np.random.default_rng(7)
    for epoch in (0, 2**64 - 1):
        expected = whole(order, epoch)
        chosen = [
            np.arange(1000)[::-1],
            rng.permutation(1000),
            rng.integers(0, 1000, 3000),  # with repeats, and more of them than samples
            np.array([999, 0, 999]),
            *(np.arange(rank, 1000, 8) for rank in range(8)),
            *(np.arange(begin, min(begin + 33, 1000)) for begin in range(0, 1000, 33)),
            *(rng.integers(0, 1000, size) for size in rng.integers(1, 40, 20)),
        ]
        for positions in chosen:
            assert np.array_equal(order(epoch, positions), expected[positions]), (epoch, positions)
    alone = [order(1, np.array([position])).item() for position in range(0, 1000, 9)]
    assert alone == whole(order, 1)[::9].tolist()
    found = order(0, np.array([], np.int64))
    assert (found.dtype, found.shape) == (np.int64, (0,))


@each_order
def test_positions_are_only_read_and_refused_outside_of_the_epoch(order: Order) -> None:
    for position in (-1, 1000, 1001, -(2**63), 2**63 - 1):
        for positions in ([position], [3, position, 4]):
            with pytest.raises(ValueError, match=r"positions must be from 0 to 999; found"):
                order(0, np.array(positions))
    positions = np.arange(1000)[::-1]
    positions.flags.writeable = False
    expected = whole(order, 4)[::-1]
    found = order(4, positions)
    assert found.dtype == np.int64
    assert np.array_equal(found, expected)
    assert positions.tolist() == list(range(999, -1, -1))


# Weighted draws.


AWKWARD: dict[str, list[float]] = {
    "tenths": [0.1] * 10,
    "thirds": [1 / 3] * 7,
    "one": [1.0],
    "tiny one": [1e-300],
    "huge one": [1.7e308],
    "huge": [8e307, 9e307],
    "all magnitudes": [10.0**exponent for exponent in range(-300, 300, 7)],
    "all magnitudes, falling": [10.0**exponent for exponent in range(300, -300, -7)],
    "below two to the minus 1021": [2.0**-1022, math.nextafter(2.0**-1022, 0)],
    "just above a power of two": [math.nextafter(1, 2)],
    "just below a power of two": [math.nextafter(1, 0)],
    "zeros around": [0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0],
    "minus zero": [-0.0, 1.0, -0.0],
    "absorbed at the end": [1e20, 1.0, 1.0],
    # Products of these with numbers below one would round up to themselves.
    "smallest": [5e-324],
    "smallest, zeros around": [0.0, 5e-324, 0.0],
    "ten of the smallest": [5e-324] * 10,
    "subnormal": [1e-310, 2e-310],
    "smallest normal": [2.0**-1022],
    # Sums of these would be infinite.
    "two huge": [1e308, 1e308],
    "five of the largest": [math.nextafter(math.inf, 0)] * 5,
    "largest and smallest": [math.nextafter(math.inf, 0), 5e-324, 0.0, 5e-324],
    "smallest and largest": [0.0, 5e-324, math.nextafter(math.inf, 0)],
}


def test_draws_are_their_definition_with_lists() -> None:
    rng = np.random.default_rng(11)
    cases = [*AWKWARD.values()]
    cases += [(rng.random(int(rng.integers(1, 300))) ** 9 * (rng.random() < 2)).tolist() for _ in range(20)]
    cases += [np.exp(rng.normal(0, 50, 100)).tolist() for _ in range(20)]
    for seed, weights in enumerate(cases):
        order = WeightedDraws(np.array(weights), seed, 2**62)
        positions = [*range(50), *rng.integers(0, 2**62, 50).tolist(), 2**62 - 1]
        found = order(seed + 1, np.array(positions))
        assert found.dtype == np.int64
        assert found.tolist() == plain_draws(weights, seed, seed + 1, positions), weights


def test_no_number_below_one_draws_past_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    numbers = np.array([1 - 2.0**-53, 0.0, 0.5, 2.0**-53])
    monkeypatch.setattr(shardio.order.orders, "uniform", lambda key, counters: numbers.copy())
    totals = [rng.random(int(rng.integers(1, 20))) * 2.0 ** int(rng.integers(-1000, 1000)) for _ in range(2000)]
    for weights in [*AWKWARD.values(), *(np.append(some, [0, 0]).tolist() for some in totals)]:
        found = WeightedDraws(np.asarray(weights), 0, 4)(0, np.arange(4)).tolist()
        assert max(found) < len(weights), weights
        assert all(weights[sample] > 0 for sample in found), weights


NUMBERS = [0, 3, 1, 0, 7, 2, 255, 1]


@pytest.mark.parametrize("name", ["weights", "indices"])
def test_weights_and_indices_may_be_of_any_kind(name: str) -> None:
    kinds: list[Any] = [np.uint8, np.int32, np.int64, np.uint64, ">i4", ">i8", torch.uint8, torch.int32, torch.int64]
    if name == "weights":
        kinds += [np.float16, np.float32, np.float64, ">f8", torch.float32, torch.float64]
    arrays: list[Any] = [
        torch.tensor(NUMBERS, dtype=kind) if isinstance(kind, torch.dtype) else np.array(NUMBERS, kind)
        for kind in kinds
    ]
    size = len(NUMBERS) if name == "weights" else 256
    given = [NUMBERS, tuple(NUMBERS), *arrays, np.repeat(np.array(NUMBERS, np.int64), 3)[::3]]
    orders = [make_order(size, **{name: values}) for values in given]  # type: ignore[arg-type]
    expected, description = whole(orders[0]), orders[0].describe()
    for array in arrays:
        array[:] = 1  # the caller's own
    assert orders[0].num_samples == len(NUMBERS)
    for order in orders:
        assert np.array_equal(whole(order), expected)
        assert order.describe() == description


def test_the_draws_are_what_they_have_always_been() -> None:
    for (size, seed, epoch, num_draws), (first, last) in GOLDEN_DRAWS.items():
        order = WeightedDraws(np.arange(size) % 7, seed, num_draws)
        assert order(epoch, np.arange(len(first))).tolist() == first
        assert order(epoch, np.arange(num_draws - len(last), num_draws)).tolist() == last


# Options of a user.


def test_options_make_the_order_they_name() -> None:
    assert make_order(10) == GlobalShuffle(10, 0)
    assert make_order(10, shuffle=True, seed=5) == GlobalShuffle(10, 5)
    assert make_order(10, shuffle=False, seed=5) == StoredOrder(10)
    assert make_order(10, shuffle=BlockShuffle(3), seed=5) == BlockOrder(10, 5, BlockShuffle(3, 256))
    assert make_order(10, shuffle=BlockShuffle(window=3)) == BlockOrder(10, 0, BlockShuffle(32, 3))
    assert make_order(2**62, seed=2**64 - 1) == GlobalShuffle(2**62, 2**64 - 1)
    assert whole(make_order(10, shuffle=False), 3).tolist() == list(range(10))
    assert np.array_equal(whole(make_order(10, seed=4), 3), Permutation(10, 4, 3)(np.arange(10)))
    assert isinstance(make_order(10, weights=[1] * 10), WeightedDraws)
    assert isinstance(make_order(10, indices=[1]), Subset)
    assert whole(make_order(10, shuffle=False, indices=range(3, 9, 2))).tolist() == [3, 5, 7]


def orders_of(size: int) -> dict[str, dict[str, Any]]:
    return {
        "stored": {"shuffle": False},
        "global": {"shuffle": True, "seed": 3},
        "block": {"shuffle": BlockShuffle(3, 2), "seed": 3},
        "weighted": {"weights": np.arange(size) % 3 + 1, "seed": 3},
    }


@pytest.mark.parametrize("name", orders_of(1))
def test_a_subset_is_the_order_of_as_many_samples_under_other_names(name: str) -> None:
    for indices in ([0], [99], [5, 3, 8], list(range(0, 100, 7)), [99, 0, 50, 1] * 3, list(range(100))):
        options = orders_of(len(indices))[name]
        subset, numbers = make_order(100, indices=indices, **options), make_order(len(indices), **options)
        assert subset.num_samples == numbers.num_samples
        for epoch in range(3):
            found = whole(subset, epoch)
            assert found.dtype == np.int64
            assert found.tolist() == [indices[number] for number in whole(numbers, epoch).tolist()]


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"shuffle": value}, "shuffle must be True") for value in ("global", "", None, 2, b"block", 0.5)),
    *(({"shuffle": value, "weights": [1] * 10}, "weights draw") for value in (False, "block", BlockShuffle(2))),
    *(({"seed": seed, **more}, "seed") for seed in (-1, 2**64) for more in ({}, {"shuffle": False})),
    *(
        ({"weights": [*weights, *[0] * (10 - len(weights))]}, "weights must be finite")
        for weights in ([math.nan, 1], [1, math.inf], [-math.inf, 1], [-1, 5], [1, -1e-300], [0], [-0.0])
    ),
    *(({"weights": weights}, "expected 10 weights") for weights in (3.0, [], [1] * 9, [1] * 11, np.ones((10, 1)))),
    ({"weights": [1] * 10, "indices": [3, 4]}, "expected 2 weights"),
    ({"weights": np.ma.masked_equal(np.arange(10), 3)}, r"weights.* mask.*filled\(0\)"),
    ({"indices": np.ma.masked_equal(np.arange(10), 3)}, r"indices.* mask.*compressed\(\)"),
    *(
        ({"indices": mask}, r"np\.flatnonzero")
        for mask in (np.ones(10, bool), [True, False] * 5, np.ones((2, 5), bool))
    ),
    *(
        ({"indices": indices}, "indices must be a one-dimensional")
        for indices in ([], 3, [[1, 2]], [1.0], [math.nan], ["1"], "12", [2**70], {1})
    ),
    *(
        ({"indices": indices}, f"from 0 to 9; found {min(indices)} to {max(indices)}$")
        for indices in ([-1], [10], [3, -1, 4], [2**63 - 1], np.array([2**64 - 1], np.uint64), np.array([-1], np.int8))
    ),
]


@pytest.mark.parametrize(("options", "word"), REFUSED, ids=str)
def test_options_that_make_no_order_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make_order(10, **options)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_sizes_of_blocks_are_integers_from_one_on(value: Any, error: type[Exception]) -> None:
    assert BlockShuffle() == BlockShuffle(32, 256)
    for name in ("size", "window"):
        with pytest.raises(error, match=name):
            BlockShuffle(**{name: value})


# Descriptions of orders.


# What else is described, the last test of this file has.
DIFFERENT: list[dict[str, Any]] = [
    {},
    {"weights": [1] * 10},
    {"weights": [1] * 9 + [2]},
    {"weights": [2] + [1] * 9},
    {"weights": [1] * 9 + [math.nextafter(1, 2)]},
    {"indices": range(10)},
    {"indices": [*range(9), 8]},
    {"indices": [1, 0, *range(2, 10)]},
    {"indices": range(9)},
    {"indices": range(10), "weights": [1] * 10},
    {"indices": range(10), "weights": [1] * 9 + [2]},
]


def test_descriptions_are_equal_only_for_equal_orders() -> None:
    descriptions = [json.dumps(make_order(10, **options).describe(), sort_keys=True) for options in DIFFERENT]
    assert len(set(descriptions)) == len(DIFFERENT)
    for options in DIFFERENT:
        order, same = (make_order(10, **options) for _ in range(2))
        description = order.describe()
        assert description == same.describe() == json.loads(json.dumps(description))
        assert np.array_equal(whole(order, 3), whole(same, 3))
        assert description["num_samples"] == order.num_samples
        description["num_samples"] = -1  # the caller's own
        assert order.describe() == same.describe()


def test_what_does_not_change_the_order_is_not_described() -> None:
    assert make_order(10, indices=[1, 2]).describe() == make_order(11, indices=[1, 2]).describe()
    assert make_order(10, shuffle=False, seed=1).describe() == make_order(10, shuffle=False, seed=2).describe()


def test_descriptions_of_weights_and_indices_are_what_they_have_always_been() -> None:
    described = make_order(10, indices=[5, 3, 8], weights=[1, 2, 0.5], seed=7).describe()
    assert described == {
        "shuffle": True,
        "seed": 7,
        "num_samples": 3,
        "weights": "29a1e8c491fd6ff45e2fe4ded5f2ab7a",
        "indices": "6aa6b0e6634627c596379b06528ff4e5",
    }
    assert make_order(10, shuffle=BlockShuffle(3, 2), seed=7).describe() == {
        "shuffle": "block",
        "seed": 7,
        "num_samples": 10,
        "block_size": 3,
        "window_blocks": 2,
    }
    assert make_order(10, seed=7).describe() == {"shuffle": True, "seed": 7, "num_samples": 10}
    assert make_order(10, shuffle=False, seed=7).describe() == {"shuffle": False, "num_samples": 10}
