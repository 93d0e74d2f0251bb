"""Options of a ShardLoader, checked before a set is opened, and what a batch has: images, labels, arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn, TypeAlias

import torch

from shardio.augment.chain import Transform
from shardio.errors import check_choice
from shardio.format.entries import ArrayEntry
from shardio.format.layout import LABEL_ROW, LABELS_NAME, RowType, SampleShape
from shardio.loading.world import World
from shardio.order.orders import as_integer
from shardio.order.sampler import Tail
from shardio.reading.choose import Io
from shardio.reading.layout import SplitLayout
from shardio.reading.mixed import SOURCE, MixedSet

Check = Literal["off", "sample"]
Function: TypeAlias = Transform | Callable[[torch.Tensor], torch.Tensor]


_NO_PROCESSES = "there are no worker processes: leave it out"
_ORDER = "use shuffle=, indices= and weights= to choose samples; each rank reads its own part"

# Arguments of DataLoader and of torch's samplers -> what to do instead.
_INSTEAD = {
    "num_workers": "use num_threads=, the number of threads that copy samples, or leave it out",
    "drop_last": 'use tail="drop" (the default) for True, and tail="short" for False',
    "pin_memory": "on CUDA, batches go through pinned memory anyway: leave it out",
    "pin_memory_device": "use device=",
    "collate_fn": "samples need no collating; use transform= to change a batch",
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "persistent_workers": _NO_PROCESSES,
    "prefetch_factor": "use prefetch=, which counts batches",
    "worker_init_fn": _NO_PROCESSES,
    "multiprocessing_context": _NO_PROCESSES,
    "generator": "use seed=",
    "num_replicas": "use world_size=",  # of DistributedSampler
    "num_samples": "use epoch_batches=, which counts batches",  # of WeightedRandomSampler
    "timeout": "a failed read raises an error in any case: leave it out",
    "in_order": "batches come in order: leave it out",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of `ShardLoader`, under the same names, checked before a set is opened."""

    batch_size: int
    seed: int
    epoch_batches: int | None
    repeats: int
    tail: Tail
    world: World
    """The rank and world size, and where they come from."""
    device: torch.device
    num_threads: int | None
    prefetch: int
    io: Io
    transform: Function | None
    """The loader's first transform: another may be set later."""
    return_indices: bool
    check: Check
    arrays: Sequence[str]
    images: Literal[True] | None
    report_every: float | None

    def __post_init__(self) -> None:
        check_choice("io", self.io, Io)
        check_choice("check", self.check, Check)
        for name in ("batch_size", "seed", "epoch_batches", "repeats", "num_threads", "prefetch"):
            if (value := getattr(self, name)) is not None or name not in ("epoch_batches", "num_threads"):
                object.__setattr__(self, name, as_integer(name, value))
        if (length := self.epoch_batches) is not None and (length < 1 or self.tail != "drop"):
            raise ValueError(
                f"epoch_batches must be at least 1, and needs no tail= (leave it out), as no batch is short; found "
                f"epoch_batches={length}, tail={self.tail!r}"
            )
        if (self.num_threads is not None and self.num_threads < 1) or not 0 <= self.prefetch < 1 << 31:
            found = f"num_threads={self.num_threads}, prefetch={self.prefetch}"
            raise ValueError(f"num_threads must be at least 1 and prefetch from 0 to 2**31 - 1; found {found}")
        if self.images is not True and self.images is not None:
            raise ValueError(f"images must be True, or None to read no pixels; found {self.images!r}")
        check_function(self.transform)
        every = self.report_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, (int, float)) or not every > 0):
            raise ValueError(f"report_every must be a number of seconds above 0, or None; found {every!r}")
        object.__setattr__(self, "arrays", as_names(self.arrays))


def refuse_options(names: Iterable[str]) -> NoReturn:
    """Raises TypeError: ShardLoader has no arguments `names`. For arguments of torch, it says what to use instead."""
    found = list(names)
    known = [f"{name}: {_INSTEAD[name]}" for name in found if name in _INSTEAD]
    if known:
        raise TypeError(f"ShardLoader does not have these arguments of torch: {'; '.join(known)}")
    raise TypeError(f"ShardLoader got an unexpected keyword argument {found[0]!r}")


def check_function(transform: object) -> None:
    """Raises TypeError unless `transform` is None or can be called with a batch. Refuses every class, and a Transform
    that overrides `__call__`."""
    if isinstance(transform, type):
        raise TypeError(f"transform must not be a class; found {transform.__name__}: use {transform.__name__}(...)")
    if isinstance(transform, Transform) and type(transform).__call__ is not Transform.__call__:
        raise TypeError(
            f"transform: {type(transform).__name__} must override apply(), which loaders call, not __call__()"
        )
    if transform is not None and not callable(transform):
        raise TypeError(
            f"transform must be from shardio.augment, or a function of a batch of images; found {transform!r}"
        )


@dataclass(frozen=True)
class Parts:
    """Which parts a batch has: images, labels, and `arrays` by name, which include labels that are not integers."""

    image_shape: SampleShape | None
    """(height, width, channels) of images; None if there are none."""
    label_row: RowType | None
    """The dtype and shape of a label; None if there are no labels."""
    arrays: Mapping[str, ArrayEntry]
    source: bool = False
    """Whether batches have the number of each sample's set, as batches of a mixture do."""

    @property
    def masks(self) -> tuple[str, ...]:
        return tuple(name for name, array in self.arrays.items() if array.kind == "mask")

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of the arrays in a batch's dict, without labels."""
        return tuple(name for name in self.arrays if name != LABELS_NAME)

    @property
    def stored_shape(self) -> SampleShape:
        """The shape of an image in a slot; (0, 0, 0) if there are no images."""
        return self.image_shape or (0, 0, 0)

    @property
    def rows(self) -> dict[str, RowType]:
        """The dtype and shape of one sample's value, by name: for each array, and for the sample's set number."""
        source = {SOURCE: LABEL_ROW} if self.source else {}
        return {**{name: array.row for name, array in self.arrays.items()}, **source}


def as_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of arrays as a tuple. Raises TypeError unless they are a list of strings."""
    if not isinstance(names, (str, bytes)) and isinstance(names, Iterable):
        found = tuple(names)
        if all(isinstance(name, str) for name in found):
            return found
    raise TypeError(f"arrays must be a list of names; found {names!r}")


def find_parts(layout: SplitLayout | MixedSet, arrays: Sequence[str], images: Literal[True] | None = True) -> Parts:
    """Returns the parts of batches with the arrays named `arrays`, and with the pixels unless `images` is None.

    If the split has no pixels and `arrays` is empty, all arrays are included. Raises ValueError for a name that the
    split does not have, or that the sets of a mixture have in different types.
    """
    if isinstance(layout, MixedSet):
        every = [find_parts(one, arrays, images) for one in layout.sets]
        mine, *_ = types = [{name: (array.kind, array.row) for name, array in one.arrays.items()} for one in every]
        for one, theirs in zip(layout.sets, types, strict=True):
            if SOURCE in theirs:
                raise ValueError(
                    f"{one.path}: the array {SOURCE!r} cannot be in batches of a mixture, which have the number of "
                    "each sample's set under this name: choose arrays= without it"
                )
            if theirs != mine:
                raise ValueError(
                    f"{one.path}: expected arrays {mine}, as {layout.sets[0].path} has, found {theirs}: choose arrays= "
                    "that all sets have with the same types"
                )
        return replace(every[0], source=True)
    where = f"{layout.path}, {layout.split}"
    known = [name for name in layout.content.arrays if name != LABELS_NAME]
    for number, name in enumerate(arrays):
        if name not in known:
            raise ValueError(f"{where}: arrays must be among {', '.join(known) or 'none'}; found {name!r}")
        if name in arrays[:number]:
            raise ValueError(f"{where}: arrays must not repeat a name; found {name!r} twice")
    if not layout.has_pixels and not arrays:
        arrays = known
    labels = (LABELS_NAME,) if LABELS_NAME in layout.content.arrays else ()
    return Parts(
        None if images is None else layout.manifest.sample_shape,
        layout.content.label_row,
        {name: layout.array(name) for name in (*arrays, *labels)},
    )


def choose_device(device: str | torch.device | None, world: World) -> torch.device:
    """Returns the requested device, or for None the GPU of the local rank, or the CPU if there is no GPU.

    Raises ValueError if torch does not see the requested device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and world.local_rank is not None:
            device = f"cuda:{world.local_rank % torch.cuda.device_count()}"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N"; found {device!r}') from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(
            f'device must be a CPU or a CUDA device; found {chosen}: use device="cpu", and move batches to {chosen}'
        )
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        # torch makes other numbers of those that do not fit into eight bits.
        if not 0 <= (chosen.index or 0) < count or (isinstance(device, str) and str(chosen) != device):
            seen = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise ValueError(
                f"device must be one that torch {torch.__version__} sees here: {seen}; found {device!r}. Check "
                "CUDA_VISIBLE_DEVICES, the driver and the build of torch; "
                "device=None chooses a GPU if there is one, otherwise the CPU"
            )
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
