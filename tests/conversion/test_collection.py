"""Reading one source and noticing its change, wherever it lies."""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from folders import put
from leaks import num_descriptors

from shardio.conversion.images.headers import MAX_SOURCE_NBYTES
from shardio.conversion.sources.collection import Extent, Fault, FileOrigin, Source, identify, read_file
from shardio.errors import DecodeError


def test_a_source_is_read_whole_though_it_is_longer_or_shorter_than_its_size_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 50
    put(tmp_path, "1.jpg", content=content)
    real = os.fstat
    for wrong in (len(content), 0, 1, len(content) - 1, len(content) + 1, 2 * len(content)):

        def fstat(descriptor: int, wrong: int = wrong) -> os.stat_result:
            status = list(real(descriptor))
            status[stat.ST_SIZE] = wrong
            return os.stat_result(status)

        monkeypatch.setattr(os, "fstat", fstat)
        assert read_file(tmp_path / "1.jpg") == content


def test_what_took_the_place_of_a_source_is_refused_unread_and_without_waiting(
    tmp_path: Path, open_socket: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    put(tmp_path, "large.jpg")
    os.truncate(tmp_path / "large.jpg", MAX_SOURCE_NBYTES + 1)  # sparse: it takes no room
    before = num_descriptors()
    for path, found in (
        (tmp_path / "fifo", "unreadable: expected a regular file"),
        (tmp_path / open_socket, "unreadable: No such device or address"),
        (Path("/dev/zero"), "unreadable: expected a regular file"),
        (tmp_path, "unreadable: (expected a regular file|Is a directory)"),
        (tmp_path / "gone.jpg", "unreadable: No such file"),
        (tmp_path / "large.jpg", f"too large: expected at most {MAX_SOURCE_NBYTES:,} bytes, found"),
    ):
        with pytest.raises(DecodeError, match=f"^{found}"):
            read_file(path)
    assert num_descriptors() == before


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_want_of_descriptors_or_memory_is_not_the_fault_of_a_source(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A refusal would leave a sound image out of the set, for a reason that has nothing to do with the image.
    put(tmp_path, "1.jpg")
    failing = Mock(side_effect=OSError(code, os.strerror(code), str(tmp_path / "1.jpg")))
    fault = DecodeError if code == errno.EACCES else OSError
    for call in ("open", "fstat"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with pytest.raises(fault, match=re.escape(os.strerror(code))) as caught:
                read_file(tmp_path / "1.jpg")
        assert isinstance(caught.value, DecodeError) or str(tmp_path / "1.jpg") in str(caught.value)


def test_identity_changes_when_a_source_or_the_file_behind_a_link_is_rewritten_or_lost(tmp_path: Path) -> None:
    path = tmp_path / "1.jpg"
    for name, target in (("link.jpg", "1.jpg"), ("dangling", "nowhere"), ("self", "self")):
        (tmp_path / name).symlink_to(target)
    seen = []
    for content, nanoseconds in ((b"one", 1_000_000_007), (b"one", 1_000_000_008), (b"longer", 1_000_000_008)):
        put(tmp_path, "1.jpg", content=content)
        os.utime(path, ns=(1, nanoseconds))
        assert identify(tmp_path / "link.jpg") == identify(path)
        seen.append(identify(path))
    path.unlink()
    assert identify(path) == identify(tmp_path / "dangling") == identify(tmp_path / "self")
    assert len({*seen, identify(path)}) == 4


def test_a_source_is_read_from_where_it_is_and_not_from_its_key(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg", content=b"one")
    put(tmp_path, "elsewhere.jpg", content=b"another")
    put(tmp_path, "archive", content=b"0123456789")
    origin = FileOrigin(tmp_path)
    assert origin.read(Source(b"a/1.jpg", 0)) == b"one"
    assert origin.read(Source(b"a/1.jpg", 0, b"elsewhere.jpg")) == b"another"
    assert origin.read(Source(b"a/1.jpg", 0, os.fsencode(tmp_path / "elsewhere.jpg"))) == b"another"
    assert origin.read(Source(b"a/1.jpg", 0, Extent(b"archive", 3, 4))) == b"3456"
    assert origin.read(Source(b"a/1.jpg", 0, Extent(b"archive", 3, 0))) == b""
    with pytest.raises(DecodeError, match=r"^unreadable: .*found 2 bytes: .*truncated"):
        origin.read(Source(b"a/1.jpg", 0, Extent(b"archive", 8, 4)))
    with pytest.raises(DecodeError, match=r"^too large: "):
        origin.read(Source(b"a/1.jpg", 0, Extent(b"archive", 0, MAX_SOURCE_NBYTES + 1)))


def test_a_source_with_a_fault_is_refused_with_its_words(tmp_path: Path) -> None:
    origin = FileOrigin(tmp_path)
    with pytest.raises(DecodeError, match=r"^incomplete: there is no label$"):
        origin.read(pickle.loads(pickle.dumps(Source(b"1.jpg", 0, Fault("there is no label")))))
    one, other = (origin.fingerprints([Source(b"1.jpg", 0, Fault(fault))]) for fault in ("one", "other \udcff"))
    assert one != other


def test_an_origin_tells_sizes_without_reading(tmp_path: Path) -> None:
    put(tmp_path, "1.jpg", content=b"12345")
    places = (None, b"1.jpg", Extent(b"no archive", 7, 1000), Fault("no image"), b"gone.jpg")
    sources = [Source(b"1.jpg", 0, place) for place in places]
    assert [FileOrigin(tmp_path).nbytes(some) for some in (*([one] for one in sources), sources)] == [
        *(5, 5, 1000, 0, 0, 1010)
    ]


def test_a_fingerprint_changes_with_the_archive_and_with_the_extent(tmp_path: Path) -> None:
    put(tmp_path, "archive", content=b"0123456789")
    os.utime(tmp_path / "archive", ns=(1, 1_000_000_000))
    origin = FileOrigin(tmp_path)

    def fingerprint(offset: int, nbytes: int) -> str:
        return origin.fingerprints([Source(b"1.jpg", 0, Extent(b"archive", offset, nbytes))])[0]

    seen = {fingerprint(0, 1), fingerprint(1, 1), fingerprint(0, 2)}
    assert fingerprint(0, 1) in seen
    os.utime(tmp_path / "archive", ns=(1, 1_000_000_001))
    seen |= {fingerprint(0, 1), fingerprint(1, 1)}
    assert len(seen) == 5
