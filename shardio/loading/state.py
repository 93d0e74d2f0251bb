"""Where a loader is in its sequence of epochs, and the state that lets another loader continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardio.errors import shortened, show
from shardio.order.orders import Subset, WeightedDraws, as_integer
from shardio.order.permutation import MAX_EPOCH
from shardio.order.permutation import VERSION as ORDER_VERSION
from shardio.order.sampler import Sampler
from shardio.reading.shardset import ShardSet


class Place(NamedTuple):
    """In `epoch`, after the first `consumed` samples of its order."""

    epoch: int
    consumed: int


class Position:
    """The places of the next iterator's first batch, and of the last batch received.

    The iterator that began last moves the latter, until the loader is sent elsewhere. It is known by a token, since a
    reference to the iterator would be part of a cycle, and the loader must die as soon as it is forgotten.
    To be used by one thread.
    """

    def __init__(self, sampler: Sampler, shards: ShardSet) -> None:
        subset = sampler.order if isinstance(sampler.order, Subset) else None
        order = subset.order if subset else sampler.order
        indices = subset.indices if subset else None
        self.sampler = sampler
        self.indices = indices
        """The samples that were asked for; None if all of the split were."""
        self.num_distinct = len(shards) if indices is None else len(np.unique(indices))
        self.repeats = isinstance(order, WeightedDraws) or (indices is not None and self.num_distinct < len(indices))
        """Whether samples may come more than once in an epoch."""
        self.next = Place(0, 0)
        self.num_repeats = 0
        """How many samples of the batch received last have come earlier in the same epoch."""
        self._received = Place(0, 0)
        self._reading: object = None
        self._shards = shards

    def rest(self) -> Sampler:
        """Returns the sampler of the epoch that the next iterator begins, from where it begins."""
        return replace(self.sampler, start=self.next.consumed)

    def begin(self, token: object) -> None:
        """Begins the next epoch, for the iterator of this token."""
        begun, after = self.next, Place(self.next.epoch + 1, 0)
        # No call comes between these, and so no exception of a signal handler.
        self._received = begun
        self.next = after
        self._reading = token

    def receive(self, token: object, place: Place) -> None:
        """Note that the iterator of this token has come to `place`."""
        if self._reading is token:
            self._received = place

    def go_to(self, place: Place) -> None:
        """Lets the next iterator begin at `place`. The state no longer follows the current iterator."""
        self.next = self._received = place
        self._reading = None

    def set_epoch(self, epoch: int) -> None:
        epoch = as_integer("epoch", epoch)
        if not 0 <= epoch < MAX_EPOCH:
            raise ValueError(f"epoch must be from 0 to 2**64 - 1; found {epoch}")
        # If it is the epoch that is next anyway, `load_state` may have said where in it to go on.
        self.go_to(self.next if epoch == self.next.epoch else Place(epoch, 0))

    def state(self) -> dict[str, Any]:
        return {**self._identity(), **self._received._asdict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a dict that state_dict() has given; found {show(state)}")
        self._check_identity(state)
        epoch: Any = state.get("epoch")
        consumed: Any = state.get("consumed")
        integers = type(epoch) is int and type(consumed) is int
        if not integers or not 0 <= epoch < MAX_EPOCH or not 0 <= consumed <= self.sampler.num_samples:
            raise ValueError(
                f"expected an epoch from 0 to 2**64 - 1 and from 0 to {self.sampler.num_samples} samples consumed; "
                f"found epoch {show(epoch)}, {show(consumed)} consumed"
            )
        self.go_to(Place(epoch, consumed))

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        identity = self._identity()
        lacking = [name for name in (*identity, *Place._fields) if name not in state]
        if lacking and not {"shuffle", *Place._fields} <= state.keys():
            raise ValueError(f"this is not the state of a ShardLoader: it lacks {', '.join(lacking)}")
        for name in ("digest", "split"):
            if not _equal(state.get(name), identity[name]):
                raise ValueError(
                    f"the state belongs to other data: its {name} is {show(state.get(name))}, that of "
                    f"{self._shards.path} is {identity[name]!r}; open the set and the split that it was taken from"
                )
        for name in [*identity, *(state.keys() - identity.keys() - set(Place._fields))]:
            here, there = identity.get(name), state.get(name)
            if name not in identity or not _equal(there, here):
                raise ValueError(
                    f"the state belongs to another order: its {shortened(str(name))} is {show(there)}, this loader's "
                    f"{here!r}; make the loader with the options with which the state was taken"
                )

    def _identity(self) -> dict[str, Any]:
        """Returns what a state must agree in with the loader that takes it up: everything that the order depends on."""
        return {
            "digest": self._shards.digest,
            "split": self._shards.split,
            "order_version": ORDER_VERSION,
            **self.sampler.order.describe(),
        }


def _equal(there: object, here: object) -> bool:
    """Returns whether a state has this value. What a checkpoint holds may compare in ways of its own, as arrays do."""
    return type(there) is type(here) and bool(there == here)
