"""The bytes of shards, arrays and indexes. docs/format.md is the normative text; this module is its code.

Every sample has the same size, so a sample's address is arithmetic, and a shard needs no table of offsets:

    offset = HEADER_NBYTES + position * sample_nbytes

All these files are standard NPY 1.0 files whose header is fully determined by the manifest. A reader therefore never
parses a header: it computes the expected header and compares bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.errors import show

try:
    # The same sums as zlib's ten times as fast, 4 us instead of 46 for a sample of 196,608 bytes, so training can
    # compare them too. Both release the GIL for anything as large as a picture.
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:  # no wheels for this kind of processor
    from zlib import crc32 as crc32

FORMAT_NAME = "shardio"
FORMAT_VERSION = 2

# One page: the pixels that follow are page aligned for mmap and O_DIRECT, whatever the length of the NPY header text.
HEADER_NBYTES = 4096
# NPY 1.0: magic, version 1.0, then the length of the header text as a little-endian uint16.
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_NPY_PREFIX_NBYTES = len(_NPY_MAGIC) + 2

MANIFEST_NAME = "manifest.json"
REJECTS_NAME = "rejects.jsonl"
MARKER_NAME = "shardio-cache.txt"
"""The file that makes a folder a cache of copies."""
WORK_FOLDER = ".convert"
"""The folder in a set's folder that holds the plan of an unfinished conversion, and records of finished shards."""

# A manifest of 100,000 shards and 100,000 classes is under 20 MB; more is not a manifest.
MAX_MANIFEST_NBYTES = 64 << 20
# Numbers above this are not exact in every JSON reader (2**53).
MAX_COUNT = 1 << 53
MAX_SIDE = 1 << 16
# Every class has a name in the manifest, in use or not. A larger label is not a class but a number of something else.
MAX_CLASSES = 1 << 20
MAX_KEY_NBYTES = (1 << 16) - 4
"""The widest key field. The longest path that Linux accepts has 4096 bytes."""

MAX_ARRAYS = 50
MAX_ARRAY_SIDES = 8
MAX_SMALL_NBYTES = 16
ARRAY_TYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
ArrayKind = Literal["array", "mask"]
"""What an array holds: "mask", a class or measure for each pixel; "array", anything else."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
_ARRAY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)

SampleShape = tuple[int, int, int]
"""(height, width, channels) of every sample of a set that has pixels."""


@dataclass(frozen=True)
class RowType:
    """The type of a row of a file: its dtype as an NPY header writes it ("<f4"), and its shape.

    Raises ValueError if docs/format.md does not allow the dtype or the shape.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ARRAY_TYPES:
            raise ValueError(f"an array's dtype must be one of {', '.join(ARRAY_TYPES)}; found {show(self.dtype)}")
        if len(self.shape) > MAX_ARRAY_SIDES or not all(type(n) is int and 0 < n <= MAX_SIDE for n in self.shape):
            raise ValueError(
                f"the shape of a value must be at most {MAX_ARRAY_SIDES} integers from 1 to {MAX_SIDE}; found "
                f"{show(self.shape)}"
            )
        if self.nbytes > MAX_COUNT:
            raise ValueError(f"a value must have at most 2**53 bytes; found {self.nbytes} bytes for {self}")

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def is_small(self) -> bool:
        """Whether an array of such rows gets one file for the whole split, and not one file for each shard."""
        return self.nbytes <= MAX_SMALL_NBYTES

    def file_header(self, num_rows: int) -> bytes:
        """Returns the header, HEADER_NBYTES bytes, of a file with `num_rows` rows."""
        return _rows_header(self, num_rows)

    def file_nbytes(self, num_rows: int) -> int:
        return HEADER_NBYTES + num_rows * self.nbytes


ORDER_ROW = RowType("<i8", ())
"""A row of an order: the stored row of a sample."""
CRC32_ROW = RowType("<u4", ())
"""A row of the checksums of an array: the crc32 of a stored row."""
LABEL_ROW = RowType("<i8", ())
"""A label in the index: the number of a class, or any other integer."""
LABELS_NAME = "labels"
"""The name of the array for labels that are not integers: float32 numbers or vectors. The index then has no label."""


def check_kind(name: str, kind: object, row: RowType, sample_shape: SampleShape | None) -> ArrayKind:
    """Returns `kind` if an array with this name and row type may be of this kind. Raises ValueError otherwise.

    `sample_shape` is None in a set without pixels.
    """
    if kind not in get_args(ArrayKind):
        raise ValueError(f"an array's kind must be one of {', '.join(get_args(ArrayKind))}; found {show(kind)}")
    if name == LABELS_NAME and (kind != "array" or row.dtype != "<f4" or len(row.shape) > 1):
        raise ValueError(
            f"labels must be of the kind array, and one float32 number or vector for each sample; found kind {kind}, "
            f"dtype {row.dtype} and shape {row.shape}"
        )
    if kind == "array":
        return "array"
    if sample_shape is None:
        raise ValueError(f'in a set without pixels, the kind of an array must be "array"; found {kind!r}')
    if len(row.shape) not in (2, 3) or row.shape[:2] != sample_shape[:2]:
        raise ValueError(
            f"a mask must have the samples' height and width {sample_shape[:2]}, and may have channels; found shape "
            f"{row.shape}"
        )
    return "mask"


def find_wrong_bool(values: NDArray[Any]) -> str:
    """Returns an error text if `values` are |b1 and have bytes other than 0 and 1; otherwise ""."""
    largest = values.view(np.uint8).max(initial=0) if values.dtype == np.bool_ else 0
    return f"expected bytes of 0 or 1 for bool, found {largest}" if largest > 1 else ""


def check_array_name(name: object) -> str:
    """Returns `name` if an array may have this name. Raises ValueError otherwise."""
    if not isinstance(name, str) or not _ARRAY_NAME.fullmatch(name):
        found = str(name)[:80]
        raise ValueError(f"an array's name must be [A-Za-z_][A-Za-z0-9_]*, at most 64 characters; found {found!r}")
    if name.lower() in RESERVED_NAMES:
        raise ValueError(f"an array's name must not be one of {', '.join(sorted(RESERVED_NAMES))}; found {show(name)}")
    return name


def is_safe_name(name: str) -> bool:
    """Returns whether a file of a set may have this name.

    It may not lead to a folder, be hidden, or have characters that a shell or URL would quote.
    """
    return _SAFE_NAME.fullmatch(name) is not None


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.npy"


def array_shard_name(split: str, array: str, number: int | None) -> str:
    """Returns the file name of shard `number` of an array; with None, the name of a small array's only file."""
    return f"{split}-{array}.npy" if number is None else f"{split}-{array}-{number:05d}.npy"


def array_crc32_name(split: str, array: str) -> str:
    return f"{split}-{array}-crc32.npy"


def order_name(split: str, number: int) -> str:
    return f"{split}-order-{number}.npy"


def is_split_name(name: str) -> bool:
    """Returns whether the files of a split with this name have safe names, for any number of shards."""
    return is_safe_name(shard_name(name, 999_999))


def check_split_name(name: object) -> None:
    if not isinstance(name, str) or not is_split_name(name):
        raise ValueError(f"split must match [A-Za-z0-9][A-Za-z0-9._-]*, at most 189 characters; found {show(name)}")


def index_name(split: str) -> str:
    return f"{split}-index.npy"


def pixels_row(sample_shape: SampleShape, pixels: object = "rgb") -> RowType:
    """Returns the type of a stored row of pixels, uint8. Raises ValueError if samples cannot be stored so.

    "rgb" stores (height, width, channels), with any number of channels. "yuv420" stores a plane of luma, (height,
    width), then two planes of chroma of half the height and width: (height * 3 / 2, width) together.
    """
    height, width, channels = sample_shape
    if pixels not in ("rgb", "yuv420"):
        raise ValueError(f"pixels must be one of rgb, yuv420; found {show(pixels)}")
    if pixels == "rgb":
        return RowType("|u1", sample_shape)
    if height % 2 or width % 2 or channels != 3:
        raise ValueError(
            "pixels 'yuv420' needs an even height, an even width and 3 channels, as 2 x 2 pixels share their color; "
            f"found {height} x {width} x {channels}: choose an even size, or pixels 'rgb'"
        )
    return RowType("|u1", (height * 3 // 2, width))


def check_sample_shape(sample_shape: tuple[int, ...]) -> SampleShape:
    """Returns `sample_shape` if it is a valid (height, width, channels). Raises ValueError otherwise."""
    if len(sample_shape) != 3 or not all(type(n) is int and 0 < n <= MAX_SIDE for n in sample_shape):
        raise ValueError(
            f"sample shape must be (height, width, channels), each from 1 to {MAX_SIDE}; found {show(sample_shape)}"
        )
    height, width, channels = sample_shape
    return height, width, channels


def _npy_header(descr: str, shape: str) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode("ascii")
    room = HEADER_NBYTES - _NPY_PREFIX_NBYTES
    return _NPY_MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"


@lru_cache(maxsize=64)  # shards of a split mostly have one or two sizes, and there may be thousands
def _rows_header(row: RowType, num_rows: int) -> bytes:
    return _npy_header(repr(row.dtype), str((num_rows, *row.shape)))


def key_field_nbytes(longest_key_nbytes: int) -> int:
    """Returns the width in bytes of the index's key field, for keys of at most `longest_key_nbytes` bytes.

    It is the next number that is 4 more than a multiple of 8: then all fields of a row are aligned, and the row is a
    multiple of 8 bytes, without padding.
    """
    return longest_key_nbytes + (4 - longest_key_nbytes) % 8


RESERVED_NAMES = frozenset(
    ["label", "key", "source_width", "source_height", "crc32", "image", "images", "index", "indices", "pixels", "order"]
)
"""Names that no array may have, in any case: the index, batches and names of files use them for something else."""


def index_dtype(key_nbytes: int, *, has_label: bool = True) -> np.dtype[np.void]:
    """Returns the dtype of an index row: label (if labels are integers), key, source size, crc32.

    The key is the source's path relative to SRC. The crc32 is of the pixels. All fields are naturally aligned.
    """
    if key_nbytes <= 0 or key_nbytes % 8 != 4:
        raise ValueError(f"key_nbytes must be 4 more than a multiple of 8, such as 12; found {key_nbytes}")
    sizes = [("source_width", "<u4"), ("source_height", "<u4"), ("crc32", "<u4")]
    return np.dtype([*([("label", LABEL_ROW.dtype)] if has_label else []), ("key", f"|S{key_nbytes}"), *sizes])


def has_label(dtype: np.dtype[np.void]) -> bool:
    """Returns whether `dtype`, from `index_dtype`, has the field `label`."""
    return "label" in (dtype.names or ())


def index_header(num_samples: int, dtype: np.dtype[np.void]) -> bytes:
    """Returns the header of an index file. `dtype` is from `index_dtype`."""
    return _npy_header(str(dtype.descr), str((num_samples,)))
