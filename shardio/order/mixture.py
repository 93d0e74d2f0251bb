"""The order of a mixture, which reads several sets in fixed shares: position -> (set, sample), for any number of ranks.

Shares are whole numbers, and the sequence of sets repeats after as many positions as the shares add up to: a period.
Tijdeman's algorithm (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980) assigns a set to
each position of the period: after any number of positions n, a set with the share p of all samples has had n * p
samples, to within one. Then neighboring positions where this stays true are swapped or not, as the seed decides.

Users rely on the order: a change of a single number here needs a new VERSION of `shardio.order.permutation`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.order.orders import Endless, Order
from shardio.order.permutation import MAX_N, VERSION, check_below, divide
from shardio.order.rng import make_keys, random_bits

MAX_TOTAL = 1 << 14
"""The maximum sum of the shares in lowest terms: making a mixture computes a whole period."""

Number = int | float | Fraction


def passes_of(order: Order, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Returns how many whole passes over the set's samples come before each position, int64: `epoch`, unless the order
    is endless. Returns None if a sample may come again before all others have come."""
    if isinstance(order, MixedOrder):
        sets, positions = order.locate(positions)
        orders = [component.order for component in order.components]
    elif isinstance(order, Endless):
        sets, orders = np.zeros(len(positions), np.int64), [order.order]
    else:
        return None if order.redraws else np.full(len(positions), epoch)
    if any(each.redraws for each in orders):
        return None
    passes: NDArray[np.int64] = positions // np.array([each.num_samples for each in orders])[sets]
    return passes


def lowest_terms(shares: Sequence[Number]) -> tuple[int, ...]:
    """Returns whole numbers in the same ratio as `shares`, without a common divisor.

    A float counts as the decimal number that it is written as: 0.1 is 1/10. Raises ValueError unless the shares are at
    least 0, not all 0, and the returned numbers add up to at most MAX_TOTAL.
    """
    try:
        exact = [Fraction(str(share)) for share in shares]
    except ValueError:
        exact = []
    if not exact or min(exact) < 0 or not any(exact):
        raise ValueError(f"shares must be numbers of at least 0, not all 0; found {list(shares)}")
    unit = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * unit) for share in exact]
    divisor = math.gcd(*whole)
    if (total := sum(whole) // divisor) > MAX_TOTAL:
        raise ValueError(
            f"shares must have a sum of at most {MAX_TOTAL:,} in lowest terms; found {total:,}: round {list(shares)}"
        )
    return tuple(share // divisor for share in whole)


@dataclass(frozen=True)
class Turns:
    """The sequence of sets in one period of a mixture: `shares[k]` positions of set k, in all an even number."""

    shares: tuple[int, ...]

    @cached_property
    def sets(self) -> NDArray[np.int64]:
        """The number of the set at each position, int64."""
        shares, total = np.array(self.shares, np.int64), sum(self.shares)
        there = np.flatnonzero(shares)
        margin = max(1, 2 * len(there) - 2)
        found = np.zeros(len(shares), np.int64)
        sets = np.empty(total, np.int64)
        for place in range(total):
            # In units of 1 / total: how far each set lags behind its share, this position included.
            lag = (place + 1) * shares[there] - total * found[there]
            deadline = np.where(lag * margin >= total, ((total - lag) * margin - total) / shares[there], np.inf)
            sets[place] = there[deadline.argmin()]
            found[sets[place]] += 1
        return sets

    @cached_property
    def ordinals(self) -> NDArray[np.int64]:
        """For each position of `sets`, how many earlier positions belong to the same set, int64."""
        ordinals = np.empty_like(self.sets)
        for number in range(len(self.shares)):
            some = np.flatnonzero(self.sets == number)
            ordinals[some] = np.arange(len(some))
        return ordinals

    @cached_property
    def may_change(self) -> NDArray[np.bool_]:
        """For each pair of positions 2k and 2k + 1, whether they may be swapped, bool. They may if they belong to
        different sets and, once swapped, both sets stay within one sample of their shares."""
        first, second = self.sets[::2], self.sets[1::2]
        shares, total = np.array(self.shares, np.int64), sum(self.shares)
        num_positions = np.arange(1, len(self.sets), 2)
        # In units of 1 / total, how far each would be ahead of, or behind, its share.
        ahead = (self.ordinals[1::2] + 1) * total - num_positions * shares[second]
        behind = num_positions * shares[first] - self.ordinals[::2] * total
        free: NDArray[np.bool_] = (first != second) & (ahead < total) & (behind < total)
        return free


@lru_cache(16)  # computing a long period takes a tenth of a second
def _turns_of(shares: tuple[int, ...]) -> Turns:
    """Returns the turns of `shares`, which are in lowest terms: of two periods if the sum of the shares is odd."""
    return Turns(tuple(share * (1 + sum(shares) % 2) for share in shares))


class Component(NamedTuple):
    """One set of a mixture. `identity`: its digest and split, and all that its order depends on, as JSON values."""

    identity: Mapping[str, Any]
    order: Order
    start: int
    """The index of the set's first sample, with the samples of all sets numbered one set after the other."""


@dataclass(frozen=True, eq=False)
class MixedOrder:
    """An endless order of the samples of several sets. Each set keeps its own order, epoch after epoch.

    Sample indices number the samples of all sets, one set after the other. `shares` apply from position `start` on. The
    positions before `start` have `before[k]` samples of set k. A call with a position before `start` raises ValueError.
    """

    components: tuple[Component, ...]
    seed: int
    shares: tuple[int, ...]
    start: int = 0
    before: tuple[int, ...] = ()
    _key: np.uint64 = field(init=False, repr=False)
    num_samples = MAX_N
    redraws = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.before or (0,) * len(self.shares))
        object.__setattr__(self, "_key", make_keys(b"shardio turns %d" % VERSION, self.seed, 0, 1)[0])

    @cached_property
    def _orders(self) -> list[Endless]:
        return [Endless(component.order) for component in self.components]

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        positions = check_below(MAX_N, positions)
        sets, ordinals = self.locate(positions)
        indices = np.empty_like(positions)
        for number in np.flatnonzero(np.bincount(sets, minlength=len(self.components))).tolist():
            some = np.flatnonzero(sets == number)
            indices[some] = self._orders[number](0, ordinals[some]) + self.components[number].start
        return indices

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (sets, ordinals): the number of each position's set, and how many samples of that set come before,
        int64. Raises ValueError for a position before `start`."""
        if len(positions) and positions.min() < self.start:
            raise ValueError(
                f"the shares of this mixture apply from position {self.start}; found position {positions.min()}"
            )
        turns = _turns_of(self.shares)
        period, place = divide(positions - self.start, np.int64(len(turns.sets)))
        pair = place >> 1
        # The counter is the first position of the pair, which no other pair of the stream has.
        drawn = random_bits(self._key, (positions - (place & 1)).astype(np.uint64)) & np.uint64(1)
        place ^= turns.may_change[pair] & drawn.astype(bool)
        sets = turns.sets[place]
        return sets, turns.ordinals[place] + period * np.array(turns.shares)[sets] + np.array(self.before)[sets]

    def delivered(self, position: int) -> tuple[int, ...]:
        """Returns, for each set, how many of its samples come before `position` in the stream."""
        turns = _turns_of(self.shares)
        periods, rest = divmod(position - self.start, len(turns.sets))
        sets, _ = self.locate(np.arange(position - rest, position))
        some = np.bincount(sets, minlength=len(self.components)).tolist()
        return tuple(
            before + periods * share + more for before, share, more in zip(self.before, turns.shares, some, strict=True)
        )

    def describe(self) -> dict[str, Any]:
        return {"seed": self.seed, "endless": True}

    def describe_sets(self) -> dict[str, Any]:
        """Returns the entries "since" (`start`) and "sets" of a loader's state, as JSON values, for `resumed`. "sets"
        has the identity of each set, its share and its number of samples before `start`."""
        sets = [
            {**component.identity, "share": share, "before": before}
            for component, share, before in zip(self.components, self.shares, self.before, strict=True)
        ]
        return {"since": self.start, "sets": sets}

    def resumed(self, told: Mapping[str, Any], position: int) -> MixedOrder:
        """Returns the order in which this mixture resumes from a state that a loader saved at `position`.

        `told` is the state, with the entries of `describe_sets`. A set in the state continues after the samples
        that the saved mixture had delivered before `position`. A set that is not in the state begins with its first
        sample. From `position` on, the shares of this mixture apply.

        Raises ValueError if entries are missing or invalid, or if sets were both added and removed. A set whose content
        changed counts as both.
        """
        since, sets = told.get("since"), told.get("sets")
        try:
            if type(since) is not int or not 0 <= since <= position <= MAX_N:
                raise ValueError
            old = [dict(one) for one in sets]  # type: ignore[union-attr]
            shares, before = (tuple(one.pop(name) for one in old) for name in ("share", "before"))
            integers = all(type(n) is int and 0 <= n <= MAX_N for n in (*shares, *before))
            if not integers or lowest_terms(shares) != shares:
                raise ValueError
        except (TypeError, ValueError, KeyError, AttributeError):
            expected = "a number `since`, and `sets` with `share` and `before`"
            raise ValueError(f"the state of a mixture must have {expected}; found {told!r:.200}") from None
        mine = [dict(component.identity) for component in self.components]
        gone, new = [one for one in old if one not in mine], [one for one in mine if one not in old]
        if gone and new:
            raise ValueError(
                f"the state belongs to other sets: it has {gone[0]!r:.200}, and this mixture has {new[0]!r:.200}. Sets "
                "may be added or left out, but not both at a time: a set whose content has changed is another set"
            )
        if old == mine and shares == self.shares:
            return replace(self, start=since, before=before)
        nowhere = tuple(Component(one, self.components[0].order, 0) for one in old)
        had = MixedOrder(nowhere, self.seed, shares, since, before).delivered(position)
        kept = tuple(had[old.index(one)] if one in old else 0 for one in mine)
        return replace(self, start=position, before=kept)
