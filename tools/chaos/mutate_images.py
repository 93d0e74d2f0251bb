#!/usr/bin/env python
"""Decodes images that were damaged in every way that comes to mind: each must give a picture or a DecodeError.

    python tools/chaos/mutate_images.py [--images 100000] [--seed 0] [--processes N]
    python tools/chaos/mutate_images.py --seed 0 --save 1234 image.bin
    python tools/chaos/mutate_images.py --bombs 200 [--processes N] [--folder DIR]

JPEGs (baseline, progressive, gray, CMYK, with restarts and metadata), PNGs (of several depths, interlaced, animated),
WebPs (lossy, lossless, with alpha, animated), GIFs, TIFFs, AVIFs, BMPs and PPMs have bits flipped, bytes replaced,
inserted, removed, zeroed and repeated, fields of their headers set to extremes, are cut off, or spliced with another;
PNGs with their checksums made right, or not. Each is decoded, half of them with leave to be reduced, in a process whose
memory and time are limited: it must not die, nor hang, nor raise anything but DecodeError, and a picture must have a
size that the header claims.

With --bombs, so many memory bombs of each kind are converted: small files, or files of many small parts, that unfold to
gigabytes. The conversion must refuse each by name, and stay within the memory that docs/guide/convert.md promises.

Exit code 1 if anything was otherwise. With --save one image is written to a file, to be looked at. Linux only.
"""

from __future__ import annotations

import io
import re
import resource
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import attack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attack import Child, Lane, Say, Tell, listen, make_parser, never_sync, verdict
from PIL import Image, features

from shardio.conversion.convert import convert
from shardio.conversion.images.decode import decode_image
from shardio.conversion.sources.table import Table
from shardio.errors import DecodeError, SourceError
from shardio.system.machine import usable_cores

# 24 bytes for each of the most pixels that a picture may have, and the interpreter with its libraries.
MEMORY_NBYTES = 3 << 30
# CPU seconds for one image. The largest picture with the most scans takes a few.
PATIENCE_SECONDS = 30
# What reading a parquet file may take: docs/guide/convert.md.
PARQUET_NBYTES = 1_600_000_000
REASONS = ("damaged", "too large", "unsupported", "empty")

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


# --- sound images ----------------------------------------------------------------------------------------------------


def _picture(rng: np.random.Generator, height: int, width: int, channels: int = 3) -> Image.Image:
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, channels), dtype=np.uint8)
    if channels == 1:
        coarse = coarse[:, :, 0]
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def sound_images() -> dict[str, tuple[bytes, ...]]:
    """Returns images that decode, by kind."""
    rng = np.random.default_rng(0)
    plain, large = _picture(rng, 40, 56), _picture(rng, 150, 130)
    with_alpha = _picture(rng, 31, 24, 4)
    deep = Image.fromarray(rng.integers(0, 1 << 16, (19, 23), dtype=np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = {"save_all": True, "append_images": [_picture(rng, 40, 56) for _ in range(2)], "duration": 40}
    return {
        "baseline JPEG": (
            _encode(plain, "JPEG", quality=90),
            _encode(large, "JPEG", quality=75, restart_marker_rows=1),
            _encode(plain.convert("L"), "JPEG"),
            _encode(plain.convert("CMYK"), "JPEG", subsampling=0),
            _encode(plain, "JPEG", exif=exif, comment=b"a comment", icc_profile=bytes(300)),
            _encode(_picture(rng, 9, 3), "JPEG", quality=30, optimize=True),
        ),
        "progressive JPEG": (
            _encode(plain, "JPEG", progressive=True),
            _encode(large, "JPEG", progressive=True, quality=60),
            _encode(plain.convert("L"), "JPEG", progressive=True, restart_marker_blocks=3),
        ),
        "PNG": (
            _encode(plain, "PNG"),
            _encode(with_alpha, "PNG"),
            _encode(plain.quantize(16), "PNG", transparency=3),
            _encode(plain.convert("L"), "PNG"),
            _encode(plain.convert("1"), "PNG"),
            _encode(deep, "PNG"),
            _encode(plain, "PNG", **frames),
            _interlaced_png(rng),
        ),
        "WebP": (
            _encode(plain, "WEBP", quality=80),
            _encode(plain, "WEBP", lossless=True),
            _encode(with_alpha, "WEBP", lossless=True),
            _encode(with_alpha, "WEBP", quality=50, exif=exif),
        ),
        "animated WebP": (
            _encode(plain, "WEBP", **frames),
            _encode(plain, "WEBP", lossless=True, **frames),
        ),
        "GIF": (
            _encode(plain, "GIF"),
            _encode(plain, "GIF", interlace=0, transparency=7),
            _encode(plain.convert("L"), "GIF"),
            _encode(plain.convert("1"), "GIF"),
            _encode(plain, "GIF", **frames),
        ),
        "TIFF": (
            *(_encode(plain, "TIFF", compression=name) for name in ("raw", "tiff_lzw", "tiff_adobe_deflate")),
            _encode(plain, "TIFF", compression="tiff_lzw", tiffinfo={317: 2}, strip_size=700),
            _encode(with_alpha, "TIFF", compression="packbits"),
            _encode(with_alpha.convert("LA"), "TIFF", strip_size=100),
            _encode(plain.convert("CMYK"), "TIFF", compression="tiff_lzw"),
            *(_encode(plain.quantize(16), "TIFF", compression=name) for name in ("raw", "tiff_adobe_deflate")),
            *(_encode(plain.convert("1"), "TIFF", compression=name) for name in ("raw", "tiff_lzw")),
            *(_encode(deep, "TIFF", compression=name) for name in ("raw", "tiff_lzw")),
            _encode(plain, "TIFF", exif=exif, **frames),
        ),
        **(
            {"AVIF": _avifs(plain, with_alpha, exif, frames)}
            if "avif" in features.modules and features.check("avif")
            else {}
        ),
        "BMP": tuple(
            _encode(image, "BMP")
            for image in (plain, with_alpha, plain.convert("L"), plain.convert("1"), plain.quantize(16))
        ),
        "PPM": (
            *(_encode(image, "PPM") for image in (plain, plain.convert("L"), plain.convert("1"))),
            b"P6 # twelve bits\n7 5\n4095\n" + rng.integers(0, 4096, 105).astype(">u2").tobytes(),
            b"P2\n7 5\n99\n" + b" ".join(b"%d" % value for value in rng.integers(0, 100, 35)) + b"\n",
            b"P1\n7 5\n" + b"0110100" * 5,
        ),
    }


def _avifs(plain: Image.Image, with_alpha: Image.Image, exif: Image.Exif, frames: dict[str, Any]) -> tuple[bytes, ...]:
    return (
        _encode(plain, "AVIF", speed=8),
        _encode(with_alpha, "AVIF", quality=100, speed=8, exif=exif),
        _encode(plain.convert("L"), "AVIF", speed=8),
        _encode(plain, "AVIF", speed=8, **frames),
    )


def _interlaced_png(rng: np.random.Generator) -> bytes:
    """Writes what Pillow only reads: 8 x 8 gray, one row of bytes for each row of each pass."""
    passes = [(1, 1), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8)]  # (rows, columns)
    rows = b"".join(b"\0" + rng.bytes(columns) for height, columns in passes for _ in range(height))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 1)
    return PNG_MAGIC + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


# --- mutations -------------------------------------------------------------------------------------------------------


def mutate(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Returns `data` with one to four changes; `other` is another image, to splice it with."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        if not changed:
            break
        # Half of the changes go to the head, where sizes and lengths are.
        end = len(changed) if rng.random() < 0.5 else min(len(changed), 64)
        _CHANGES[rng.integers(len(_CHANGES))](rng, changed, int(rng.integers(end)), int(rng.integers(1, 17)), other)
    if data.startswith(PNG_MAGIC) and rng.random() < 0.5:
        mend_checksums(changed)
    return bytes(changed)


def _flip_bits(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    for place in rng.integers(at, len(data), count):
        data[place] ^= 1 << int(rng.integers(8))


def _set_byte(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    telling = [0, 1, 0x7F, 0x80, 0xFF, 0xC0, 0xC2, 0xC4, 0xD8, 0xD9, 0xDA, 0xDB]
    data[at] = int(rng.choice(telling) if rng.random() < 0.7 else rng.integers(256))


def _set_field(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    """Sets a number of two or four bytes, as sizes and lengths have."""
    number = int(rng.choice([0, 1, 2, 7, 8, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65500, 9459]))
    nbytes, order = (2 if number < 1 << 16 and count % 2 else 4), ("big", "little")[count % 3 == 0]
    data[at : at + nbytes] = number.to_bytes(nbytes, order)  # type: ignore[arg-type]


def _insert(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    data[at:at] = rng.bytes(count)


def _remove(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    del data[at : at + count]


def _fill(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    """Fills a stretch as a lost sector is filled, or a shorter one."""
    stop = min(len(data), at + count * int(rng.choice([1, 32])))
    data[at:stop] = bytes([rng.choice([0, 0xFF])]) * (stop - at)


def _repeat(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    data[at:at] = data[at : at + count * int(rng.choice([1, 16]))]


def _cut_off(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    del data[int(rng.integers(len(data))) :]


def _splice(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    """Puts the rest of the other image behind the beginning of this one."""
    data[at:] = other[int(rng.integers(len(other))) :]


def _transplant(rng: np.random.Generator, data: bytearray, at: int, count: int, other: bytes) -> None:
    start = int(rng.integers(len(other)))
    data[at : at + count * 8] = other[start : start + count * 8]


_CHANGES = (_flip_bits, _set_byte, _set_field, _insert, _remove, _fill, _repeat, _cut_off, _splice, _transplant)


def mend_checksums(data: bytearray) -> None:
    """Makes the checksums of a PNG's chunks right, as far as the chunks can be told."""
    position = len(PNG_MAGIC)
    while position + 12 <= len(data):
        end = position + 8 + int.from_bytes(data[position : position + 4], "big")
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[position + 4 : end]))
        position = end + 4


def claimed_sizes(data: bytes) -> set[tuple[int, int]]:
    """Returns every (height, width) that these bytes could be said to claim, without the code under test."""
    if data.startswith(PNG_MAGIC):
        return {(int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"))}
    if data[4:8] == b"ftyp":  # Image.open wants a brand of its own at the beginning
        from PIL import AvifImagePlugin

        avif = AvifImagePlugin.AvifImageFile(io.BytesIO(data))
        return {(avif.height, avif.width)}
    if not data.startswith(b"\xff\xd8"):
        with Image.open(io.BytesIO(data)) as image:
            return {(image.height, image.width)}
    frames = re.finditer(rb"\xff[\xc0-\xcf]..[\x08](?=(..)(..))", data, re.DOTALL)
    return {(int.from_bytes(one[1], "big"), int.from_bytes(one[2], "big")) for one in frames}


def mutated_image(seed: int, number: int) -> tuple[str, bytes]:
    """Returns the kind and the bytes of one mutated image: always the same with the same libraries."""
    rng = np.random.default_rng([seed, number])
    images = sound_images()
    kind = list(images)[number % len(images)]
    data = images[kind][rng.integers(len(images[kind]))]
    others = images[kind if rng.random() < 0.7 else list(images)[rng.integers(len(images))]]
    return kind, mutate(rng, data, others[rng.integers(len(others))])


# --- decoding --------------------------------------------------------------------------------------------------------


def judge(data: bytes, reduce: bool) -> tuple[str, str]:
    """Decodes. Returns the outcome, which is a reason class, "decoded", or "exception", and what is wrong with it."""
    try:
        decoded = decode_image(data, least_size=(lambda height, width: (16, 16)) if reduce else None)
    except DecodeError as error:
        if error.reason not in REASONS or not error.detail:
            return "exception", f"a DecodeError without a known reason and a detail: {error!r}"
        return error.reason, ""
    except BaseException:
        return "exception", traceback.format_exc()
    pixels, factor = decoded.pixels, decoded.reduction
    height, width = decoded.source_size
    if pixels.dtype != np.uint8 or pixels.shape != (-(-height // factor), -(-width // factor), 3):
        return "exception", f"pixels of {pixels.dtype} {pixels.shape} for a source of {height, width} over {factor}"
    if (height, width) not in (claimed := claimed_sizes(data)):
        return "exception", f"a picture of {height, width}, but the header claims {claimed}"
    return "decoded", ""


@dataclass
class Counts(attack.Counts):
    """Counts of what happened. Those from `aborts` on should stay zero."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Images by "kind: outcome"."""
    aborts: int = 0
    hangs: int = 0
    exceptions: int = 0
    """Exceptions other than DecodeError, and pictures of a wrong shape."""

    @property
    def num_images(self) -> int:
        return self.outcomes.total()

    def __str__(self) -> str:
        table: dict[str, list[str]] = {}
        for name, count in sorted(self.outcomes.items()):
            kind, _, outcome = name.partition(": ")
            table.setdefault(kind, []).append(f"{outcome} {count}")
        lines = [f"{kind:<36}{', '.join(outcomes)}" for kind, outcomes in table.items()]
        return "\n".join(lines) + (
            f"\n{self.num_images} images, {self.aborts} aborts, {self.hangs} hangs, "
            f"{self.exceptions} other exceptions or wrong shapes"
        )


def _decode_some(seed: int, numbers: range, tell: Tell) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    for number in numbers:
        # SIGPROF ends the process by default, also one that is deep in a decoder.
        signal.setitimer(signal.ITIMER_PROF, PATIENCE_SECONDS)
        kind, data = mutated_image(seed, number)
        outcome, wrong = judge(data, number % 2 == 1)
        tell([number, kind, outcome, wrong[-2000:]])


def mutate_images(images: int, seed: int = 0, processes: int | None = None, say: Say = print) -> Counts:
    """Decodes so many mutated images. The process must have no other threads."""
    counts = Counts()
    processes = processes or usable_cores()
    for kind, sound in sound_images().items():
        for data in sound:
            outcome, wrong = judge(data, False)
            if outcome != "decoded":
                raise RuntimeError(f"a sound {kind} gives: {outcome} {wrong}")
    lanes = [Lane(partial(_decode_some, seed), first, processes, images) for first in range(processes)]
    for lane, results, code in listen(lanes):
        for number, kind, outcome, wrong in results:
            counts.outcomes[f"{kind}: {outcome}"] += 1
            if wrong:
                counts.exceptions += 1
                counts.violations.append(f"image {number} of seed {seed}, {kind}: {wrong}")
            if counts.num_images % 10_000 == 0:
                say(f"{counts.num_images} of {images} images: {len(counts.violations)} violations")
        if code:
            hang = code == -signal.SIGPROF
            counts.hangs += hang
            counts.aborts += not hang
            kind, _ = mutated_image(seed, lane.next)
            counts.outcomes[f"{kind}: {'hang' if hang else 'abort'}"] += 1
            counts.violations.append(f"image {lane.next} of seed {seed}, {kind}: the process ended with {code}")
            lane.next += lane.step
    return counts


# --- bombs -----------------------------------------------------------------------------------------------------------


def _with_parts(data: bytes, at: int, part: bytes, nbytes: int, end: bytes = b"") -> bytes:
    return b"".join([data[:at], part * max(1, nbytes // len(part)), end, data[at:]])


def _tiff(nbytes: int, num_tags: int, kind: int, tag: int = 40000) -> bytes:
    """A TIFF of one pixel whose last tags all claim the same `nbytes` bytes, of numbers of a `kind`."""
    entries = {256: (4, 1, 1), 257: (4, 1, 1), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 273: (4, 1, 8)}
    entries |= {277: (3, 1, 1), 278: (4, 1, 1), 279: (4, 1, 1)}
    start = 8 + 2 + 12 * (len(entries) + num_tags) + 4
    count = nbytes // (4 if kind == 4 else 1)
    entries |= {tag + number: (kind, count, start) for number in range(num_tags)}
    packed = b"".join(struct.pack("<HHII", name, *entry) for name, entry in sorted(entries.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4 + nbytes)


@cache
def bombs() -> dict[str, Callable[[int], bytes]]:
    """Returns for each kind of bomb a function that makes one of about so many bytes."""
    plain = _picture(np.random.default_rng(0), 40, 56)
    jpeg, scans = _encode(plain, "JPEG"), _encode(plain, "JPEG", progressive=True)
    gif, png, webp = _encode(plain, "GIF"), _encode(plain, "PNG"), _encode(plain, "WEBP")[12:]
    frames = 13 + 3 * (2 << (gif[10] & 7))
    canvas = b"VP8X" + struct.pack("<I4x", 10) + (55).to_bytes(3, "little") + (39).to_bytes(3, "little") + webp

    def webp_of(nbytes: int) -> bytes:
        body = _with_parts(b"WEBP" + canvas, 4 + len(canvas), b"JUNK\0\0\0\0", nbytes)
        return b"RIFF" + struct.pack("<I", len(body)) + body

    return {
        "JPEG of empty APP0": lambda nbytes: _with_parts(jpeg, 2, b"\xff\xe0\0\2", nbytes),
        "JPEG of empty tables": lambda nbytes: _with_parts(jpeg, 2, b"\xff\xdb\0\2", nbytes),
        "JPEG of empty APP2 between scans": lambda nbytes: _with_parts(
            scans, scans.rfind(b"\xff\xda"), b"\xff\xe2\0\2", nbytes
        ),
        "JPEG of empty APP2 at the end": lambda nbytes: _with_parts(jpeg, len(jpeg) - 2, b"\xff\xe2\0\2", nbytes),
        "PNG of empty chunks": lambda nbytes: _with_parts(png, 33, _chunk(b"prVt", b""), nbytes),
        "PNG of texts": lambda nbytes: _with_parts(
            png, 33, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000))), nbytes
        ),
        "PNG with a large profile": lambda nbytes: _with_parts(
            png, 33, _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(20 * nbytes), 1)), 1
        ),
        "WebP of empty chunks": webp_of,
        "GIF with a comment of short blocks": lambda nbytes: _with_parts(
            gif[:frames] + b"!\xfe" + gif[frames:], frames + 2, b"\1x", nbytes, b"\0"
        ),
        "GIF of empty extensions": lambda nbytes: _with_parts(gif, frames, b"!\xfe\0", nbytes),
        "GIF of tiny frames": lambda nbytes: _with_parts(
            gif, len(gif) - 1, b"," + struct.pack("<4HB", 0, 0, 1, 1, 0) + b"\2\0", nbytes
        ),
        "TIFF of tags that share bytes": lambda nbytes: _tiff(nbytes // 2, nbytes // 200, 1, 300),
        "TIFF of tags beyond the file": lambda nbytes: _tiff(1 << 10, 1, 1).replace(
            struct.pack("<HHI", 40000, 1, 1 << 10), struct.pack("<HHI", 40000, 1, 1 << 31)
        ),
        "TIFF of strips": lambda nbytes: _tiff(nbytes, 1, 4, 273),
        "PPM of comments": lambda nbytes: b"P3\n1 1\n255\n" + b"#\n" * (nbytes // 2) + b"1 2 3\n",
        "PPM with a long header": lambda nbytes: b"P6\n#" + b"x" * nbytes + b"\n1 1\n255\n123",
    }


def parquets(nbytes: int, path: Path) -> dict[str, Callable[[], None]]:
    """Returns for each kind of parquet bomb a function that writes it to `path`, to unfold to about so many bytes."""
    rows = nbytes >> 20
    names, zeros = [f"{number}.png" for number in range(rows)], [0] * rows

    def write(use_dictionary: bool = True, **columns: Any) -> None:
        options = {"use_dictionary": use_dictionary, "store_schema": "image" not in columns, "write_statistics": False}
        pq.write_table(pa.table(columns), path, compression="zstd", **options)

    def repeated(value: Any) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, "i4")), pa.array([value]))

    def vectors() -> Any:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows << 12, "i1")), 1 << 12)

    return {
        "parquet table of one long label": lambda: write(path=names, label=repeated("x" * (1 << 20))),
        "parquet table of one long path": lambda: write(path=repeated("x" * (1 << 20)), label=zeros),
        "parquet table of long vectors": lambda: write(path=names, label=vectors()),
        "parquet with a page of zeros": lambda: write(False, image=[bytes(513 << 20)], label=[0]),
        "parquet of one large image": lambda: write(image=repeated(bytes(70 << 20)), label=zeros),
    }


def convert_bombs(
    count: int, seed: int = 0, processes: int | None = None, folder: Path | None = None, say: Say = print
) -> Counts:
    """Converts so many bombs of each kind, some kinds at a time. The process must have no other threads."""
    counts = Counts()
    kinds, step = [*bombs(), *parquets(0, Path())], processes or usable_cores()
    for start in range(0, len(kinds), step):
        with tempfile.TemporaryDirectory(prefix="bombs-", dir=folder) as made:
            children: dict[Child, str] = {}
            for number, kind in enumerate(kinds[start : start + step]):
                work = _convert_some if kind in bombs() else _convert_parquets
                place = Path(made) / str(number)
                place.mkdir()
                children[Child(partial(work, kind, count, np.random.default_rng([seed, start + number]), place))] = kind
            for child, results, code in listen(children):
                kind = children[child]
                for outcomes, nbytes, most in results:
                    counts.outcomes.update({f"{kind}: {name}": number for name, number in outcomes.items()})
                    say(f"{kind}: {nbytes >> 20} MiB of the {most >> 20} MiB that are promised")
                    if nbytes > 1.1 * most or outcomes.get("decoded"):
                        counts.violations.append(f"{kind}: {outcomes}, {nbytes:,} bytes of {most:,}")
                if code:
                    counts.aborts += 1
                    counts.violations.append(f"{kind}: the conversion ended with {code}")
    return counts


def _convert_some(kind: str, count: int, rng: np.random.Generator, folder: Path, tell: Tell) -> None:
    """Converts a folder of bombs. Tells (files by outcome, bytes that it took, bytes that a core may take)."""
    never_sync()
    sound = sound_images()["baseline JPEG"]
    for name in ("before", "bombs"):
        (folder / name).mkdir()
        for number, data in enumerate(sound):
            (folder / name / f"sound{number}.jpg").write_bytes(data)
    convert(folder / "before", folder / "out-before", size=16, workers=1)  # what it takes once
    largest = 0
    for number in range(count):
        data = bombs()[kind](int(rng.integers(4 << 20, 12 << 20)))
        (folder / "bombs" / f"{number}.jpg").write_bytes(data)
        largest = max(largest, len(data))
    del data
    before = _peak_nbytes(forget=True)
    report = convert(folder / "bombs", folder / "out", size=16, workers=1, max_bad=1.0)
    outcomes = {**report.refused, "decoded": sum(report.num_samples.values()) - len(sound)}
    tell([outcomes, _peak_nbytes() - before, 16 * 150 * 130 + 4 * largest + (16 << 20)])


def _convert_parquets(kind: str, count: int, rng: np.random.Generator, folder: Path, tell: Tell) -> None:
    """Converts bombs one by one. Tells (files by outcome, bytes that it took, bytes that reading parquet may take)."""
    never_sync()
    outcomes: Counter[str] = Counter()
    most = 0
    for number in range(count):
        path = folder / f"{number}.parquet"
        make = parquets(int(rng.integers(4 << 30, 8 << 30)), path)[kind]
        # By another process: pyarrow keeps for itself what it took.
        if Child(lambda _, make=make: make()).finish()[1]:  # type: ignore[misc]
            raise RuntimeError(f"{kind}: cannot be made")
        before = _peak_nbytes(forget=True)
        try:
            convert(Table(path) if "table" in kind else path, folder / "out", size=16, workers=1)
            outcomes["decoded"] += 1
        except SourceError as error:
            outcomes["refused" if str(path) in str(error) else "decoded"] += 1
        most = max(most, _peak_nbytes() - before)
    tell([outcomes, most, PARQUET_NBYTES])


def _peak_nbytes(forget: bool = False) -> int:
    """Returns the most memory that this process had at a time, or with `forget` has now, from when it counts again."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) << 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the mutations", processes=True)
    parser.add_argument("--images", type=int, default=100_000, help="default %(default)s")
    parser.add_argument("--save", nargs=2, metavar=("NUMBER", "FILE"), help="write one image to a file, and do no more")
    parser.add_argument("--bombs", type=int, metavar="COUNT", help="convert so many bombs of each kind instead")
    chosen = parser.parse_args(arguments)
    if chosen.save:
        number, path = chosen.save
        Path(path).write_bytes(mutated_image(chosen.seed, int(number))[1])
        return 0
    if chosen.bombs:
        counts = convert_bombs(chosen.bombs, chosen.seed, chosen.processes, chosen.folder)
    else:
        counts = mutate_images(chosen.images, chosen.seed, chosen.processes)
    for violation in counts.violations:
        print(violation)
    return verdict(counts)


if __name__ == "__main__":
    sys.exit(main())
