"""ShardLoader: the options, the order and the pipeline of a loader, put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from numpy.typing import ArrayLike

from shardio.augment.chain import Transform
from shardio.cache.cached_split import open_source
from shardio.errors import printable
from shardio.kernels.built import warn_of_missing_kernels
from shardio.loading.device import choose_device, make_copier
from shardio.loading.iterator import LoaderIterator
from shardio.loading.options import Check, OnDamage, Options
from shardio.loading.pipeline import Pipeline
from shardio.loading.report import Report
from shardio.loading.reporter import To
from shardio.loading.state import Position
from shardio.loading.torchlike import LikeDataLoader, refuse_options
from shardio.loading.transform import Function
from shardio.loading.world import World, check_world, find_world
from shardio.order.orders import Order, Shuffle, as_integer, make_order
from shardio.order.sampler import Sampler, Tail
from shardio.reading.choose import Io
from shardio.system.eager import eager


class ShardLoader(LikeDataLoader):
    """Batches of one split of a shard set, for one rank, epoch after epoch.

        loader = ShardLoader("out/", batch_size=256)
        for images, labels in loader: ...

    `images` is uint8 (B, C, H, W) in channels_last memory, `labels` int64 (B,). On the CPU `images` is a view of a
    slot, which is reused when the batch and all views of it are gone: `list(loader)` is right. On CUDA all tensors are
    the caller's own, ready for the current stream. With `return_indices=True` a third tensor holds the global sample
    indices, int64 (B,).

    `arrays` and `columns` are names of arrays of the split, and of numbers in its index: its own columns,
    "source_width", "source_height" and "crc32". Each batch then ends with a dict of tensors (B, ...), by name, in the
    order asked for. On the CPU, arrays are views of the slot, as images are.

    `shuffle=True` is a permutation of all samples, `False` the stored order. "block" keeps reads together for slow or
    network storage: blocks of `block_size` consecutive samples in permuted order, and the samples of every
    `window_blocks` blocks permuted (see `shardio.order.orders`). `indices` are the samples to read instead of all,
    twice if given twice; "stored" and "consecutive" then mean their order. `weights`, one per sample (of `indices`),
    draw with replacement, `num_draws` times per epoch. The order depends on these, `seed` and the epoch alone, never on
    threads or ranks.

    Each `iter()` begins the next epoch with its first batch: from 0, or the one given to `set_epoch`. `state_dict` and
    `load_state_dict` stop and go on anywhere, on any number of ranks. `batch_size` is that of one rank, and `tail` is
    what becomes of the last, short batch: see `shardio.order.sampler.Sampler`. `rank` and `world_size` come from
    torch.distributed or the launcher if they are not given. `device=None` is the GPU of the local rank, or the CPU if
    there is none. `num_threads` gather threads keep `prefetch` batches ready ahead of the consumer.

    `transform` is called with each batch of images, in the consuming thread. One of `shardio.augment` changes labels,
    too, if it mixes, and the masks and boxes of the batch as it changes the pictures. It draws random numbers by
    (`seed`, epoch, sample), or by the position in the epoch's order where samples may come more than once in an epoch
    (`weights`, or `indices` that has some twice). If the set was made with `--fit squash`, it is told how large the
    pictures were before, and treats them as they were. Any other function gets the images alone, and is a ValueError
    beside masks and boxes, or if it draws random numbers once for all images of a batch, as torchvision does:
    `shardio.augment.PerSample` calls it for each image.

    The first part of such a transform, its crops, resizes and flips, is known before a byte is read. So only what that
    sees of each picture is read: half of the bytes with RandomResizedCrop. The pixels are the same. This is so if
    nothing that follows crops or resizes again, and samples are not checked or skipped. On the CPU, the gather threads
    do that part, if they are at least as many as torch has (`torch.get_num_threads()`, at most 16), which is the
    default then; where they wait for storage (pread, direct, a copy in the making), the consuming thread does it, of
    the rows that were read. A GPU is sent the windows alone, if `transform` is there when the loader is made.
    roi=False reads whole pictures.

    `io` is how samples come from storage. "mmap" copies them from the page cache, into which the kernel brings coming
    batches ahead. "pread" reads them from the files with many requests under way, which suits network filesystems: a
    thread that waits for a mapped page cannot be interrupted. "direct" is the same past the page cache (O_DIRECT), for
    sets larger than memory. "auto" looks at the filesystem, the memory that is left and the page cache.

    `cache` is a folder on this node's own disk. The set is copied there once for all processes of the node that ask
    for it; `path` may then be a URL. Training begins at once: the loader reads from `path` what has not been copied
    yet, and copies first what the first batches of epoch 0 need. A copy is not evicted as long as a loader has it open.
    If it cannot be made, for lack of room say, a warning tells, and `path` is read all the time.

    `digest` pins the content of the set: the digest that `shardio info` prints, or its first 12 digits or more.

    Labels, columns and orders are compared with the manifest's sha256 when the loader is made, whatever `check` is.

    check="sample" compares the crc32 of every sample that is read with the index, and that of every value of an array,
    in the gather threads, and reads whole samples. It reads a sample that differs once more, past the
    page cache if that is possible; with `cache`, from `path`, and if the sample is sound there, a thread verifies the
    copy and mends it. A damaged sample is a FormatError that names file, sample and byte. With on_damage="skip" it is a
    RuntimeWarning, the first time, and another sample of the same batch, which (`seed`, epoch, sample) decide, takes
    its place with its label and index. Shapes, the number of batches and states stay what they are. Without `check`,
    that covers samples that storage does not give (EIO) and that a file no longer has. A batch without a sound sample
    is an error.

    Every `report_every` seconds in which batches were asked for, a thread prints one line to stderr: images per second,
    the share of the time that the loop waited for data, and what limits. Under torch.distributed rank 0 prints it, and
    one line for all ranks. `report_to` is called in that thread, on each rank, with the `Report` instead:
    `shardio.loading.exports` has some for TensorBoard and Prometheus.

    Opening raises SetNotFoundError, or FormatError for a damaged set or another one than `digest` says. What storage
    fails to give is asked for again for a second; then OSError names file, byte and sample. An error in a gather thread
    is raised where its batch was due. One thread at a time asks for batches, of all iterators of a loader: `next()` in
    a second one is a RuntimeError. `state_dict()`, `stats()`, `report()` and `close()` may be called in any thread; a
    state is that of the batch returned last. `close()`, leaving the `with` block, or forgetting the loader ends the
    threads. A loader survives neither fork() nor pickling: make it in the process that uses it. It takes the place of
    torch's DataLoader, and is not to be given to one.
    """

    @eager
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
        transform: Transform | Callable[[torch.Tensor], torch.Tensor] | None = None,
        return_indices: bool = False,
        digest: str | None = None,
        check: Check = "off",
        on_damage: OnDamage = "raise",
        arrays: Sequence[str] = (),
        columns: Sequence[str] = (),
        report_every: float | None = None,
        report_to: To | None = None,
        roi: bool = True,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            refuse_options(unknown)
        warn_of_missing_kernels()
        options = Options(
            *(seed, prefetch, num_threads, io, check, on_damage, transform, arrays, columns),
            *(report_every, report_to, roi),
        )
        self.prefetch = options.prefetch
        self.return_indices = return_indices
        self.world = find_world(rank, world_size)
        source = open_source(path, split, cache, digest)
        try:
            order = make_order(
                source.num_samples,
                shuffle=shuffle,
                seed=options.seed,
                block_size=block_size,
                window_blocks=window_blocks,
                weights=weights,
                num_draws=num_draws,
                indices=indices,
            )
            sampler = _sampler(order, as_integer("batch_size", batch_size), self.world, tail)
            self.device = choose_device(device, self.world)
            self.shards = source.open(sampler.batches(0))
            self._position = position = Position(sampler, self.shards)
            copier = make_copier(self.device)
            # Last: from here on the pipeline owns the source, and nothing can fail any more.
            self._pipeline = Pipeline(
                *(source, self.shards, options, sampler.batch_size, position.num_distinct, copier, self.world),
                *(self.device, position.indices),
            )
        except BaseException:  # an error that is kept keeps this frame, and with it the source
            source.close()
            raise

    @property
    def transform(self) -> Function | None:
        """The function that is called with each batch of images. It may be set at any time."""
        return self._pipeline.transform.function

    @transform.setter
    def transform(self, transform: Function | None) -> None:
        self._pipeline.transform.function = transform

    @property
    def num_threads(self) -> int:
        return self._pipeline.num_threads

    def __repr__(self) -> str:
        world, closed = self.world, ", closed" if self.closed else ""
        beside = f" with {', '.join(self._pipeline.rows)}" if self._pipeline.rows else ""
        return printable(
            f"<ShardLoader {self.shards.path}, {self.shards.split}: {len(self)} batches of {self.batch_size} "
            f"x {self._pipeline.image_shape}{beside}, rank {world.rank} of {world.world_size}, on {self.device}"
            f"{closed}>"
        )

    @eager
    def __iter__(self) -> LoaderIterator:
        check_world(self.world)
        return LoaderIterator(
            self._pipeline, self._position, prefetch=self.prefetch, return_indices=self.return_indices
        )

    @property
    def num_repeats(self) -> int:
        """How many samples, the last ones, of the batch received last have come earlier in the same epoch.

        More than 0 only in an epoch's last batch with tail="pad": leave them out of what is counted or averaged.
        """
        return self._position.num_repeats

    @property
    def damaged(self) -> list[int]:
        """The damaged samples that others replaced, in ascending order; also of batches that were read ahead. Always
        empty with on_damage="raise"."""
        return self._pipeline.damaged

    def report(self) -> Report:
        """Returns whether data has been the bottleneck since the loader was made, what limits, and what to change: as
        text, if printed."""
        return self._pipeline.report()

    def stats(self) -> dict[str, Any]:
        """Returns what was delivered since the loader was made, and the seconds spent on it.

        `loop_seconds`: from batch to batch, without the time between epochs; `wait_seconds`: the consumer waiting for
        batches, for `first_wait_seconds` of it for the first of an epoch; `transform_seconds`: the consumer's thread in
        the transform; `gather_seconds`: all gather threads together, copying, for `gather_cpu_seconds` of it on a core;
        `copy_seconds`: the GPU, by its own clock, copying batches whose copies are known to be done; `stall_seconds`:
        the stream on which they are used, waiting for these copies. Both are 0.0 on the CPU. `waited` is the share of
        the time that the loop waited for data, first batches apart, and `limited_by` what limits: see `report`.
        `io` is how samples are read, for `io_reason`; `read_nbytes` were read so, with `read_retries` because of errors
        or a wrong crc32; `damaged` samples were replaced by others; `read_ahead_batches` were announced to the kernel,
        and `read_ahead_hits` is the share of their samples that was in the page cache when it was due (told by a few of
        each batch; None if none were announced, or if the files are not ours and the kernel does not tell). `staging`
        tells how far the copy in the cache is: None without `cache`. `kernels` copy samples, read them from files and
        resample them on the CPU. `roi` tells whether gather threads read only what the transform sees. `slots` were
        made for batches; `slots_free` of them wait for reuse, the others are being filled, are ready, or are in the
        consumer's hands.

        In a trace of torch.profiler, the consumer's thread shows "shardio.wait" for a batch that is not ready,
        "shardio.copy" for starting its way to the GPU, and "shardio.transform".
        """
        return {**self._pipeline.stats(), "device": str(self.device)}

    def close(self) -> None:
        """Ends the gather threads. Batches already delivered stay valid. May be called again, also where an exception,
        of a signal handler say, has interrupted it: then it goes on."""
        self._pipeline.close()

    @property
    def closed(self) -> bool:
        return self._pipeline.closed

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


def _sampler(order: Order, batch_size: int, world: World, tail: Tail) -> Sampler:
    sampler = Sampler(order, batch_size, world.rank, world.world_size, tail)
    if not sampler.num_batches:
        raise ValueError(
            f"expected at least one batch, but {order.num_samples} samples are fewer than the global batch of "
            f'{sampler.global_batch_size}, and tail="drop" leaves out what is short: use a smaller '
            'batch_size, or tail="pad" or "short"'
        )
    return sampler
