"""Defines each option of `convert` once: its type, its default, its help, and when to choose which value.

`convert` takes these options as arguments, and the command line makes its options from them. So this module imports
nothing slow.
"""

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

from shardio.errors import check_choice, show
from shardio.system.machine import usable_cores

if TYPE_CHECKING:
    from shardio.conversion.arrays import ArrayDeclaration
    from shardio.conversion.sources.table import Tables
    from shardio.format.layout import SampleShape

SourceKind = Literal["auto", "tree", "ilsvrc", "kaggle", "tiny-imagenet", "list", "webdataset", "parquet", "arrays"]
Labels = Literal["folders", "leaf", "none", "classes", "numbers"]
Unlabeled = Literal["refuse", "skip"]
EmptyClasses = Literal["refuse", "omit", "keep"]
FitMode = Literal["crop", "squash", "pad", "adm"]
Resample = Literal["bicubic", "bilinear", "lanczos"]
Quality = Literal["exact", "fast"]
Pixels = Literal["rgb", "yuv420"]
StoredOrder = Literal["shuffled", "source"]
Size = int | tuple[int, int]

# The options that decide the bytes of the set. Those of images do not matter to samples without pixels.
_OF_IMAGES = ("size", "fit", "resample", "quality", "exif_rotate", "background", "pixels", "mask_suffix")
_OF_ARRAYS = ("shard_size", "order", "seed", "val")
# The options that a manifest has only if they are given.
_RARE = ("val", "mask_suffix")
# Other names of options in a manifest.
_DESCRIBED = {"shard_size": "shard_nbytes"}

P = ParamSpec("P")
R = TypeVar("R")
Src = TypeVar("Src")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Progress:
    """How many sources of a conversion, or of one part of a conversion, are done. `refused` counts some of the done."""

    done: int
    refused: int
    total: int
    spooled: int = 0
    """Sources copied out of parquet or NPZ files. Copying ends before the first source is converted."""
    kept: int = 0
    """Sources in shards that earlier calls finished. `done` includes them before this call converts a source."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """In words, what the conversion has understood or guessed of SRC."""
    waits: str = ""
    """In words, the other call that makes the same shards, for which this call waits; "" if this call does not wait."""


def _option(default: Any, help: str, *, metavar: str | None = None, least: int | None = None) -> Any:
    """Returns the field of an option that the command line has, too, with this `help`. `least` is its minimum."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "least": least})


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of `convert`; `shardio convert --help` explains them, and the text after each says when to choose it.

    Raises ValueError for an invalid value.
    """

    source: SourceKind = _option(
        "auto", f"Kind of SRC: {', '.join(get_args(SourceKind)[1:])}. auto: detect it.", metavar="KIND"
    )
    """The kind of storage at a path. Choose a kind if "auto" finds two; the report names the kind that was found."""
    labels: Labels | None = _option(
        None,
        "folders: the top folders of SRC, or of each split, are classes. leaf: the deepest folders are. none: no image "
        "has a label. classes, numbers: what the labels of a table are.  "
        "[default: folders of images are classes]",
    )
    """Choose a value if the folders in SRC may or may not be classes. "none" is also for training without labels."""
    unlabeled: Unlabeled = _option("refuse", "Images without a label in a split that has labels. skip: leave them out.")
    """Choose "skip" for a table in which only some images have labels yet."""
    empty_classes: EmptyClasses = _option(
        "refuse", "Class folders without images. omit: they get no label. keep: they get a label that no sample has."
    )
    """For a part of a collection: "omit" for classes of its own, "keep" for the same labels as the whole collection."""
    size: Size | None = _option(256, "Height and width of every sample, in pixels.", metavar="N|HxW")
    """(height, width), or one number for both: a little more than the crops of training. None for no pixels."""
    fit: FitMode = _option(
        "crop",
        "crop: resize the short side to SIZE, then crop the center. squash: ignore the aspect ratio. pad: "
        "add black margins. adm: crop as ADM, DiT, SiT and EDM2 do.",
    )
    """Choose "squash" to crop the whole picture in training, "pad" to keep all borders, "adm" to compare FIDs."""
    resample: Resample = _option("bicubic", "Filter for resizing, antialiased.")
    """Choose the filter that a pretrained model was trained with."""
    quality: Quality = _option(
        "exact", "fast: decode JPEGs of at least four times SIZE at 1/2, 1/4 or 1/8 of their size (45 to 52 dB PSNR)."
    )
    """Choose "fast" for large photos: decodes JPEGs at 1/2, 1/4 or 1/8, but at least at twice the resized size."""
    pixels: Pixels = _option(
        "rgb",
        "rgb: three bytes a pixel. yuv420: half of that, with color at half the height and width, as in most JPEGs.",
    )
    """Choose "yuv420" for a set of half the size; docs/guide/sizing.md has what it costs. The size must be even."""
    shard_size: int = _option(
        1 << 30, "Maximum size of a shard file. A shard also has at most 16,384 samples.", metavar="SIZE"
    )
    """In bytes. Choose less if there are more workers than shards."""
    order: StoredOrder = _option(
        "shuffled", "Order of the samples. shuffled: any contiguous run is a random sample of the set."
    )
    """Choose "source", the order of the sources, if other files refer to the samples by number."""
    seed: int = _option(0, "Seed of the order.", least=0)
    """Choose another number for another shuffled order of the same sources."""
    exif_rotate: bool = _option(False, "Apply the Exif orientation of pictures.")
    """Choose True for photos of phones and cameras. Does not change pictures that a dataset has decoded."""
    background: tuple[int, int, int] | str = _option(
        "white", "Color under transparent pixels: R,G,B or #rrggbb or a name.", metavar="COLOR"
    )
    """Choose the color of the page for drawings with a transparent background."""
    max_bad: int | float = _option(
        0.01, "Refused images to accept, as a number or a share; with more, nothing is published.", metavar="N|P%"
    )
    """A count (int) or a share (float). Choose 0 for a collection that is known to be sound."""
    table: "Tables | None" = None
    """For labels, splits or numbers in a file: a table that describes the images in SRC, or a table for each split. To
    use a table as SRC itself, pass a `Table` or the path of the table as `src`."""
    val: float | None = _option(
        None, "Put this share of train into val, if SRC has no other split, by a hash of each name.", metavar="P%"
    )
    """For a collection without a split for evaluation. A fraction above 0 and below 1."""
    masks: str | os.PathLike[str] | None = _option(
        None,
        "Folder of a mask for each picture, for the array `mask`: PNG, TIFF, BMP, GIF or lossless WebP at the same "
        "paths as in SRC. A picture without its mask is refused.",
        metavar="DIR",
    )
    """For segmentation. Masks are gray images of 8 or 16 bits, or palette images."""
    mask_suffix: str = _option(
        "",
        "Ending of the masks' names, such as _mask for 1_mask.png; OLD=NEW replaces an ending, images/=masks/ "
        "replaces a folder.",
        metavar="TEXT",
    )
    """For masks whose names differ from the names of their pictures."""
    arrays: "Mapping[str, ArrayDeclaration] | None" = None
    """For datasets whose items are dicts: (kind, dtype, shape) of each entry to store as an array, by name."""
    workers: int | None = _option(None, "Cores to use.  [default: all]", least=1)
    """Choose fewer than all cores on a machine that also does other work."""
    scheduler: str | None = _option(
        None,
        "Do the work on a Dask cluster, by default with one core for each shard; the address of its "
        "scheduler, such as tcp://host:8786.",
        metavar="ADDRESS",
    )
    """For a cluster with Dask, whose workers have the same libraries, and SRC and OUT under the same paths."""
    part: tuple[int, int] | None = _option(
        None,
        "Make every N-th shard, from the K-th: for array jobs. The last part to finish publishes the set.",
        metavar="K/N",
    )
    """For a cluster without Dask: (k, n), with one call for each k from 1 to n, on any machines and in any order. For
    `max_bad`, a part counts its own refused images, and those in shards that were finished before it began."""
    on_progress: Callable[[Progress], None] | None = field(default=None, compare=False)
    """For your own progress bar: called with a `Progress`, in the thread that called `convert`."""
    progress: bool = field(default=False, compare=False)
    """Choose True in a terminal or a notebook, to show a progress bar."""

    def __post_init__(self) -> None:
        from shardio.conversion.images.decode import parse_color
        from shardio.format.layout import MAX_SIDE, pixels_row

        # However a caller writes them, equal options compare and are described as equal.
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        color = parse_color(self.background) if isinstance(self.background, str) else self.background
        for name, value in {"size": tuple(size) if isinstance(size, list) else size, "background": color}.items():
            object.__setattr__(self, name, value)
        for one in fields(self):
            value = getattr(self, one.name)
            if (literal := literal_of(one)) is not None and (value is not None or one.default is not None):
                check_choice(one.name, value, literal)
        sides: Any = self.size if isinstance(self.size, tuple) else ()
        if self.size is not None and not (len(sides) == 2 and all(type(n) is int and 0 < n <= MAX_SIDE for n in sides)):
            raise ValueError(f"size must be (height, width), each from 1 to {MAX_SIDE}; found {self.size!r}")
        if type(self.exif_rotate) is not bool:
            raise ValueError(f"exif_rotate must be True or False; found {self.exif_rotate!r}")
        levels: Any = self.background if isinstance(self.background, (tuple, list)) else ()
        if not (len(levels) == 3 and all(type(n) is int and 0 <= n <= 255 for n in levels)):
            raise ValueError(f"background must be (red, green, blue), each from 0 to 255; found {self.background!r}")
        if sides:
            pixels_row((*sides, 3), self.pixels)  # refuses odd sides for yuv420
        if self.fit == "adm" and sides and (sides[0] != sides[1] or self.resample != "bicubic"):
            found = f"size {self.size} and {self.resample!r}"
            raise ValueError(f"fit 'adm' needs a square size and resample 'bicubic', found {found}: pass fit 'crop'")
        if (self.fit, self.quality) == ("adm", "fast"):
            raise ValueError("fit 'adm' needs quality 'exact'; found quality 'fast': pass quality 'exact'")
        if type(self.shard_size) is not int or self.shard_size <= 0:
            raise ValueError(f"shard_size must be a positive integer, in bytes; found {self.shard_size!r}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be an integer from 0 to 2**64 - 1; found {self.seed!r}")
        if self.val is not None and not (isinstance(self.val, float) and 0 < self.val < 1):
            raise ValueError(f"val must be a share above 0.0 and below 1.0, such as 0.1; found {self.val!r}")
        count_workers(self.workers)
        count_bad(self.max_bad, 0)
        k, n = self.part or (1, 1)
        if not (type(k) is type(n) is int and 1 <= k <= n):
            raise ValueError(f"part must be (K, N) with K from 1 to N; found ({k!r}, {n!r})")

    @property
    def sample_shape(self) -> "SampleShape | None":
        return None if self.size is None else (*self.size, 3)  # type: ignore[misc]  # __post_init__ made it a tuple

    def without_pixels(self) -> "ConvertOptions":
        """Returns the options with size=None, for samples without pixels. Raises ValueError if an option that is only
        for images differs from its default."""
        plain = replace(ConvertOptions(), size=self.size and ConvertOptions.size)
        if given := [name for name in _OF_IMAGES if getattr(self, name) != getattr(plain, name)]:
            raise ValueError(
                f"{', '.join(given)}: options of images do not apply, as SRC has only arrays: leave them out"
            )
        return replace(self, size=None)

    def describe(self) -> dict[str, Any]:
        """Returns the options that decide the bytes of the set, as JSON values."""
        found = {name: getattr(self, name) for name in _deciding(self.size)}
        found = {name: value for name, value in found.items() if value or name not in _RARE}
        described: dict[str, Any] = json.loads(json.dumps({_DESCRIBED.get(name, name): found[name] for name in found}))
        return described

    def as_described(self, values: Mapping[str, Any]) -> "ConvertOptions":
        """Returns a copy of these options in which `values`, a result of `describe`, replace the options of these
        names. Raises ValueError if `values` is not a result of `describe`."""
        try:
            # Manifests of older versions lack `pixels`.
            values = {name: getattr(ConvertOptions, name) for name in ("pixels", *_RARE)} | dict(values)
            given = {name: values[_DESCRIBED.get(name, name)] for name in _deciding(values["size"])}
            tuples = {name: tuple(given[name]) for name in ("size", "background") if given["size"] is not None}
            return replace(self, **given | tuples)
        except (KeyError, TypeError) as error:
            found = show(dict(values))
            raise ValueError(f"expected the options of a conversion, found {found}: {show(error)}") from None


def _deciding(size: object) -> tuple[str, ...]:
    return ("size", *_OF_ARRAYS) if size is None else (*_OF_IMAGES, *_OF_ARRAYS)


def literal_of(one: "Field[Any]") -> Any:
    """Returns the Literal in the type of an option, such as Labels of `Labels | None`; None if there is no Literal."""
    return next((kind for kind in (one.type, *get_args(one.type)) if get_origin(kind) is Literal), None)


def with_options(
    options: Callable[P, ConvertOptions],
) -> Callable[[Callable[[Src, Out, ConvertOptions], R]], Callable[Concatenate[Src, Out, P], R]]:
    """Returns a decorator for a function (src, out, options), which then takes the arguments of `options` instead."""

    def decorate(run: Callable[[Src, Out, ConvertOptions], R]) -> Any:
        @functools.wraps(run)
        def call(src: Src, out: Out, *none: P.args, **given: P.kwargs) -> R:
            return run(src, out, options(*none, **given))

        signature = inspect.signature(run)
        places = list(signature.parameters.values())[:2]
        arguments = [*places, *inspect.signature(options).parameters.values()]
        vars(call)["__signature__"] = signature.replace(parameters=arguments)
        return call

    return decorate


def count_bad(max_bad: int | float, num_sources: int) -> int:
    """Returns how many of `num_sources` sources may be refused. `max_bad` is that number (int), or a share (float).
    Raises ValueError if `max_bad` is anything else."""
    if isinstance(max_bad, Real) and not isinstance(max_bad, bool):
        if isinstance(max_bad, Integral) and max_bad >= 0:
            return int(max_bad)
        if not isinstance(max_bad, Integral) and 0 <= max_bad <= 1:
            return int(round(max_bad * num_sources, 6))  # 0.29 * 100 is a little less than 29
    raise ValueError(f"max_bad must be a count such as 10, or a share from 0.0 to 1.0, such as 0.01; found {max_bad!r}")


def count_workers(workers: int | None) -> int:
    """Returns `workers`, or for None the number of usable cores. Raises ValueError for an invalid `workers`."""
    if workers is None:
        return usable_cores()
    if not isinstance(workers, Integral) or workers < 1:
        raise ValueError(f"workers must be an integer, at least 1, or None for all cores; found {workers!r}")
    return workers
