"""The position of a loader in its sequence of epochs, and the state from which another loader resumes."""

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
    """A position: `consumed` samples into the order of `epoch`, counted over all ranks."""

    epoch: int
    consumed: int


class Position:
    """Where the next iterator begins, and how far the current iterator has come.

    Only the iterator that began last moves the current place, until `go_to` is called. The iterator is identified by a
    token: a reference to the iterator would form a cycle, and the loader must be freed as soon as it is not
    referenced. To be used by one thread.
    """

    def __init__(self, sampler: Sampler, shards: ShardSet) -> None:
        subset = sampler.order if isinstance(sampler.order, Subset) else None
        order = subset.order if subset else sampler.order
        indices = subset.indices if subset else None
        self.sampler = sampler
        self.indices = indices
        """The samples given by the `indices` argument; None for all samples of the split."""
        self.num_distinct = len(shards) if indices is None else len(np.unique(indices))
        self.repeats = isinstance(order, WeightedDraws) or (indices is not None and self.num_distinct < len(indices))
        """Whether samples may come more than once in an epoch."""
        self.next = Place(0, 0)
        self.num_repeats = 0
        """The number of samples of the latest batch that came earlier in the same epoch."""
        self._received = Place(0, 0)
        self._reading: object = None
        self._shards = shards

    def rest(self) -> Sampler:
        """Returns the sampler of the next iterator: a whole epoch, or after a resume the rest of an epoch."""
        return replace(self.sampler, start=self.next.consumed)

    def begin(self, token: object) -> None:
        """Begins the next epoch. From now on, only the iterator with this token moves the position."""
        begun, after = self.next, Place(self.next.epoch + 1, 0)
        # No call comes between these, and so no exception of a signal handler.
        self._received = begun
        self.next = after
        self._reading = token

    def receive(self, token: object, place: Place) -> None:
        """Records that the iterator with this token has come to `place`. Ignores iterators that began earlier."""
        if self._reading is token:
            self._received = place

    def go_to(self, place: Place) -> None:
        """Makes the next iterator begin at `place`. From now on the current iterator no longer changes the state."""
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
            raise TypeError(f"state must be a dict that state_dict() returned; found {show(state)}")
        self._check_identity(state)
        epoch: Any = state.get("epoch")
        consumed: Any = state.get("consumed")
        integers = type(epoch) is int and type(consumed) is int
        if not integers or not 0 <= epoch < MAX_EPOCH or not 0 <= consumed <= self.sampler.num_samples:
            raise ValueError(
                f"the state must have an epoch from 0 to 2**64 - 1, and consumed from 0 to {self.sampler.num_samples}; "
                f"found epoch {show(epoch)}, consumed {show(consumed)}"
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
                    f"the state belongs to other data: its {name} is {show(state.get(name))}, the {name} of "
                    f"{self._shards.path} is {identity[name]!r}; open the set and the split of the saved state"
                )
        for name in [*identity, *(state.keys() - identity.keys() - set(Place._fields))]:
            here, there = identity.get(name), state.get(name)
            if name not in identity or not _equal(there, here):
                raise ValueError(
                    f"the state belongs to another order: its {shortened(str(name))} is {show(there)}, this loader's "
                    f"is {here!r}; make the loader with the options of the loader that saved the state"
                )

    def _identity(self) -> dict[str, Any]:
        """Returns everything that the order of samples depends on. A state must have equal values to be loaded."""
        return {
            "digest": self._shards.digest,
            "split": self._shards.split,
            "order_version": ORDER_VERSION,
            **self.sampler.order.describe(),
        }


def _equal(there: object, here: object) -> bool:
    """Returns whether type and value are equal. Types come first: comparing arrays, say, does not return a bool."""
    return type(there) is type(here) and bool(there == here)
