"""ShardLoader: sampler -> gather threads -> slots -> device, wired together, and iteration over the result."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.profiler import record_function

from shardio.augment.batch import Transform
from shardio.errors import LaunchError, printable
from shardio.format.layout import SampleShape, sample_nbytes
from shardio.loading.gather import Finish, GatherThreads, Hints, Pending
from shardio.loading.prefetch import MOST_AHEAD, Copier, DevicePrefetch, Tensors
from shardio.loading.ring import Ring, Slot, new_slot
from shardio.loading.torchlike import LoaderDataset, RankSampler, refuse_options
from shardio.order.orders import Shuffle, as_integer, make_order
from shardio.order.permutation import MAX_EPOCH
from shardio.order.permutation import VERSION as ORDER_VERSION
from shardio.order.sampler import Sampler, Tail
from shardio.order.windows import Crop, CropAt, Windows
from shardio.order.world import World, find_world, world_of_torch
from shardio.reading.choose import Io, make_reader, read_ahead_batches
from shardio.reading.guard import Check, GuardedReader, OnDamage, check_choices
from shardio.reading.reader import Reader
from shardio.reading.shardset import ShardSet, open_shards
from shardio.reading.through_cache import CachedSplit, StagedReader
from shardio.system.eager import eager
from shardio.system.kernels import kernels_in_use, warn_of_missing_kernels
from shardio.system.machine import memory_left, usable_cores
from shardio.system.threads import close_at_exit

# Beyond this the memory bus is the limit on most machines, and other ranks of the node need cores too.
_MOST_THREADS = 4


@dataclass
class _Counts:
    batches: int = 0
    images: int = 0
    nbytes: int = 0
    wait_seconds: float = 0.0
    gather_seconds: float = 0.0
    copy_seconds: float = 0.0
    read_ahead_batches: int = 0


class _Drawn(NamedTuple):
    """The samples of a batch, on the host: indices, int64 (B,), and the sizes that they had if they were squashed."""

    indices: NDArray[np.int64]
    sizes: NDArray[np.int64] | None


class _Place(NamedTuple):
    """In an epoch: after so many samples of its order."""

    epoch: int
    consumed: int


class _Held:
    """What a loader has to end. `close` may be called again, also where it was interrupted, and in any thread.

    It belongs to the loader alone, and dies with it. Then all of it ends even if an exception from a signal handler
    cuts `__del__` short: descriptors close, and threads end, when what owns them dies. (`weakref.finalize` would keep
    all that for ever if its call were cut short.)
    """

    closing = False
    cached: CachedSplit | None = None
    reader: Reader | None = None
    threads: GatherThreads | None = None
    ring: Ring | None = None
    _is_over = False

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Each step is done whatever happens in one before, such as a Ctrl-C."""
        self.closing = True
        if self._is_over:
            return
        with contextlib.ExitStack() as steps:  # the last comes first
            if self.cached is not None:
                steps.callback(self.cached.close)
            if self.ring is not None:
                steps.callback(self.ring.clear)
            if self.threads is not None:
                steps.callback(self.threads.close)
            # Before the threads are waited for: one that is asking a storage that does not answer gives up.
            if self.reader is not None:
                steps.callback(self.reader.close)
            if self.cached is not None:
                steps.callback(self.cached.stop)
        self._is_over = True


_Make = TypeVar("_Make", bound=Callable[..., None])


def _closed_on_error(make: _Make) -> _Make:
    """Closes a loader that cannot be made: an error that is kept keeps its frames, and with them the loader."""

    @functools.wraps(make)
    def make_or_close(self: ShardLoader, *arguments: Any, **options: Any) -> None:
        self._held = _Held()
        close_at_exit(self._held)
        try:
            make(self, *arguments, **options)
        except BaseException:
            self.close()
            raise

    return cast(_Make, make_or_close)


class ShardLoader:
    """Batches of one split of a shard set, for one rank, epoch after epoch.

        loader = ShardLoader("out/", batch_size=256)
        for images, labels in loader: ...

    `images` is uint8 (B, C, H, W) in channels_last memory, `labels` int64 (B,). On the CPU `images` is a view of a
    slot, which is reused when nobody holds the batch, or any view of it, any more: `list(loader)` is right. On CUDA
    all tensors are the caller's own, ready for the current stream. With `return_indices=True` a third tensor holds the
    global sample indices, int64 (B,).

    `shuffle=True` is a permutation of all samples, `False` the stored order, and "block" keeps reads together for slow
    or network storage: blocks of `block_size` consecutive samples in permuted order, and the samples of every
    `window_blocks` blocks permuted (see `shardio.order.orders`). `indices` are the samples to read instead of all,
    twice if given twice; "stored" and "consecutive" then mean their order. `weights`, one per sample (of `indices`),
    draw with replacement, `num_draws` times per epoch. `batch_size` is that of one rank.

    The order depends on these, `seed` and the epoch alone, never on threads or ranks. Each `iter()` begins the next
    epoch with its first batch: from 0, or the one given to `set_epoch`. `state_dict` and `load_state_dict` stop and go
    on anywhere, on any number of ranks.
    `tail` is what becomes of the last, short batch: see `shardio.order.sampler.Sampler`.
    `rank` and `world_size` come from torch.distributed or the launcher if they are not given. `device=None` is the GPU
    of the local rank, or the CPU if there is none. `prefetch` batches are kept ready ahead of the consumer by
    `num_threads` gather threads.

    `transform` is called with each batch of images, in the consuming thread. One of `shardio.augment` changes labels,
    too, if it mixes, and draws random numbers by (`seed`, epoch, sample); where samples may come more than once in an
    epoch (`weights`, or `indices` that has some twice) by the place in the epoch's order. Of a set that was made with
    `--fit squash`, as its provenance says, it is told the sizes of the pictures before that, and treats them as they
    were.

    `crop` reads a window of so many pixels, (height, width) or a square, instead of the whole sample: its margin is
    never moved. It lies in the centre, or with crop_at="random" where (`seed`, epoch, sample) say, on any rank.

    `io` is how samples come from storage. "mmap" copies them from the page cache, into which the kernel brings coming
    batches ahead. "pread" reads them from the files with many requests under way, which suits network filesystems: a
    thread that waits for a mapped page cannot be interrupted. "direct" is the same past the page cache (O_DIRECT), for
    sets larger than memory. "auto" looks at the filesystem, the memory that is left and the page cache; `stats()` says
    what it chose and why.

    `cache` is a folder on this node's own disk, in which the set is copied once for all processes of the node that ask
    for it; `path` may then be a URL. Training begins at once: what has not been copied yet is read from `path`, and
    what the first batches of epoch 0 need is copied first. As long as the loader is open, nobody evicts the copy. If it
    cannot be made, as there is no room, a warning says so, and `path` is read all the time.

    `digest` pins the content of the set: the digest that `shardio info` prints, or its first 12 digits or more. Any
    other set is a FormatError.

    check="sample" compares the crc32 of every sample that is read with the index, in the gather threads, and reads a
    sample that differs once more, past the page cache if that is possible; with `cache`, from `path`, and if it is
    sound there, a thread verifies the copy and mends it. It reads whole samples, with `crop` too. One that is damaged
    is a FormatError that names file, sample and byte. With on_damage="skip" it is a RuntimeWarning, the
    first time, and another sample of the same batch takes its place, with its label and index: which, (`seed`, epoch,
    sample) say. Shapes, the number of batches and states stay what they are. Without `check`, that covers samples that
    storage does not give (EIO) and that a file does not have any more. A batch without a sound sample is an error.

    Opening raises SetNotFoundError or FormatError. What storage fails to give is asked for again for a second; then it
    is an OSError that names file, byte and sample. An error in a gather thread is raised where its batch was due. An
    iterator belongs to one thread. `close()`, or leaving the `with` block, or forgetting the loader ends the threads.
    A loader survives neither fork() nor pickling: make it in the process that uses it. It takes the place of torch's
    DataLoader, and has the `dataset`, `batch_size` and `sampler` of one; it is not to be given to one.
    """

    _held: _Held

    @eager
    @_closed_on_error
    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        *,
        split: str = "train",
        shuffle: Shuffle = True,
        seed: int = 0,
        block_size: int | None = None,
        window_blocks: int | None = None,
        weights: ArrayLike | None = None,
        num_draws: int | None = None,
        indices: ArrayLike | None = None,
        tail: Tail = "drop",
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device | None = None,
        num_threads: int | None = None,
        prefetch: int = 2,
        io: Io = "auto",
        cache: str | os.PathLike[str] | None = None,
        crop: int | tuple[int, int] | None = None,
        crop_at: CropAt = "center",
        transform: Transform | Callable[[torch.Tensor], torch.Tensor] | None = None,
        return_indices: bool = False,
        digest: str | None = None,
        check: Check = "off",
        on_damage: OnDamage = "raise",
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            refuse_options(unknown)
        warn_of_missing_kernels()
        check_choices(check, on_damage)
        prefetch = as_integer("prefetch", prefetch)
        num_threads = None if num_threads is None else as_integer("num_threads", num_threads)
        if (num_threads is not None and num_threads < 1) or prefetch < 0:
            raise ValueError(f"num_threads must be at least 1 and prefetch at least 0; found {num_threads}, {prefetch}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be something to call with each batch of images; found {transform!r}")
        self.world: World = find_world(rank, world_size)
        self._cached = self._held.cached = None if cache is None else CachedSplit(path, cache, split, digest)
        if self._cached is None:
            self.shards = open_shards(path, split, digest=digest)
        order = make_order(
            self._cached.num_samples if self._cached else len(self.shards),
            shuffle=shuffle,
            seed=seed,
            block_size=block_size,
            window_blocks=window_blocks,
            weights=weights,
            num_draws=num_draws,
            indices=indices,
        )
        self._sampler = Sampler(
            order, as_integer("batch_size", batch_size), self.world.rank, self.world.world_size, tail
        )
        if not self._sampler.num_batches:
            raise ValueError(
                f"expected at least one batch, but {order.num_samples} samples are fewer than the global batch of "
                f'{self._sampler.global_batch_size}, and tail="drop" leaves out what is short: use a smaller '
                'batch_size, or tail="pad" or "short"'
            )
        self.device = _choose_device(device, self.world)
        if self._cached is not None:
            self.shards = self._cached.open(self._sampler.batches(0))
        self.prefetch = prefetch
        self.transform = transform
        self._seed = as_integer("seed", seed)
        self.return_indices = return_indices
        self._copier = _make_copier(self.device)
        make = self._copier.new_slot if self._copier else new_slot
        self._crop = None if crop is None else _make_crop(crop, crop_at, self._seed, self.shards.sample_shape)
        shape = self._crop.cropped_shape if self._crop else self.shards.sample_shape
        # Enough for all batches under way at a time, so that a steady loop makes no new slot.
        under_way = prefetch + 2 + (prefetch + MOST_AHEAD if self._copier else 0)
        self._ring = self._held.ring = Ring(under_way, lambda: make(batch_size, shape))
        self._next = _Place(0, 0)
        self._received = _Place(0, 0)
        # Of the iterator that moves `_received`: the one that began last. Not the iterator: it refers to the loader,
        # which must die as soon as it is forgotten.
        self._reading: object = None
        self._num_repeats = 0
        self._counts = _Counts()
        self._pid = os.getpid()
        self._indices = None if indices is None else np.asarray(indices).copy()
        num_distinct = len(self.shards) if self._indices is None else len(np.unique(self._indices))
        # Whether a sample may come more than once in an epoch.
        self._repeats = weights is not None or (self._indices is not None and num_distinct < self._indices.size)
        make_the_reader = self._cached.make_reader if self._cached else make_reader
        self._reader, self._io_reason = make_the_reader(self.shards, io, num_distinct)
        self._staged = self._reader if isinstance(self._reader, StagedReader) else None
        self._guard: GuardedReader | None = None
        if check != "off" or on_damage != "raise":
            self._guard = GuardedReader(
                self._reader,
                self.shards,
                check=check,
                on_damage=on_damage,
                seed=self._seed,
                second=self._cached.make_second(self.shards) if self._cached else None,
            )
            self._reader = self._guard
        self._held.reader = self._reader
        self._squashed = _is_squashed(self.shards)
        self._read_ahead = read_ahead_batches(self._sampler.batch_size * sample_nbytes(shape), memory_left())
        if num_threads is None:
            num_threads = max(min(_MOST_THREADS, usable_cores()), self._reader.num_threads)
        self._threads = self._held.threads = GatherThreads(num_threads)

    @property
    def num_threads(self) -> int:
        return self._threads.num_threads

    def __repr__(self) -> str:
        shape = self._crop.cropped_shape if self._crop else self.shards.sample_shape
        closed = ", closed" if self.closed else ""
        return printable(
            f"<ShardLoader {self.shards.path}, {self.shards.split}: {len(self)} batches of {self.batch_size} "
            f"x {shape}, rank {self.world.rank} of {self.world.world_size}, on {self.device}{closed}>"
        )

    @property
    def batch_size(self) -> int:
        """Samples of a batch of this rank. The last one may be smaller with tail="short"."""
        return self._sampler.batch_size

    @cached_property
    def dataset(self) -> LoaderDataset:
        """The samples that an epoch is drawn from, one by one, as frameworks look for them in a DataLoader."""
        return LoaderDataset(self.shards, self._indices)

    @property
    def sampler(self) -> RankSampler:
        """The indices that come next, and `set_epoch`, as frameworks look for it in a DataLoader."""
        return RankSampler(self._batches_to_come, self._sampler.num_read, self.set_epoch)

    batch_sampler = None
    """None, as in a DataLoader that makes no batches: of another, frameworks would make a DataLoader over `dataset`."""

    def _batches_to_come(self) -> Iterator[NDArray[np.int64]]:
        return replace(self._sampler, start=self._next.consumed).batches(self._next.epoch)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "a ShardLoader gives whole batches, to a loop over it: leave out the DataLoader around it, or give that a "
            "ShardDataset; loader.dataset[i] is a single sample"
        )

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return self._sampler.num_batches

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next `iter()` begins. Without it, epochs follow each other.

        The epoch that `load_state_dict` goes on with may be set again: it still goes on where it was left.
        """
        epoch = as_integer("epoch", epoch)
        if not 0 <= epoch < MAX_EPOCH:
            raise ValueError(f"epoch must be from 0 to 2**64 - 1; found {epoch}")
        # If it is the epoch that is next anyway, load_state_dict may have said where in it to go on.
        self._go_to(self._next if epoch == self._next.epoch else _Place(epoch, 0))

    def _go_to(self, place: _Place) -> None:
        self._next = self._received = place
        self._reading = None

    @eager
    def __iter__(self) -> LoaderIterator:
        self._check_world()
        return LoaderIterator(self)

    def _check_world(self) -> None:
        """A loader that was made before torch.distributed was initialised may have taken itself for the only one."""
        now = None if self.world.source == "arguments" else world_of_torch()
        if now and (now.rank, now.world_size) != (self.world.rank, self.world.world_size):
            raise LaunchError(
                f"this ShardLoader was made as rank {self.world.rank} of {self.world.world_size}, told by "
                f"{self.world.source}, but torch.distributed says rank {now.rank} of {now.world_size}: make the loader "
                "after torch.distributed is initialised, or give rank= and world_size="
            )

    @property
    def num_repeats(self) -> int:
        """How many samples, the last ones, of the batch received last have come earlier in the same epoch.

        More than 0 only in an epoch's last batch with tail="pad": leave them out of what is counted or averaged.
        """
        return self._num_repeats

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is, as JSON values: what it has received, not what was read ahead.

        `consumed` counts the samples of the epoch's order that all ranks together have received. The state is the same
        on every rank, and does not depend on how many there are.
        """
        return {**self._identity(), **self._received._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on where `state` was taken: with exactly the samples not yet consumed.

        The number of ranks, the batch size and the tail may be others than before. After an epoch's last batch, that
        next `iter()` gives only what "drop" has left, if a smaller batch can be made of it, and mostly nothing; the one
        after it gives the next epoch, as a loop over epochs expects. ValueError if the state belongs to another set,
        split or order.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a dict that state_dict() has given; found {state!r}")
        identity = self._identity()
        lacking = [name for name in (*identity, *_Place._fields) if name not in state]
        if lacking and not {"shuffle", *_Place._fields} <= state.keys():
            raise ValueError(f"this is not the state of a ShardLoader: it lacks {', '.join(lacking)}")
        for name in ("digest", "split"):
            if state.get(name) != identity[name]:
                raise ValueError(
                    f"the state belongs to other data: its {name} is {state.get(name)!r}, that of "
                    f"{self.shards.path} is {identity[name]!r}; open the set and the split that it was taken from"
                )
        for name in [*identity, *(state.keys() - identity.keys() - set(_Place._fields))]:
            here, there = identity.get(name), state.get(name)
            if there != here:
                raise ValueError(
                    f"the state belongs to another order: its {name} is {there!r}, this loader's {here!r}; make the "
                    "loader with the options with which the state was taken"
                )
        epoch: Any = state.get("epoch")
        consumed: Any = state.get("consumed")
        integers = type(epoch) is int and type(consumed) is int
        if not integers or not 0 <= epoch < MAX_EPOCH or not 0 <= consumed <= self._sampler.num_samples:
            raise ValueError(
                f"expected an epoch from 0 to 2**64 - 1 and from 0 to {self._sampler.num_samples} samples consumed; "
                f"found epoch {epoch!r}, {consumed!r} consumed"
            )
        self._go_to(_Place(epoch, consumed))

    def _identity(self) -> dict[str, Any]:
        """What a state must agree in with the loader that takes it up: everything that the order depends on."""
        return {
            "digest": self.shards.digest,
            "split": self.shards.split,
            "order_version": ORDER_VERSION,
            **self._sampler.order.describe(),
        }

    @property
    def damaged(self) -> list[int]:
        """The samples that were found damaged and replaced by others, in ascending order; also of batches that were
        read ahead. Always empty with on_damage="raise"."""
        return self._guard.damaged if self._guard else []

    def stats(self) -> dict[str, Any]:
        """What was delivered since the loader was made, and the seconds spent on it.

        `wait_seconds`: the consumer waiting for batches; `gather_seconds`: all gather threads together, copying;
        `copy_seconds`: the GPU, by its own clock, copying batches whose copies are known to be done. 0.0 on the CPU.
        `io` is how samples are read, for `io_reason`; `read_nbytes` that were read so, `read_retries` because of errors
        or of a wrong crc32; `damaged` samples were replaced by others; `read_ahead_batches` announced to the kernel,
        and `read_ahead_hits`, the share of their samples that was in the page cache when it was due (told by a few of
        each batch; None if none were announced, or if the files are not ours and the kernel does not tell). `staging`
        tells how far the copy in the cache is: None without `cache`. `kernels` copy samples, read them from files and
        resample them on the CPU. `slots` were made for batches, of which
        `slots_free` wait for reuse: the others are being filled, are ready, or are in the consumer's hands.

        In a trace of torch.profiler, the consumer's thread shows "shardio.wait" for a batch that is not ready,
        "shardio.copy" for starting its way to the GPU, and "shardio.transform".
        """
        read = self._reader.counts()
        return {
            **vars(self._counts),
            "num_threads": self.num_threads,
            "device": str(self.device),
            "slots": self._ring.num_made,
            "slots_free": self._ring.num_free,
            "io": self._reader.name,
            "io_reason": self._staged.reason if self._staged else self._io_reason,
            "read_nbytes": read.nbytes,
            "read_retries": read.retries,
            "damaged": len(self.damaged),
            "read_ahead_hits": read.found / read.looked_for if read.looked_for else None,
            "kernels": kernels_in_use(),
            "staging": self._cached.describe(self.shards) if self._cached else None,
        }

    def close(self) -> None:
        """End the gather threads. Batches already delivered stay valid. May be called again, also where an exception,
        of a signal handler say, has interrupted it: then it goes on."""
        self._held.close()

    @property
    def closed(self) -> bool:
        return self._held.closing

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ShardLoader has threads, and cannot be pickled or copied: make it in the process that uses it"
        )


class LoaderIterator(Iterator[tuple[torch.Tensor, ...]]):
    """One pass over one epoch. Everything is driven by the consumer's calls, so there is nothing to wait for at an end:
    an iterator that is dropped in the middle leaves its batches to be finished, and its slots return to the ring."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader
        self._begun = False
        self._token = object()
        self._failed = False
        self._pending: deque[Pending] = deque()
        # Drawn from the order, and announced if that is of use.
        self._coming: deque[tuple[NDArray[np.int64], Windows | None]] = deque()
        self._hints = Hints()
        self._device = DevicePrefetch(loader._copier, loader._ring, loader._counts) if loader._copier else None
        # Of the batches on the device that were not taken.
        self._drawn: deque[_Drawn] = deque()
        self._take_place()

    def __del__(self) -> None:
        if hasattr(self, "_device") and not sys.is_finalizing():  # nor where its making was interrupted
            self._abandon()

    def _abandon(self) -> None:
        """Leave batches that nobody will take, and their slots. May be called again."""
        self._hints.abandon()
        while self._pending:
            self._pending.popleft().abandon(self._loader._ring.release)
        if self._device is not None:
            self._device.close()

    def _take_place(self) -> None:
        self._place = self._loader._next
        self._sampler = replace(self._loader._sampler, start=self._place.consumed)
        self._remaining = self._sampler.num_batches

    def _begin(self) -> None:
        """With the first batch. Who only asks for an iterator changes nothing: Lightning asks too often."""
        self._take_place()
        self._batches = self._sampler.batches(self._place.epoch)
        self._announces = self._loader._reader.begin_epoch()
        self._loader._go_to(self._place)
        self._loader._next = _Place(self._place.epoch + 1, 0)
        self._loader._reading = self._token
        self._begun = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an iterator of a ShardLoader cannot be pickled or copied: state_dict() of the loader says where it is"
        )

    @property
    def epoch(self) -> int:
        """That the batches are of. Until the first batch was asked for, the one that the loader would begin now."""
        return self._place.epoch if self._begun else self._loader._next.epoch

    def __len__(self) -> int:
        """Batches still to come."""
        if not self._begun:
            self._take_place()
        return self._remaining

    @eager
    def __next__(self) -> tuple[torch.Tensor, ...]:
        loader = self._loader
        if os.getpid() != loader._pid:
            raise RuntimeError("this ShardLoader was made before fork(): make it in the process that uses it")
        if not self._begun and not loader.closed:
            self._begin()
        if not self._remaining:
            if not self._failed:
                self._receive(_Place(self._place.epoch + 1, 0))
            raise StopIteration
        if loader.closed:
            raise RuntimeError("this ShardLoader was closed")
        try:
            return self._next_batch()
        except BaseException:
            self._remaining = 0  # as with a generator: after an error the iteration is over
            self._failed = True
            self._abandon()
            raise

    def _next_batch(self) -> tuple[torch.Tensor, ...]:
        """What is received is counted last: an error before that, or a Ctrl-C, leaves the batch to be read again."""
        loader, sampler = self._loader, self._sampler
        tensors, drawn = self._next()
        images, labels = tensors.images, tensors.labels
        if loader.transform is not None:
            with record_function("shardio.transform"):
                images, labels = self._transform(loader.transform, images, labels, drawn)
        counts = loader._counts
        counts.batches += 1
        counts.images += len(tensors.labels)
        counts.nbytes += tensors.images.nbytes
        repeats = sampler.num_repeats(sampler.num_batches - self._remaining)
        consumed = min(self._place.consumed + sampler.global_batch_size, sampler.num_samples)
        self._remaining -= 1
        self._place = _Place(self._place.epoch, consumed)
        loader._num_repeats = repeats
        self._receive(self._place)
        return (images, labels, tensors.indices) if loader.return_indices else (images, labels)

    def _transform(
        self,
        transform: Callable[[torch.Tensor], Any],
        images: torch.Tensor,
        labels: torch.Tensor,
        drawn: _Drawn,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (ours := _ours(transform)) is None:
            return transform(images), labels
        loader, numbers, sizes = self._loader, drawn.indices, drawn.sizes
        if loader._repeats:
            start, stop = self._sampler.bounds(self._sampler.num_batches - self._remaining)
            numbers = np.arange(start, stop) % self._sampler.num_samples
        if loader._squashed and sizes is None:  # the transform has come while the batch was under way
            sizes = _sizes(loader._reader, loader.shards.sample_shape, loader._crop, drawn.indices)
        changed, targets = ours(images, labels, indices=numbers, seed=loader._seed, epoch=self.epoch, sizes=sizes)
        return cast(torch.Tensor, changed), targets  # of Views a tuple of them

    def _receive(self, place: _Place) -> None:
        """The loader's state follows the iterator that began last, until the loader is sent elsewhere."""
        if self._loader._reading is self._token:
            self._loader._received = place

    def _next(self) -> tuple[Tensors, _Drawn]:
        self._gather_ahead()
        if self._device is None:
            slot, size = self._gathered()
            return self._lend(slot, size)
        if not self._device:
            self._start_copy(self._device)
        tensors, drawn = self._device.take(), self._drawn.popleft()
        # Copies of batches that are ready overlap what the consumer does with the one it gets now.
        # An error waits until its batch is due.
        while (
            self._pending
            and self._pending[0].done()
            and not self._pending[0].failed()
            and len(self._device) < max(1, self._loader.prefetch)
        ):
            self._start_copy(self._device)
        self._gather_ahead()
        return tensors, drawn

    def _start_copy(self, device: DevicePrefetch) -> None:
        slot, size = self._gathered()
        self._drawn.append(_drawn(slot, size))
        device.start(slot, size)

    def _gather_ahead(self) -> None:
        """Keep `prefetch` batches under way beyond the one that is due, and announce some that come after them."""
        loader = self._loader
        # Announcements of what is due now go first, so that all of it is asked for before anybody waits for a part.
        self._draw(loader.prefetch + 1 - len(self._pending))
        while self._coming and len(self._pending) <= loader.prefetch:
            indices, windows = self._coming.popleft()
            slot = loader._ring.acquire()
            slot.sizes = None  # of another batch
            finish = self._finish_of()
            self._pending.append(loader._threads.submit(loader._reader, indices, slot, windows, finish))
        if self._announces:
            self._draw(loader._read_ahead)

    def _finish_of(self) -> Finish | None:
        """What is done to a batch when its last part has come."""
        loader = self._loader
        steps: list[Finish] = []
        if loader._guard is not None:
            steps.append(partial(_replace_damaged, loader._guard, self.epoch))
        if loader._squashed and _ours(loader.transform) is not None:
            steps.append(partial(_note_sizes, loader._reader, loader.shards.sample_shape, loader._crop))
        return partial(_do_all, steps) if steps else None

    def _draw(self, count: int) -> None:
        """Let `count` batches be coming, if there are so many."""
        loader = self._loader
        while len(self._coming) < count:
            indices = next(self._batches, None)
            if indices is None:
                return
            windows = loader._crop.windows(self.epoch, indices) if loader._crop else None
            if self._announces:
                loader._threads.announce(loader._reader, indices, windows, self._hints)
                loader._counts.read_ahead_batches += 1
            self._coming.append((indices, windows))

    def _gathered(self) -> tuple[Slot, int]:
        pending = self._pending[0]
        start = time.perf_counter()
        with record_function("shardio.wait"):
            slot = pending.wait()
        counts = self._loader._counts
        counts.wait_seconds += time.perf_counter() - start
        counts.gather_seconds += pending.gather_seconds
        self._pending.popleft()
        if self._loader._guard is not None:
            self._loader._guard.warn()
        return slot, pending.size

    def _lend(self, slot: Slot, size: int) -> tuple[Tensors, _Drawn]:
        drawn = _drawn(slot, size)
        labels, indices = (torch.from_numpy(array[:size].copy()) for array in (slot.labels, slot.indices))
        images = torch.from_numpy(self._loader._ring.lend(slot, size))
        return Tensors(images.permute(0, 3, 1, 2), labels, indices), drawn


def _ours(transform: object) -> Transform | None:
    """The transform of shardio.augment that this is, or that torch.compile was given: it compiles nothing of that, and
    would hide that seed, epoch and samples are wanted."""
    original = transform
    # Only torch's own wrappers are looked through: a user's may do more than what it wraps.
    while getattr(original, "__globals__", {}).get("__name__", "").startswith("torch.") and hasattr(
        original, "__wrapped__"
    ):
        original = original.__wrapped__
    return original if isinstance(original, Transform) else None


def _drawn(slot: Slot, size: int) -> _Drawn:
    return _Drawn(slot.indices[:size].copy(), None if slot.sizes is None else slot.sizes[:size].copy())


def _is_squashed(shards: ShardSet) -> bool:
    """Whether its pictures have lost their aspect ratios, which the index tells."""
    conversion = shards.manifest.provenance.get("conversion")
    return isinstance(conversion, dict) and conversion.get("fit") == "squash"


def _do_all(steps: list[Finish], slot: Slot, size: int) -> None:
    for step in steps:
        step(slot, size)


def _sizes(reader: Reader, shape: SampleShape, crop: Crop | None, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """How large these pictures, or the windows of them, were before they were squashed: height and width, (B, 2)."""
    names = ("source_height", "source_width")
    sizes: NDArray[np.int64] = np.stack([reader.column_of(name, indices) for name in names], axis=1).astype(np.int64)
    if crop is None:
        return sizes
    share = np.array(crop.cropped_shape[:2]) / shape[:2]
    sizes[:] = np.maximum(np.rint(sizes * share), 1)
    return sizes


def _replace_damaged(guard: GuardedReader, epoch: int, slot: Slot, size: int) -> None:
    guard.replace_damaged(epoch, slot.images[:size], slot.labels[:size], slot.indices[:size])


def _note_sizes(reader: Reader, shape: SampleShape, crop: Crop | None, slot: Slot, size: int) -> None:
    slot.sizes = _sizes(reader, shape, crop, slot.indices[:size])


def _make_crop(crop: int | tuple[int, int], at: CropAt, seed: int, sample_shape: SampleShape) -> Crop:
    sides = tuple(crop) if isinstance(crop, (tuple, list)) else (crop, crop)
    if len(sides) != 2:
        raise ValueError(f"crop must be an integer or (height, width); found {crop!r}")
    height, width = sides
    return Crop(as_integer("crop", height), as_integer("crop", width), at, seed, sample_shape)


def _choose_device(device: str | torch.device | None, world: World) -> torch.device:
    if device is not None:
        chosen = _checked_device(device)
    elif torch.cuda.is_available():
        chosen = torch.device("cuda")  # the current one, if nobody says which is this rank's
        if world.local_rank is not None:
            chosen = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    else:
        chosen = torch.device("cpu")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N"; found {device!r}') from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(
            f'device must be a CPU or a CUDA device; found {chosen}: with device="cpu", batches can be moved there'
        )
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        # torch makes other numbers of those that do not fit into eight bits.
        if not 0 <= (chosen.index or 0) < count or (isinstance(device, str) and str(chosen) != device):
            seen = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise ValueError(
                f"device: expected one that torch {torch.__version__} sees here, {seen}; found {device!r}. Look at "
                "CUDA_VISIBLE_DEVICES, the driver and the build of torch; device=None is a GPU where there is one, or "
                "else the CPU"
            )
    return chosen


def _make_copier(device: torch.device) -> Copier | None:
    if device.type == "cpu":
        return None
    from shardio.loading.cuda import CudaCopier

    return CudaCopier(device)
