"""The position of a loader in its sequence of epochs, and the state from which another loader resumes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from shardio.errors import shortened, show
from shardio.order.mixture import MixedOrder
from shardio.order.orders import Endless, Subset, as_integer
from shardio.order.permutation import MAX_EPOCH, MAX_N
from shardio.order.permutation import VERSION as ORDER_VERSION
from shardio.order.sampler import Sampler
from shardio.reading.mixed import AnySet, MixedSet
from shardio.system.eager import warn_caller

_BACK = "one batch was taken in the middle of an epoch, as by next(iter(loader)), and state_dict() does not count it"
_AGAIN = "one batch was taken after load_state_dict(), as by next(iter(loader)), and comes again"


class Place(NamedTuple):
    """A position in the epochs: all ranks together have read `consumed` samples of the order of `epoch`.

    In an endless order, `consumed` counts from the beginning of the first epoch, and `batch` batches of
    `epoch` were received.
    """

    epoch: int
    consumed: int
    batch: int = 0


class Position:
    """Where the next iterator begins, and how far the iterator that delivered last has come.

    An iterator is open from `begin` to `leave`, or to `go_to`. Only batches of open iterators change the position. An
    iterator is identified by a token: a reference to the iterator would form a cycle, and the loader must be freed as
    soon as it is not referenced. To be used by one thread.
    """

    def __init__(self, sampler: Sampler, shards: AnySet) -> None:
        order = sampler.order.order if isinstance(sampler.order, Endless) else sampler.order
        self.indices = order.indices if isinstance(order, Subset) else None
        """The samples given by the `indices` argument; None for all samples of the split."""
        self.sampler = sampler
        self.next = Place(0, 0)
        self.num_loaded = 0
        self.num_padded = 0
        """The number of samples of the latest batch that came earlier in the same epoch."""
        self._received = Place(0, 0)
        # How far each open iterator has come; None before its first batch.
        self._open: dict[object, Place | None] = {}
        # Who has the place, who gets it back if that iterator is dropped now, and whether it was just given back.
        self._holder: object = None
        self._before: object = None
        self._is_back = False
        # The place of the loaded state, as long as the next iterator begins there.
        self._loaded: Place | None = None
        self._told: set[str] = set()
        self._shards = shards
        self._since = self.next
        """In an endless order, the place of the last loaded state, from which the places of later epochs are
        computed."""

    def ahead(self) -> Position:
        """Returns a new position, from which the next iterator begins with the batch that comes next: of the iterator
        that delivered last or, if that is over, of the next epoch."""
        other, place = copy(self), self._received if self._holder in self._open else self.next
        other.go_to(place)
        while not other.rest().num_batches:
            other.go_to(self.after(other.next))
        return other

    def rest(self) -> Sampler:
        """Returns the sampler of the next iterator: a whole epoch, or after a resume the rest of an epoch."""
        place, length = self.next, self.sampler.length
        return replace(self.sampler, start=place.consumed, length=None if length is None else length - place.batch)

    def _beginning(self, epoch: int, since: Place) -> Place:
        """Returns the place where `epoch` begins. In an endless order, it is computed from the place `since`."""
        if (length := self.sampler.length) is None:
            return Place(epoch, 0)
        batches = epoch * length - since.epoch * length - since.batch
        if batches < 0:
            since, batches = Place(0, 0), epoch * length
        return Place(epoch, since.consumed + batches * self.sampler.global_batch_size)

    def after(self, place: Place) -> Place:
        """Returns the place where the epoch after `place.epoch` begins."""
        return self._beginning(place.epoch + 1, place)

    def begin(self) -> object:
        """Opens an iterator, and returns its token, by which the other methods know it. Its place does not count before
        its first batch."""
        token = object()
        self._open[token] = None
        return token

    def receive(self, token: object, place: Place, *, has_more: bool) -> None:
        """Records that the iterator with this token has delivered a batch, and has come to `place`. `has_more` says
        whether it has further batches."""
        if token not in self._open:
            return
        is_first = self._open[token] is None
        self._tell(_AGAIN, is_first and self._received != self._loaded == self.next)
        before = self._holder if is_first and has_more and not self._is_back else None
        loaded = self._loaded if has_more and self._loaded == self._received else None
        after = loaded or self.after(place)
        # No call comes between these, and so no exception of a signal handler.
        self._open[token] = self._received = place
        self.next, self._loaded = after, loaded
        self._holder, self._before, self._is_back = token, before, False

    def leave(self, token: object, *, at_end: bool = False, is_dropped: bool = False) -> None:
        """Records that the iterator with this token is over: with `at_end`, its epoch has ended; with `is_dropped`, the
        iterator was freed before; with neither, an error ended it."""
        if token not in self._open:
            return
        place, there = self._open.pop(token), self._open.get(self._before)
        if at_end and (place is None or token is self._holder):
            self._received = self.next = self.after(place or self.next)
        elif place is None:  # an error before the first batch ends an epoch, too
            self.next = self.after(self.next)
            if self._received != self._loaded:  # it was the epoch that began at the loaded place once more
                self._loaded = None
        elif is_dropped and token is self._holder and there is not None:
            self._received, self._holder, self._is_back = there, self._before, True
            self._tell(_BACK)

    def _tell(self, text: str, has_happened: bool = True) -> None:
        if has_happened and text not in self._told:
            self._told.add(text)
            warn_caller(f"{text}: loader.peek() returns the next batch and moves nothing")

    def go_to(self, place: Place, loaded: Place | None = None) -> None:
        """Makes the next iterator begin at `place`. Open iterators no longer change the state. `loaded` is the place of
        a state that was loaded, if the next iterator resumes there."""
        self._open = {}
        self.next = self._received = place
        self._loaded = loaded

    def set_epoch(self, epoch: int) -> None:
        epoch = as_integer("epoch", epoch)
        if not 0 <= epoch < MAX_EPOCH:
            raise ValueError(f"epoch must be from 0 to 2**64 - 1; found {epoch}")
        # If it is the epoch that is next anyway, `load_state` may have said where in it to go on.
        place = self.next
        if epoch != place.epoch:
            place = self._beginning(epoch, self._since)
        self._check_end(place)
        order, draws = self.sampler.order, place.consumed // self.sampler.repeats
        if isinstance(order, MixedOrder) and draws < (first := order.start):
            raise ValueError(
                f"the shares of this mixture apply from sample {first} of the stream on, but epoch {epoch} begins "
                "before: set a later epoch"
            )
        self._tell(_AGAIN, self._received != self._loaded == place)
        self.go_to(place, self._loaded if place == self._received else None)

    def _check_end(self, place: Place) -> None:
        """Raises ValueError if an epoch that begins at `place` has positions that are too large for an order."""
        if self.after(place).consumed > MAX_N:
            raise ValueError(
                f"epochs have at most 2**62 samples in all; {place.consumed} come before epoch {place.epoch}: set an "
                "earlier epoch"
            )

    def state(self) -> dict[str, Any]:
        place = self._received._asdict()
        if self.sampler.length is None:
            del place["batch"]
        order = self.sampler.order
        told = order.describe_sets() if isinstance(order, MixedOrder) else {}
        return {**self._identity(), **told, **place}

    @property
    def shares(self) -> list[float] | None:
        """The share of each set of a mixture among the samples received since the stream began, in the order of the
        sets; None for one set."""
        order = self.sampler.order
        if not isinstance(order, MixedOrder):
            return None
        draws = self._received.consumed // self.sampler.repeats
        of_sets = sorted(zip(order.components, order.delivered(draws), strict=True), key=lambda one: one[0].start)
        return [count / max(draws, 1) for _, count in of_sets]

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict that state_dict() returned; found {show(state)}")
        state = {name: plain(value) for name, value in state.items()}
        self._check_identity(state)
        most = {"epoch": MAX_EPOCH - 1, "consumed": self.sampler.num_samples}
        if self.sampler.length is not None:
            most["batch"] = MAX_N
        found: dict[str, Any] = {name: state.get(name) for name in most}
        if not all(type(found[name]) is int and 0 <= found[name] <= most[name] for name in most):
            raise ValueError(
                "the state must come from state_dict(), with an epoch from 0 to 2**64 - 1, consumed from 0 to "
                f"{self.sampler.num_samples} and, with epoch_batches=, a batch of at least 0; "
                f"found {', '.join(f'{name} {show(value)}' for name, value in found.items())}"
            )
        if self.sampler.length is not None:  # an epoch may have had more batches before
            found["batch"] = min(found["batch"], self.sampler.length)
        place = Place(**found)
        self._check_end(place)
        replace(self.sampler, start=place.consumed)  # raises unless it is a multiple of repeats
        if isinstance(self.sampler.order, MixedOrder):
            order = self.sampler.order.resumed(state, place.consumed // self.sampler.repeats)
            self.sampler = replace(self.sampler, order=order)
        self._since = place
        self.num_loaded += 1
        self.go_to(place, place)

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        identity = self._identity()
        mine = self.state()
        lacking = [name for name in mine if name not in state]
        if lacking and not {"order_version", "epoch", "consumed"} <= state.keys():
            raise ValueError(f"expected a state from state_dict() of a ShardLoader, but it lacks {', '.join(lacking)}")
        for name in dict.fromkeys([*identity, *(state.keys() - mine.keys())]):
            here, there = identity.get(name), state.get(name)
            # Types come first: comparing arrays, say, does not return a bool.
            if name in identity and type(there) is type(here) and there == here:
                continue
            if type(here) is int and name in state and type(there) is not int:
                raise ValueError(
                    f"the state's {name} must be an integer, as state_dict() returned it; found {show(there)}"
                )
            if name in identity and name in ("digest", "split"):
                raise ValueError(
                    f"the state belongs to other data: its {name} is {show(there)}, the {name} of {self._shards.path} "
                    f"is {here!r}; open the set and the split of the saved state"
                )
            raise ValueError(
                f"the state belongs to another order: its {shortened(str(name))} is {show(there)}, this loader's "
                f"is {here!r}; make the loader with the options of the loader that saved the state"
            )

    def _identity(self) -> dict[str, Any]:
        """Returns everything that the order of samples depends on. A state must have equal values to be loaded."""
        shards = self._shards
        return {
            **({} if isinstance(shards, MixedSet) else {"digest": shards.digest, "split": shards.split}),
            "order_version": ORDER_VERSION,
            **self.sampler.order.describe(),
            **({"repeats": self.sampler.repeats} if self.sampler.repeats > 1 else {}),
        }


def plain(value: Any) -> Any:
    """Returns a state, or a value in it, with plain numbers: checkpoints may return NumPy scalars, and arrays without
    axes."""
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.item() if getattr(value, "shape", None) == () else value
