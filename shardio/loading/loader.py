"""ShardLoader, which iterates over the batches of one split."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NoReturn

import torch
from numpy.typing import ArrayLike

from shardio.cache.cached_split import open_source
from shardio.errors import printable
from shardio.loading.agree import Agreement
from shardio.loading.dataset import LoaderDataset, RankSampler
from shardio.loading.iterator import LoaderIterator
from shardio.loading.mixture import Mixture, Sets, open_mixture
from shardio.loading.options import Check, Function, Options, check_function, choose_device, refuse_options
from shardio.loading.pipeline import Pipeline
from shardio.loading.report import LoaderReport
from shardio.loading.state import Position
from shardio.loading.world import World, check_world, find_world, meet_in_torch
from shardio.order.mixture import MixedOrder
from shardio.order.orders import Endless, Order, Shuffle, make_order
from shardio.order.sampler import Sampler, Tail
from shardio.reading.choose import Io, SplitSource
from shardio.reading.mixed import MixedSource
from shardio.system.eager import eager, warn_caller
from shardio.system.opening import Living


class ShardLoader:
    """Batches of one split of a shard set, for one rank, epoch after epoch.

        with ShardLoader("out/", batch_size=256) as loader:
            for images, labels in loader: ...

    A batch is a tuple of the parts that exist, in this order: images, uint8 (B, C, H, W) in channels_last memory;
    labels, int64 (B,), or float32 (B,) or (B, K) where the set has such labels; sample indices, int64 (B,); a dict of
    arrays by name, (B, ...). A batch stays valid while you hold it or a view of it. Each `iter()` is a new
    epoch, which begins when its first batch is requested. Only one thread at a time may request batches;
    `state_dict()`, `stats()`, `report()` and `close()` may be called in any thread.

    Arguments, and when to set them. All up to `tail`, and `transform`, are the same on all ranks:

    path: the set: a folder, or a URL if there is a `cache`. `~` is expanded. A dict from path to share, a list
        of `Part`, or a `Mixture` mixes sets.
    batch_size: samples per batch and rank.
    split: the split to read, such as "val".
    shuffle: True permutes all samples, which is right for training. False is the stored order, for evaluation. "block"
        or BlockShuffle(size, window) keeps reads together, for sets larger than memory on slow storage.
    seed: change it for another order and other augmentation. Both depend on seed, epoch and sample alone.
    weights: a weight per sample, to draw rare classes more often. Samples are drawn with replacement.
    epoch_batches: batches per epoch, for training by steps: each epoch continues where the previous epoch ended,
        permutation after permutation, without a tail. By default, an epoch is one permutation, or as many draws as
        `weights`.
    repeats: how often each sample comes in its global batch, augmented anew each time (repeated augmentation). An
        epoch then draws 1 / repeats of the samples.
    indices: the samples to read instead of all, for subsets and folds. `weights` then has a weight for each of them.
    tail: what to do with a short last batch. "drop" is right for training, "short" for evaluation, "pad" where all
        batches must have the same size and no sample may be left out (see `num_padded`).
    rank, world_size: where neither torch.distributed nor the launcher sets them, or several jobs share a launcher.
    device: "cpu" to leave batches on the CPU. None is the GPU of the local rank, or the CPU if there is no GPU.
    num_threads: fewer gather threads where other processes need the cores, more where storage has a high latency.
    prefetch: batches to read ahead: more where steps take very different times; 0 to hold as little memory as possible.
    io: "mmap", "pread" or "direct" where "auto", which looks at filesystem, memory and page cache, chooses wrong.
    cache: a folder on the node's own disk, if the set is on slower storage or at a URL. Training begins at once.
    together: with `cache`, True reads the set once for all nodes of torch.distributed. All ranks make their loaders in
        the same order.
    transform: a transform of `shardio.augment`, which also changes masks and mixed labels, and draws random
        numbers by (seed, epoch, sample); or a function of a batch of images, called in the thread that requests
        batches. It is fixed for an epoch.
    return_indices: True adds the sample indices to each batch.
    digest: the digest that the set must have, as `shardio info` prints it, or its first 12 digits: for reproducible
        experiments.
    check: "sample" compares the crc32 of everything that is read, where a disk or its cables are in doubt.
    arrays: names of arrays of the split to add to each batch. By default none, or all arrays if the set has no pixels.
        What the index records, such as the sizes of the source images, needs no array: `loader.shards.index[indices]`;
        for a mixture, `loader.shards.column_of("source_width", indices)`.
    images: None to read no pixels, for training on arrays alone. By default (True) the pixels, if there are any.
    report_every: seconds between lines on stderr that say whether training waits for data, and for what.

    Opening raises SetNotFoundError, or FormatError if the set is damaged or has another digest. An error in a
    gather thread is raised where its batch was due. The threads end when the loader is closed or garbage collected, or
    its `with` block ends. A loader survives neither fork() nor pickling. Use it instead of torch's DataLoader: it has
    the attributes of DataLoader, DistributedSampler and StatefulDataLoader that frameworks read.
    """

    batch_sampler = None
    """Always None. If there were a batch sampler, frameworks would build their own DataLoader over `dataset`."""

    @eager
    def __init__(
        self,
        path: Sets,
        batch_size: int,
        *,
        split: str = "train",
        shuffle: Shuffle = True,
        seed: int = 0,
        weights: ArrayLike | None = None,
        epoch_batches: int | None = None,
        repeats: int = 1,
        indices: ArrayLike | None = None,
        tail: Tail = "drop",
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device | None = None,
        num_threads: int | None = None,
        prefetch: int = 2,
        io: Io = "auto",
        cache: str | os.PathLike[str] | None = None,
        together: bool = False,
        transform: Function | None = None,
        return_indices: bool = False,
        digest: str | None = None,
        check: Check = "off",
        arrays: Sequence[str] = (),
        images: Literal[True] | None = True,
        report_every: float | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            refuse_options(unknown)
        world = find_world(rank, world_size)
        options = Options(
            batch_size=batch_size,
            seed=seed,
            epoch_batches=epoch_batches,
            repeats=repeats,
            tail=tail,
            world=world,
            device=choose_device(device, world),
            num_threads=num_threads,
            prefetch=prefetch,
            io=io,
            transform=transform,
            return_indices=return_indices,
            check=check,
            arrays=arrays,
            images=images,
            report_every=report_every,
        )
        self._iterators: Living[LoaderIterator] = Living()
        if together and cache is None:
            raise ValueError("together=True copies into a cache on each node: set cache=, a folder on its own disk")
        meet = meet_in_torch if together else lambda: None
        source: SplitSource | MixedSource
        order: Order
        if isinstance(path, (str, os.PathLike)):
            source = open_source(path, split, cache, digest, meet)
        else:
            mixture = path if isinstance(path, Mixture) else Mixture(path)
            given = {"weights": weights, "indices": indices, "digest": digest}
            if wrong := [name for name, value in given.items() if value is not None]:
                raise ValueError(f"{wrong[0]} is for one set: for a mixture, set shares, indices and digest by Part")
            if epoch_batches is None:
                raise ValueError("a mixture is endless: set epoch_batches=, the number of batches per epoch")
            source, order = open_mixture(mixture, split, cache, meet, shuffle, options.seed)
        try:
            if not isinstance(source, MixedSource):
                order = make_order(
                    source.num_samples, shuffle=shuffle, seed=options.seed, weights=weights, indices=indices
                )
            sampler = _sampler(order, options)
            self.shards = source.open(sampler.batches(0))
            self._position = Position(sampler, self.shards)
            self._agreement = Agreement(world, split)
            if options.tail == "short":  # no batch has more samples
                most = -(-order.num_samples // world.world_size)
                options = replace(options, batch_size=min(options.batch_size, most))
            # Last: from here on the pipeline owns the source, and nothing can fail any more.
            self._pipeline = Pipeline(source, self.shards, options, self._position.indices)
        except BaseException:  # an error that is kept keeps this frame, and with it the source
            source.close()
            raise

    def __setattr__(self, name: str, value: object) -> None:
        # A subclass may have such attributes of its own.
        if type(self) is ShardLoader and name in ShardLoader.__init__.__annotations__ and name != "transform":
            raise AttributeError(f"{name} of a ShardLoader cannot be set: make another loader with {name}=")
        super().__setattr__(name, value)

    @property
    def transform(self) -> Function | None:
        """The function that is called with each batch. It may be set between epochs."""
        return self._pipeline.transform.function

    @transform.setter
    def transform(self, transform: Function | None) -> None:
        if running := [iterator for iterator in self._iterators.all() if iterator.is_running]:
            raise RuntimeError(
                f"transform can be set between epochs only; found an epoch with {len(running[0])} batches to come: "
                "finish the loop first, or drop its iterator"
            )
        check_function(transform)
        self._pipeline.set_transform(transform)

    @property
    def prefetch(self) -> int:
        return self._pipeline.options.prefetch

    @property
    def world(self) -> World:
        """Rank and world size, and where they come from."""
        return self._pipeline.options.world

    @property
    def device(self) -> torch.device:
        """The device on which batches are delivered."""
        return self._pipeline.options.device

    def __repr__(self) -> str:
        world, closed = self.world, ", closed" if self.closed else ""
        parts = self._pipeline.parts
        arrays = f" with {', '.join(parts.rows)}" if parts.rows else ""
        return printable(
            f"<ShardLoader {self.shards.path}, {self.shards.split}: {len(self)} batches of {self.batch_size} "
            f"x {parts.image_shape or 'no pixels'}{arrays}, rank {world.rank} of {world.world_size}, on "
            f"{self.device}{closed}>"
        )

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank. With tail="short", the last batch of an epoch may be smaller."""
        return self._position.sampler.batch_size

    @cached_property
    def dataset(self) -> LoaderDataset:
        """The dataset that an epoch draws its samples from. Frameworks expect it of a DataLoader."""
        return LoaderDataset(self.shards, self._position.indices, self._pipeline.parts.array_names)

    @property
    def sampler(self) -> RankSampler:
        """A sampler of the indices of the samples read next, with `set_epoch`. Frameworks expect it of a DataLoader."""
        return RankSampler(self._position)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next `iter()` begin this epoch. If it is not called, each `iter()` begins the next epoch.

        Setting the epoch of a state that was just loaded is harmless: `iter()` still resumes where the state was taken.
        """
        self._position.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return self._position.sampler.num_batches

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "a ShardLoader gives whole batches and has no single samples: do not wrap it in a DataLoader, or wrap a "
            "ShardDataset instead; loader.dataset[i] is a single sample"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the training loop as JSON values. Counts batches received, not batches read ahead.

        `consumed` is the number of samples of the epoch that all ranks together have received. The state is the same
        on every rank, and does not depend on the number of ranks.
        """
        return self._position.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` resume where `state` was taken, with exactly the samples not yet consumed.

        The number of ranks, the batch size and the tail may differ. If the state was taken after an epoch's last batch,
        the next `iter()` yields the samples that tail="drop" left out, usually none, and the second `iter()` begins the
        next epoch, as a loop over epochs expects. Raises ValueError if the state belongs to another set, split or
        order.
        """
        self._position.load_state(state)
        _warn_of_empty(self._position.rest())

    @eager
    def __iter__(self) -> LoaderIterator:
        check_world(self.world)
        iterator = LoaderIterator(self._pipeline, self._position, self._agreement)
        self._iterators.add(iterator)
        return iterator

    def peek(self) -> tuple[Any, ...]:
        """Returns the batch that comes next, and moves nothing: for a picture, a lazy model, a compiler's warm-up.

        That is the next batch of the iterator that delivered last; between epochs, the first batch of the next epoch.
        It is read for you alone, and again for the loop. torch's generators are restored.
        """
        check_world(self.world)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return next(LoaderIterator(self._pipeline, self._position.ahead(), None))

    @property
    def num_padded(self) -> int:
        """The number of samples at the end of the latest batch that came earlier in the same epoch.

        More than 0 only in an epoch's last batch with tail="pad". Leave these samples out of averages.
        """
        return self._position.num_padded

    def report(self) -> LoaderReport:
        """Returns a report on whether data has been the bottleneck so far. Print the report to see cause and advice."""
        return self._pipeline.report()

    def stats(self) -> dict[str, Any]:
        """Returns the loader's counters since it was made. Any thread may call this.

        batches, images, nbytes: delivered batches, images and bytes.
        loop_seconds: time of the training loop from batch to batch, without the time between epochs.
        wait_seconds, first_wait_seconds: waits for batches, and the part spent on the first batch of each epoch.
        transform_seconds: time that the consumer's thread spent in the transform.
        gather_seconds, gather_cpu_seconds: time of all gather threads together, and the part of it on a core.
        copy_seconds, stall_seconds: time that the GPU copied batches, and that its stream waited for these copies. 0.0
            on the CPU.
        waited, limited_by: the share of the time spent waiting for data, without first batches, and the cause.
        io, io_reason: how samples are read, and why.
        read_nbytes, read_retries: bytes read, and reads that were repeated after an error or a wrong crc32.
        read_ahead_batches, read_ahead_hits: batches announced to the kernel, and the share of their samples that was in
            the page cache in time. The share is None if nothing was announced, or the kernel does not report it.
        staging: the progress of the copy in the cache. None without `cache`.
        slots, slots_free: slots made for batches, and slots waiting for reuse.
        shares: of a mixture, the share of each set among the samples of the stream so far.
        roi: whether gather threads make the pixels of the transform, from the regions of pictures that it uses.

        A trace of torch.profiler shows "shardio.wait", "shardio.copy" and "shardio.transform" in the consumer's thread.
        """
        shares = {} if (found := self._position.shares) is None else {"shares": found}
        return {**self._pipeline.stats(), **shares, "device": str(self.device)}

    def close(self) -> None:
        """Ends the gather threads. Delivered batches stay valid. May be called again, also after an interrupt.

        If the storage does not answer for a second, warns with the file's name, and leaves the threads that wait.
        """
        self._pipeline.close()

    @property
    def closed(self) -> bool:
        return self._pipeline.closed

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ShardLoader has threads, and cannot be pickled or copied: make it in the process that uses it"
        )


def _sampler(order: Order, options: Options) -> Sampler:
    if options.epoch_batches is not None and not isinstance(order, MixedOrder):
        order = Endless(order)
    sampler = Sampler(
        order,
        options.batch_size,
        options.world.rank,
        options.world.world_size,
        options.tail,
        length=options.epoch_batches,
        repeats=options.repeats,
    )
    if not sampler.num_batches:
        raise ValueError(
            f"expected at least one batch, but {order.num_samples} samples are fewer than the global batch of "
            f'{sampler.global_batch_size}, and tail="drop" leaves out short batches: use a smaller '
            'batch_size, or tail="pad" or "short"'
        )
    _warn_of_empty(sampler)
    return sampler


def _warn_of_empty(sampler: Sampler) -> None:
    start, stop = sampler.bounds(sampler.num_batches - 1) if sampler.num_batches else (0, 1)
    if start == stop:
        warn_caller(
            f'tail="short" leaves the last batch of an epoch empty on rank {sampler.rank} of {sampler.world_size}: '
            'pass over an empty batch, and divide sums by counts; or use tail="pad", and leave out the last num_padded '
            "samples of a batch"
        )
