"""Files of keys and arrays that callers pass in, which may hold anything."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import must_not_block

from shardio.changes.labels import read_labels
from shardio.errors import SourceError
from shardio.sets import given
from shardio.sets.given import ArrayFile, read_keys


def test_keys_are_read_from_lines_and_from_arrays(tmp_path: Path) -> None:
    names = ["c3/3.png", "c3/17.png"]
    (tmp_path / "lines.txt").write_bytes("\ufeff".encode() + "\r\n".join(names).encode() + b"\r\n\n")
    np.save(tmp_path / "text.npy", np.array(names))
    np.save(tmp_path / "bytes.npy", np.array(names, "S"))
    np.savez(tmp_path / "both.npz", keys=np.array(names), other=np.zeros(3))
    for name in ("lines.txt", "text.npy", "bytes.npy", "both.npz"):
        assert read_keys(tmp_path / name) == [key.encode() for key in names]


def test_files_that_hold_no_keys_or_no_array_are_refused_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", keys=np.array([{}], object))
    np.savez(tmp_path / "several.npz", a=np.zeros(1), b=np.zeros(1))
    np.save(tmp_path / "numbers.npy", np.zeros(25))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "gap").write_bytes(b"a\n\nb\n")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "numbers.npy").read_bytes()[:40])
    (tmp_path / "short.npy").write_bytes((tmp_path / "numbers.npy").read_bytes()[:-8])
    (tmp_path / "zip.npz").write_bytes(b"PK\x03\x04" + b"x" * 40)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 60,), }"
    (tmp_path / "lie.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    (tmp_path / "link").symlink_to("numbers.npy")
    os.mkfifo(tmp_path / "fifo")
    for read in (read_keys, ArrayFile):
        for path in tmp_path.iterdir():
            if read is read_keys or path.name != "numbers.npy":
                with must_not_block(), pytest.raises(SourceError, match=path.name):
                    read(path)
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "nothing")


@pytest.mark.parametrize("rows", [slice(None), np.arange(24, -1, -1)], ids=["all", "by number"])
def test_an_array_file_that_is_truncated_while_it_is_read_is_an_error_that_names_it(rows: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "big.npy", np.ones((25, 4 << 10), "<f8"))
    file = ArrayFile(tmp_path / "big.npy")
    os.truncate(tmp_path / "big.npy", 1 << 14)
    with pytest.raises(SourceError, match=r"big\.npy.*truncated"):
        file[rows]


def test_an_archive_or_table_that_unpacks_to_far_more_than_it_is_gets_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", keys=np.zeros(1 << 20, "S70"))
    with pytest.raises(SourceError, match=r"bomb\.npz.*unpacked"):
        read_keys(tmp_path / "bomb.npz")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"key": pyarrow.array(["k" * 70] * (1 << 20)), "label": pyarrow.array([0] * (1 << 20))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "bomb.parquet")
    with pytest.raises(SourceError, match=r"bomb\.parquet.*unpacked"):
        read_labels(tmp_path / "bomb.parquet")


def test_no_damage_of_a_file_is_anything_but_a_clear_error(tmp_path: Path) -> None:
    np.save(tmp_path / "array", np.zeros((25, 3), "<f4"))
    np.save(tmp_path / "keys", np.array([f"k{i}" for i in range(9)]))
    np.savez_compressed(tmp_path / "zip", keys=np.array([f"k{i}" for i in range(9)]))
    (tmp_path / "labels.csv").write_text("key,label\na,b\nc,d\n")
    readers: list[tuple[Callable[[Path], object], str]] = [
        (lambda path: ArrayFile(path)[:], "array.npy"),
        (read_keys, "keys.npy"),
        (read_keys, "zip.npz"),
        (read_labels, "labels.csv"),
    ]
    rng = random.Random(5)
    refused = 0
    for _ in range(600):
        read, name = rng.choice(readers)
        data = bytearray((tmp_path / name).read_bytes())
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(min(len(data), 130) if rng.random() < 0.7 else len(data))
            change = rng.random()
            if change < 0.5:
                data[at] = rng.randrange(256)
            elif change < 0.7:
                data[at:at] = bytes(rng.choices(b"()[]{},'\"0123456789:<>Of\n", k=rng.randint(1, 60)))
            else:
                del data[at : at + rng.randint(1, 20)]
            data = data or bytearray(b"x")
        (tmp_path / "damaged").write_bytes(data)
        try:
            read(tmp_path / "damaged")
        except SourceError as error:
            refused += "damaged" in str(error)
    assert refused > 300


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_pages_of_parquet_say_what_they_unfold_to(tmp_path: Path, codec: str, version: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "text": [f"{i % 700}" * 50 for i in range(5000)],
        "lists": [[i] * 3 for i in range(5000)],
        "n": range(5000),
    }
    path = tmp_path / "a.parquet"
    small = {"data_page_size": 4096, "row_group_size": 2000, "write_batch_size": 100}
    pq.write_table(pa.table(columns), path, compression=codec, data_page_version=version, **small)
    metadata = pq.read_metadata(path)
    for group, number in itertools.product(range(3), range(3)):
        chunk = metadata.row_group(group).column(number)
        with path.open("rb") as file:
            sizes, counts = zip(*given._pages(path, file, chunk), strict=True)
        assert len(sizes) >= 2
        assert 0 < chunk.total_uncompressed_size - sum(sizes) < 1000 * len(sizes)  # the headers, with statistics
        assert sum(counts) >= chunk.num_values


def test_a_large_page_of_parquet_is_read_if_it_is_as_large_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(given, "_PAGE_NBYTES", 1000)
    path = tmp_path / "a.parquet"
    for values, is_refused in (([random.Random(0).randbytes(5000)], False), ([bytes(5000)], True)):
        pq.write_table(pa.table({"image": values}), path, compression="zstd")
        with given.open_parquet(path) as file:
            if is_refused:
                with pytest.raises(SourceError, match=r"a\.parquet.*smaller pages"):
                    list(given.read_batches(path, file, ["image"]))
            else:
                (batch,) = given.read_batches(path, file, ["image"])
                assert batch.column("image").to_pylist() == values
