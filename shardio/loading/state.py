"""The position of a loader in its sequence of epochs, and the state from which another loader resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardio.errors import shortened, show
from shardio.order.orders import Endless, Subset, as_integer
from shardio.order.permutation import MAX_EPOCH, MAX_N
from shardio.order.permutation import VERSION as ORDER_VERSION
from shardio.order.sampler import Sampler
from shardio.reading.shardset import ShardSet


class Place(NamedTuple):
    """A position: `consumed` samples into the order of `epoch`, counted over all ranks.

    In an endless order, `consumed` counts from the beginning of the first epoch, and `batch` batches of this epoch were
    received.
    """

    epoch: int
    consumed: int
    batch: int = 0


class Position:
    """Where the next iterator begins, and how far the current iterator has come.

    Only the iterator that began last moves the current place, until `go_to` is called. The iterator is identified by a
    token: a reference to the iterator would form a cycle, and the loader must be freed as soon as it is not
    referenced. To be used by one thread.
    """

    def __init__(self, sampler: Sampler, shards: ShardSet) -> None:
        order = sampler.order.order if isinstance(sampler.order, Endless) else sampler.order
        self.indices = order.indices if isinstance(order, Subset) else None
        """The samples given by the `indices` argument; None for all samples of the split."""
        self.sampler = sampler
        self.num_distinct = len(shards) if self.indices is None else len(np.unique(self.indices))
        self.redraws = sampler.order.redraws or sampler.repeats > 1
        """Whether samples may come more than once in an epoch."""
        self.next = Place(0, 0)
        self.num_padded = 0
        """The number of samples of the latest batch that came earlier in the same epoch."""
        self._received = Place(0, 0)
        self._reading: object = None
        self._shards = shards

    def rest(self) -> Sampler:
        """Returns the sampler of the next iterator: a whole epoch, or after a resume the rest of an epoch."""
        length = self.sampler.length
        rest = None if length is None else max(0, length - self.next.batch)
        return replace(self.sampler, start=self.next.consumed, length=rest)

    def order_epoch(self, epoch: int) -> int:
        """Returns the epoch by which the order and transforms draw: 0 in an endless order, where epochs are stretches
        of one."""
        return epoch if self.sampler.length is None else 0

    def after(self, place: Place) -> Place:
        """Returns where the epoch after that of `place` begins."""
        if self.sampler.length is None:
            return Place(place.epoch + 1, 0)
        left = max(0, self.sampler.length - place.batch)
        return Place(place.epoch + 1, place.consumed + left * self.sampler.global_batch_size)

    def begin(self, token: object) -> None:
        """Begins the next epoch. From now on, only the iterator with this token moves the position."""
        begun, after = self.next, self.after(self.next)
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
        place = self.next
        if epoch != place.epoch:
            place = Place(epoch, epoch * (self.sampler.length or 0) * self.sampler.global_batch_size)
        self._check_end(place.consumed)
        self.go_to(place)

    def _check_end(self, consumed: int) -> None:
        """Raises ValueError if the positions of an epoch that begins at `consumed` are too large for an order."""
        if self.sampler.length is not None and consumed + self.sampler.length * self.sampler.global_batch_size > MAX_N:
            raise ValueError(f"the samples of all epochs must be fewer than 2**62; found {consumed} before this epoch")

    def state(self) -> dict[str, Any]:
        place = self._received._asdict()
        if self.sampler.length is None:
            del place["batch"]
        return {**self._identity(), **place}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict that state_dict() returned; found {show(state)}")
        self._check_identity(state)
        most = {"epoch": MAX_EPOCH - 1, "consumed": self.sampler.num_samples}
        if self.sampler.length is not None:
            most["batch"] = MAX_N
        found: dict[str, Any] = {name: state.get(name) for name in most}
        if not all(type(found[name]) is int and 0 <= found[name] <= most[name] for name in most):
            raise ValueError(
                f"the state must have an epoch from 0 to 2**64 - 1, and consumed from 0 to {self.sampler.num_samples}; "
                f"found {', '.join(f'{name} {show(value)}' for name, value in found.items())}"
            )
        self._check_end(found["consumed"])
        if found["consumed"] % self.sampler.repeats:
            raise ValueError(
                f"expected a state after a multiple of repeats={self.sampler.repeats} samples, found one after "
                f"{found['consumed']}"
            )
        self.go_to(Place(**found))

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        identity = self._identity()
        fields = ("epoch", "consumed") if self.sampler.length is None else Place._fields
        lacking = [name for name in (*identity, *fields) if name not in state]
        if lacking and not {"shuffle", "epoch", "consumed"} <= state.keys():
            raise ValueError(f"this is not the state of a ShardLoader: it lacks {', '.join(lacking)}")
        for name in ("digest", "split"):
            if not _equal(state.get(name), identity[name]):
                raise ValueError(
                    f"the state belongs to other data: its {name} is {show(state.get(name))}, the {name} of "
                    f"{self._shards.path} is {identity[name]!r}; open the set and the split of the saved state"
                )
        for name in dict.fromkeys([*identity, *(state.keys() - set(fields))]):
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
            **({"repeats": self.sampler.repeats} if self.sampler.repeats > 1 else {}),
        }


def _equal(there: object, here: object) -> bool:
    """Returns whether type and value are equal. Types come first: comparing arrays, say, does not return a bool."""
    return type(there) is type(here) and bool(there == here)
