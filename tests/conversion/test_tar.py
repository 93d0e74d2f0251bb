"""Walking the headers of a tar finds every member where it is, and takes no damage for an end."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from storages import END, header, tar_of

from shardio.conversion.sources.collection import Extent
from shardio.conversion.sources.tar import BLOCK_NBYTES, Archive, drain, members, open_archive
from shardio.errors import SourceError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def archive_of(data: bytes) -> Archive:
    return Archive("x.tar", io.BytesIO(data), 0, len(data))


def walk(data: bytes) -> list[tuple[str, Extent]]:
    return list(members(archive_of(data)))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK_NBYTES)


@pytest.mark.parametrize("kind", FORMATS)
def test_members_are_those_that_tarfile_finds(kind: str) -> None:
    rng = np.random.default_rng(0)
    longest = 250 if kind == "ustar" else 3000
    files = []
    for i in range(60):
        parts = [f"{i}"] + ["x" * int(rng.integers(1, 90)) for _ in range(int(rng.integers(0, 40)))]
        name = "/".join(parts)[: int(rng.integers(90, longest))].rstrip("/")
        nbytes = int(rng.choice([0, 1, 511, 512, 513, 5000, 20000]))
        try:
            tar_of([(name, b"")], FORMATS[kind])
        except ValueError:
            continue  # ustar cannot write every name
        files.append((name, rng.bytes(nbytes)))
    data = tar_of(files, FORMATS[kind])
    found = walk(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, Extent(b"", info.offset_data, info.size)) for info in tar]
    assert found == expected
    assert [data[m.offset : m.offset + m.nbytes] for _, m in found] == [content for _, content in files]


def test_names_that_are_not_ascii_are_kept_folders_passed_over_and_dots_and_slashes_folded() -> None:
    name = "n01/été 日本.JPEG"
    for kind in FORMATS.values():
        assert [found for found, _ in walk(tar_of([(name, b"x")], kind))] == [name]
    data = header(b"./", kind=b"5") + header(b"./a//b/./c", 3) + padded(b"abc") + header(b"old/") + END
    assert walk(data) == [("a/b/c", Extent(b"", 2 * BLOCK_NBYTES, 3))]


def extended(records: bytes, kind: bytes = b"x") -> bytes:
    return header(b"p", len(records), kind) + padded(records)


def test_sizes_in_base_256_and_in_extended_headers_are_read_and_comments_passed_over() -> None:
    large = header(b"a", size=b"\x80" + (700).to_bytes(11, "big")) + padded(bytes(700))
    told = extended(b"12 size=700\n") + header(b"b", 0) + padded(bytes(700))
    data = large + extended(b"17 comment=hello\n", b"g") + told + header(b"c") + END
    assert [(name, m.nbytes) for name, m in walk(data)] == [("a", 700), ("b", 700), ("c", 0)]


def test_an_archive_may_be_empty_or_end_with_one_block_of_zeros_or_with_garbage() -> None:
    for tail in (END, END[:BLOCK_NBYTES], END + bytes(1 << 16), END + b"garbage of an old record".ljust(BLOCK_NBYTES)):
        assert walk(tail) == []
        assert [name for name, _ in walk(header(b"a") + tail)] == ["a"]


def refused(data: bytes) -> str:
    with pytest.raises(SourceError) as caught:
        walk(data)
    return str(caught.value)


SOUND = tar_of([("a.jpg", b"x" * 700), ("b.jpg", b"y" * 600)])
SOUND_NBYTES = 2 * 512 + 2 * 1024
"""The size up to the end mark."""


def test_an_archive_that_was_cut_short_is_refused_wherever_it_was_cut() -> None:
    for nbytes in (0, 1, 511, 512, 1000, 1211, 1212, 1536, 2000, 2048, SOUND_NBYTES, SOUND_NBYTES + 37):
        assert "truncated" in refused(SOUND[:nbytes])


@pytest.mark.parametrize("place", [0, 99, 124, 135, 148, 156, 257, 400])
def test_a_damaged_header_is_no_end_of_the_archive(place: int) -> None:
    for start, found in ((0, "it is not a tar"), (1536, "damage")):
        data = bytearray(SOUND)
        data[start + place] ^= 0x41
        message = refused(bytes(data))
        assert message.startswith(f"x.tar: expected the header of a member at byte {start:,}, found ")
        assert found in message


MEMBER = header(b"a") + END
ODD_NAMES = (b"/etc/passwd", b"../a", b"a/../../b", b"..", b".", b"", b"//a", b"a/..")
LONG_NAMES = (b"5011 path=" + b"x" * 5000 + b"\n", b"12 path=a\0b\n")
ODD_SIZES = (b"-0000000001\0", b"0000000000x\0", b"0x000000001\0", b"\xff" * 12, b"1_000000000\0")
DAMAGED = (b"x", b"9 path=ax", *(b"%d path=a\n" % length for length in (0, 99, -1, 6)), b"8 pathxa\n", b"10 size=-1\n")
REFUSED: dict[str, list[bytes]] = {
    "found the hard link 'a'. Unpack": [header(kind=b"1") + END],
    "found the symbolic link 'a'. Unpack": [header(kind=b"2") + END],
    "found the device 'a'. Unpack": [header(kind=b"3") + END, header(kind=b"4") + END],
    "found the FIFO 'a'. Unpack": [header(kind=b"6") + END],
    "found the sparse file 'a'. Unpack": [header(kind=b"S") + END],
    "found a member of type b'V', 'a'. Unpack": [header(kind=b"V") + END],
    "expected a relative name without '..'": [
        *(header(name) + END for name in ODD_NAMES),
        *(header(b"L", len(name) + 1, b"L") + padded(name + b"\0") + MEMBER for name in ODD_NAMES),
        *(extended(records) + MEMBER for records in LONG_NAMES),
    ],
    "found the end of the tar at byte 1,536: it is truncated": [
        header(b"huge.jpg", size=size) + END for size in (b"%011o\0" % 10_000_000, b"\x80" + b"\xff" * 11)
    ],
    "expected the header of a member at byte 0": [extended(b"9 path=a\n") + END],
    "the header of a sparse file": [extended(b"22 GNU.sparse.major=1\n") + MEMBER],
    "at most 1,048,576 bytes": [header(b"p", 1 << 30, b"L") + END],
    "without path and size": [extended(b"9 path=a\n", b"g") + MEMBER],
    "expected nothing after the end mark": [SOUND + SOUND],  # and is not read in part
    "x.tar": [
        *(header(size=size, kind=kind) + MEMBER for size in ODD_SIZES for kind in (b"0", b"x", b"L")),
        *(extended(records) + MEMBER for records in DAMAGED),
        extended(b"9 path=a\n") * 2000 + MEMBER,  # deeper than Python calls
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_members_and_damaged_headers_are_refused(message: str) -> None:
    for data in REFUSED[message]:
        assert message in refused(data)


def test_endless_zeros_end_the_archive_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(SOUND)
    os.truncate(path, 1 << 40)  # sparse: it takes no room
    with open_archive(path) as archive:
        read, total = archive.read, 0

        def counted(nbytes: int) -> bytes:
            nonlocal total
            total += nbytes
            return read(nbytes)

        archive.read = counted  # type: ignore[method-assign]
        assert len(list(members(archive))) == 2
    assert total < 4 << 20


def test_compressed_archives_and_what_is_no_file_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refusals = dict.fromkeys(("fifo", "", "gone"), "expected a regular file|cannot read")
    for method, content in (
        ("gzip", gzip.compress(SOUND)),
        ("bzip2", b"BZh91AY&SY"),
        ("xz", b"\xfd7zXZ\0\0"),
        ("zstd", b"\x28\xb5\x2f\xfd\x04"),
        ("zip", b"PK\x03\x04"),
    ):
        (tmp_path / method).write_bytes(content)
        refusals[method] = f"found a file compressed with {method}"
    for name, message in refusals.items():
        with pytest.raises(SourceError, match=message), open_archive(tmp_path / name):
            pass


def test_damage_never_raises_anything_but_a_source_error() -> None:
    rng = np.random.default_rng(0)
    sound = tar_of([("n" * 300, b"x" * 700), ("é.jpg", b"y" * 10), ("b", b"z" * 2000)], FORMATS["pax"])
    for _ in range(600):
        data = bytearray(sound)
        for _ in range(int(rng.integers(1, 4))):
            start = 512 * int(rng.integers(len(sound) // 512))
            place = start + int(rng.choice([rng.integers(512), rng.integers(100, 160), rng.integers(0, 30)]))
            data[place] = int(rng.integers(256))
            block = bytes(data[start : start + 512])
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            data[start + 148 : start + 156] = b"%06o\0 " % total  # so that the fault lies deeper than the checksum
        try:
            for _, member in walk(bytes(data)):
                assert member.offset + member.nbytes <= len(data)
        except SourceError:
            pass


def test_walking_any_number_of_headers_takes_no_memory(tmp_path: Path) -> None:
    count, nbytes = 1_000, 100_352
    with (tmp_path / "x.tar").open("wb") as file:
        for number in range(count):
            file.write(header(b"n01440764_%d.JPEG" % number, nbytes))
            file.seek(nbytes, os.SEEK_CUR)  # nothing is written there: the file is sparse
        file.write(END)
    tracemalloc.start()
    try:
        with open_archive(tmp_path / "x.tar") as archive:
            assert sum(1 for _ in members(archive)) == count
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60_000


def test_generators_are_drained_in_order_on_threads() -> None:
    names = set()

    def walk_of(number: int) -> Generator[int, None, None]:
        names.add(threading.current_thread().name.rpartition("_")[0])
        yield from range(number)

    assert drain(walk_of(number) for number in range(50)) == [list(range(number)) for number in range(50)]
    assert names == {"shardio-scan"}


@pytest.mark.parametrize("error", [SourceError("damaged"), KeyboardInterrupt()])
def test_an_error_in_one_walk_stops_the_others(error: BaseException) -> None:
    begun, closed = threading.Barrier(6), []

    def endless() -> Generator[int, None, None]:
        begun.wait(60)
        try:
            while True:
                time.sleep(0.001)
                yield 0
        finally:
            closed.append(True)

    def failing() -> Generator[int, None, None]:
        begun.wait(60)
        raise error
        yield 0

    with pytest.raises(type(error)):
        drain([failing(), *(endless() for _ in range(5))])
    assert len(closed) == 5
