"""The order of a mixture, compared with plain integers and fractions."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from plain_arithmetic import plain_keys, plain_permute, plain_random_bits, plain_round_keys

from shardio.order.mixture import MAX_TOTAL, Component, MixedOrder, lowest_terms
from shardio.order.orders import Endless, make_order

LARGE = 10**10
SIZES = (7, 10, 3, 25)


def mixture(shares: tuple[int, ...], seed: int = 0, sizes: tuple[int, ...] = SIZES) -> MixedOrder:
    """A mixture of sets of these sizes, whose own orders have the seeds 100, 101 and so on."""
    sizes = sizes[: len(shares)] + (4,) * (len(shares) - len(sizes))
    components = tuple(
        Component({"digest": f"{number}"}, make_order(size, seed=100 + number), 10_000 * number)
        for number, size in enumerate(sizes)
    )
    return MixedOrder(components, seed, lowest_terms(shares))


def plain_turns(shares: tuple[int, ...]) -> list[int]:
    """Tijdeman's algorithm in fractions: of the sets that may come, the one that must come first."""
    total = sum(shares)
    parts = {number: Fraction(share, total) for number, share in enumerate(shares) if share}
    slack = 1 - Fraction(1, 2 * len(parts) - 2) if len(parts) > 1 else Fraction(0)
    counts, turns = dict.fromkeys(parts, 0), []
    for n in range(1, total + 1):
        may = [number for number, part in parts.items() if n * part - counts[number] >= 1 - slack]
        turns.append(
            min(may, key=lambda number: ((slack - n * parts[number] + counts[number]) / parts[number], number))
        )
        counts[turns[-1]] += 1
    return turns


def plain_sets(shares: tuple[int, ...], seed: int, count: int) -> list[int]:
    """The set of each of the first positions: neighbors 2k and 2k + 1 change places if a bit says so and both may."""
    turns = plain_turns(shares) * (count // sum(shares) + 2)
    total, (key,) = sum(shares), plain_keys(b"shardio turns 1", seed, 0, 1)
    for first in range(0, count, 2):
        one, other = turns[first], turns[first + 1]
        n = first + 1
        ahead = turns[: first + 1].count(other) + 1 - Fraction(n * shares[other], total)
        behind = Fraction(n * shares[one], total) - turns[:first].count(one)
        if one != other and ahead < 1 and behind < 1 and plain_random_bits(key, first) % 2:
            turns[first], turns[first + 1] = other, one
    return turns[:count]


def counts_of(sets: np.ndarray, num_sets: int) -> np.ndarray:
    """How many positions each set has had before each position: (n + 1, num_sets)."""
    return np.concatenate([np.zeros((1, num_sets), int), np.cumsum(sets[:, None] == np.arange(num_sets), axis=0)])


@pytest.mark.parametrize("num_sets", [1, 2, 3, 4])
def test_every_small_mixture_is_that_of_the_plain_model(num_sets: int) -> None:
    for shares in product(range(5 if num_sets < 4 else 4), repeat=num_sets):
        if any(shares):
            shares = lowest_terms(shares)
            seed = sum(shares)
            sets, _ = mixture(shares, seed).locate(np.arange(30))
            assert sets.tolist() == plain_sets(shares, seed, 30), shares


def test_after_any_number_of_positions_from_its_start_each_set_has_had_its_share_to_within_one() -> None:
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    for _ in range(300):
        shares = lowest_terms(
            [rng.choice((0, 1, 1, 2, 5, 10, rng.randint(1, 90))) for _ in range(rng.randint(0, 9))] + [1]
        )
        start = rng.choice((0, rng.randrange(300)))
        before = tuple(rng.randrange(300) if start else 0 for _ in shares)
        total, order = sum(shares), replace(mixture(shares, rng.randrange(2**64)), start=start, before=before)
        sets, ordinals = order.locate(np.arange(start, start + 4 * total + 3))
        counts = counts_of(sets, len(shares))
        away = abs(counts * total - np.arange(len(counts))[:, None] * np.array(shares))
        assert (away < total).all(), (seed, shares)
        for number, first in enumerate(before):
            assert ordinals[sets == number].tolist() == list(range(first, first + counts[-1, number])), (seed, shares)
        position = rng.randrange(len(counts))
        assert order.delivered(start + position) == tuple((before + counts[position]).tolist()), (seed, shares)


def test_each_set_follows_its_own_order_however_the_others_come() -> None:
    sets = mixture((10, 5, 1)).components
    expected = [Endless(one.order)(0, np.arange(500)) + one.start for one in sets]
    for shares, seed in product(((10, 5, 1), (1, 1, 1), (0, 3, 5)), (0, 9)):
        found = mixture(shares, seed)(0, np.arange(400))
        for number, own in enumerate(expected):
            mine = found[found // 10_000 == number]
            assert mine.tolist() == own[: len(mine)].tolist()
        passes = Counter(found[found // 10_000 == 1].tolist())
        assert max(passes.values()) - min(passes.values()) <= 1


def test_places_far_out_are_exact() -> None:
    order = mixture((10, 5, 1), 3, (LARGE, 7, LARGE + 1))
    for first in (LARGE, 2**60, 2**62 - 64):
        positions = np.arange(first, first + 48)
        sets, ordinals = order.locate(positions)
        delivered = order.delivered(first)
        assert all(abs(count * 16 - first * share) < 16 for count, share in zip(delivered, (10, 5, 1), strict=True))
        assert sum(delivered) == first
        for number, size in enumerate((LARGE, 7, LARGE + 1)):
            mine = ordinals[sets == number].tolist()
            assert mine == list(range(delivered[number], delivered[number] + len(mine)))
            own = [plain_permute(o % size, size, plain_round_keys(100 + number, o // size)) for o in mine]
            assert order(0, positions)[sets == number].tolist() == [10_000 * number + index for index in own]
    with pytest.raises(ValueError, match="positions must be from 0"):
        order(0, np.array([2**62]))


@pytest.mark.parametrize(
    ("shares", "seed", "expected"),
    [
        ((1, 1), 0, "1010101001101001011001010101101001101001"),
        ((10, 5, 1), 7, "0100100100120001100001010012001010001001"),
        ((3, 3, 2, 1), 2**63, "1020130210121023100120130210121023101020"),
    ],
)
def test_mixtures_are_what_they_have_always_been(shares: tuple[int, ...], seed: int, expected: str) -> None:
    assert "".join(map(str, mixture(shares, seed).locate(np.arange(40))[0].tolist())) == expected


# --- other shares, more and fewer sets --------------------------------------------------------------------------------


def test_a_stream_goes_on_with_more_sets_fewer_sets_and_other_shares() -> None:
    whole = mixture((3, 2, 1, 2))
    sets = whole.components

    def of(numbers: tuple[int, ...], shares: tuple[int, ...]) -> MixedOrder:
        return MixedOrder(tuple(sets[number] for number in numbers), 0, lowest_terms(shares))

    position, read = 0, Counter[int]()
    order = of((0, 1), (3, 2))
    for numbers, shares in [((0, 1), (3, 2)), ((0, 1, 2), (3, 2, 1)), ((2, 0), (1, 1)), ((3, 1, 0, 2), (1, 1, 1, 5))]:
        state = order.describe_sets()
        order = of(numbers, shares).resumed(state, position)
        for number in numbers:
            if number not in {int(one["digest"]) for one in state["sets"]}:
                read[number] = 0  # a set that was left out begins anew
        before, there = dict(read), order(0, np.arange(position, position + 90))
        for number in numbers:
            mine = there[there // 10_000 == number] - sets[number].start
            own = Endless(sets[number].order)(0, np.arange(before.get(number, 0), before.get(number, 0) + len(mine)))
            assert mine.tolist() == own.tolist()
            read[number] += len(mine)
        position += 90
    again = order.resumed(order.describe_sets(), position)
    assert (
        again(0, np.arange(position, position + 50)).tolist() == order(0, np.arange(position, position + 50)).tolist()
    )
    with pytest.raises(ValueError, match="shares"):
        order(0, np.array([0]))


GOOD: dict[str, Any] = mixture((2, 1)).describe_sets()


@pytest.mark.parametrize(
    "told",
    [
        {},
        {**GOOD, "since": 11},
        {**GOOD, "since": -1},
        {**GOOD, "since": 0.0},
        {**GOOD, "sets": None},
        {**GOOD, "sets": []},
        {**GOOD, "sets": [3]},
        {**GOOD, "sets": [{"share": 1}]},
        {**GOOD, "sets": [{**one, "share": 2} for one in GOOD["sets"]]},
        {**GOOD, "sets": [{**one, "before": -1} for one in GOOD["sets"]]},
        {**GOOD, "sets": [{**one, "before": 2**70} for one in GOOD["sets"]]},
        {**GOOD, "sets": [{**one, "share": True} for one in GOOD["sets"]]},
    ],
)
def test_states_that_no_mixture_has_told_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the state of a mixture must have"):
        mixture((2, 1)).resumed(told, 10)


def test_a_set_whose_content_has_changed_is_refused() -> None:
    sets = [{**one, "digest": one["digest"].replace("1", "other")} for one in GOOD["sets"]]
    with pytest.raises(ValueError, match=r"belongs to other sets: it has .*'other'"):
        mixture((2, 1)).resumed({**GOOD, "sets": sets}, 10)


# --- shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((10, 5, 1), (10, 5, 1)),
        ((10, 20), (1, 2)),
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((1e-3, 1), (1, 1000)),
        ((Fraction(1, 3), 1), (1, 3)),
        ((np.float64(0.25), np.int64(2)), (1, 8)),
        ((0, 4), (0, 1)),
    ],
)
def test_shares_are_whole_numbers_in_lowest_terms(shares: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    assert lowest_terms(shares) == expected


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ((), "at least 0"),
        ((0, 0), "not all 0"),
        ((-1, 2), "at least 0"),
        ((float("nan"), 1), "numbers"),
        ((float("inf"), 1), "numbers"),
        (("a", 1), "numbers"),
        ((None, 1), "numbers"),
        ((MAX_TOTAL, 1), "round"),
        ((0.123456789, 1), "round"),
    ],
)
def test_shares_that_are_none_are_refused(shares: tuple[Any, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        lowest_terms(shares)


def test_memory_does_not_grow_with_the_sets_or_the_positions() -> None:
    order = mixture((4000, 1), sizes=(LARGE, LARGE))
    order(0, np.arange(2**61, 2**61 + 256))
    tracemalloc.start()
    try:
        for first in range(0, 2**61, 2**57):
            order(0, np.arange(first, first + 256))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
