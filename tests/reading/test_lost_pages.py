"""Storage that fails behind a mapping: an error that names what is lost, and never the end of the process."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from command import run_forked
from numpy.typing import NDArray
from pictures import sample_pixels
from truncate_shards import truncate_shards

import shardio.kernels.resample
import shardio.kernels.rowcopy
import shardio.reading.mapped_table
from shardio.augment import HorizontalFlip, RandomResizedCrop
from shardio.augment.chain import Transform
from shardio.errors import FormatError
from shardio.format.layout import HEADER_NBYTES
from shardio.kernels import _rowcopy
from shardio.kernels.rowcopy import Windows
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import ShardSet, open_shards

# A sample is two pages, so that a file that is cut behind whole pages has lost whole samples.
SHAPE = (64, 64, 2)
NBYTES = 8192
SAMPLES = 40
PER_SHARD = 20
KEPT = 12


@pytest.fixture(params=filter(None, _rowcopy.KERNELS))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.kernels.rowcopy, "_FORM", _rowcopy.KERNELS.index(request.param))


@pytest.fixture
def path(make_set: Callable[..., Path], no_pauses: list[float]) -> Path:
    return make_set(SAMPLES, SHAPE, PER_SHARD)


@pytest.fixture
def shards(path: Path) -> ShardSet:
    return open_shards(path)


def cut(shards: ShardSet, name: str = "train-00001.npy", nbytes: int = HEADER_NBYTES + KEPT * NBYTES) -> None:
    os.truncate(shards.path / name, nbytes)


def gathered(shards: ShardSet, indices: list[int], windows: Windows | None = None) -> NDArray[np.uint8]:
    shape = SHAPE if windows is None else (int(windows.heights[0]), int(windows.widths[0]), SHAPE[2])
    out = np.full((len(indices), *shape), 0xEE, np.uint8)
    shards.gather(np.array(indices), out, windows)
    return out


def pixels(indices: list[int]) -> NDArray[np.uint8]:
    return np.stack([sample_pixels(i, SHAPE) for i in indices])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("times", [1, 6])  # from 1 MiB on, native kernels store past the caches
def test_samples_that_were_cut_off_are_an_error_that_names_file_and_sizes(shards: ShardSet, times: int) -> None:
    cut(shards)
    whole, kept = HEADER_NBYTES + PER_SHARD * NBYTES, list(range(PER_SHARD + KEPT)) * times
    message = rf"train-00001\.npy: expected {whole} bytes, .* found {HEADER_NBYTES + KEPT * NBYTES} bytes"
    for lost in (PER_SHARD + KEPT, SAMPLES - 1):
        with pytest.raises(FormatError, match=message):
            gathered(shards, [*kept, lost, *kept])
    assert np.array_equal(gathered(shards, kept), pixels(kept))


@pytest.mark.usefixtures("kernel")
def test_a_window_is_lost_only_if_its_lines_are(shards: ShardSet) -> None:
    cut(shards, nbytes=HEADER_NBYTES + KEPT * NBYTES + NBYTES // 2)  # a page of the first lost sample is there
    half = PER_SHARD + KEPT

    def window(top: int) -> Windows:
        return Windows.of_one_size(8, 16, np.array([top]), np.array([5]))

    assert np.array_equal(gathered(shards, [half], window(24))[0], sample_pixels(half, SHAPE)[24:32, 5:21])
    with pytest.raises(FormatError, match="another process truncated it"):
        gathered(shards, [half], window(25))


def test_labels_that_were_cut_off_are_an_error_too(make_set: Callable[..., Path], no_pauses: list[float]) -> None:
    shards = open_shards(make_set(500, (1, 1, 1), 500))
    expected = shards.labels.copy()
    cut(shards, "train-index.npy", HEADER_NBYTES)
    assert len(shards.labels_of(np.array([], np.int64))) == 0
    with pytest.raises(FormatError, match=r"train-index\.npy: expected .* another process truncated it"):
        shards.labels_of(np.array([499]))
    assert np.array_equal(shards.labels, expected)


@pytest.mark.parametrize("transform", [RandomResizedCrop(20), HorizontalFlip(0.0)])
def test_pixels_that_are_made_in_the_mapping_end_in_the_same_error(transform: Transform, path: Path) -> None:
    load = partial(ShardLoader, path, 4, shuffle=False, io="mmap", device="cpu")
    with load(transform=transform) as loader:
        expected = [images.clone() for images, _ in loader]
    with load(transform=transform, prefetch=0) as loader:
        batches = iter(loader)
        assert torch.equal(next(batches)[0], expected[0])
        cut(loader.shards)
        for batch in expected[1 : (PER_SHARD + KEPT) // 4]:
            assert torch.equal(next(batches)[0], batch)
        with pytest.raises(FormatError, match=r"train-00001\.npy: .* another process truncated it") as caught:
            next(batches)
        assert caught.value.__context__ is None


def test_shards_that_are_truncated_at_random_moments_give_no_wrong_pixel(
    tmp_path: Path, no_pauses: list[float]
) -> None:
    counts = truncate_shards(tmp_path, 12, seed=3, say=print)
    assert counts.violations == []
    assert (counts.rounds, counts.whole + counts.errors) == (12, 12)
    assert counts.errors
    assert counts.batches


def test_pixels_that_are_made_in_the_mapping_are_made_again_from_what_comes_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shardio.kernels.resample._native.resample
    asked: list[int] = []

    def stop_once(*arguments: Any) -> int:
        asked.append(arguments[2])
        return made(*arguments) - (len(asked) == 1)

    load = partial(ShardLoader, path, SAMPLES, transform=RandomResizedCrop(20), num_threads=1, io="mmap", device="cpu")
    with load() as loader:
        (expected, _), *_ = loader
    monkeypatch.setattr(shardio.kernels.resample, "_native", SimpleNamespace(resample=stop_once))
    with load() as loader:
        (found, _), *_ = loader
    assert torch.equal(found, expected)
    assert asked == [SHAPE[1] * SHAPE[2], 0]  # in the mapping, and then from a copy


def test_threads_that_lose_pages_do_not_disturb_the_others(shards: ShardSet) -> None:
    cut(shards)
    kept = list(range(PER_SHARD + KEPT))
    expected = pixels(kept)

    def work(number: int) -> None:
        if number % 2:
            assert np.array_equal(gathered(shards, kept), expected)
        else:
            with pytest.raises(FormatError):
                gathered(shards, [*kept, SAMPLES - 1])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(100)))


def test_what_comes_when_asked_again_is_taken(
    shards: ShardSet, no_pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_rows = shardio.kernels.rowcopy.copy_rows
    asked: list[int] = []

    def in_pieces(rows: Any, numbers: Any, out: Any) -> int:
        asked.append(len(numbers))
        return copy_rows(rows, numbers[:3], out[:3])  # then a page is lost, for this time

    monkeypatch.setattr(shardio.reading.mapped_table, "copy_rows", in_pieces)
    indices = [30, 1, 1, 17, 39, 0, 22, 22, 5, 6, 7, 8]
    assert np.array_equal(gathered(shards, indices), pixels(indices))
    assert asked == [12, 9, 6, 3]
    assert no_pauses == list(shardio.system.pour.RETRY_SECONDS)


def test_what_never_comes_is_an_error_with_the_reason_that_reading_gives(
    shards: ShardSet, no_pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardio.reading.mapped_table, "copy_rows", lambda rows, numbers, out: 0)
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
    with pytest.raises(OSError, match=rf"sample 25 at byte {HEADER_NBYTES + 5 * NBYTES} .*\(attempts: 4\)") as caught:
        gathered(shards, [25])
    assert caught.value.errno == errno.ESTALE
    assert caught.value.filename == str(shards.path / "train-00001.npy")
    assert no_pauses == list(shardio.system.pour.RETRY_SECONDS)


def test_a_file_that_was_cut_and_then_replaced_by_a_good_one_is_named(shards: ShardSet) -> None:
    path = shards.path / "train-00001.npy"
    shutil.copyfile(path, shards.path / "good")
    cut(shards)
    (shards.path / "good").rename(path)
    with pytest.raises(OSError, match=r"sample 39 at byte .* open the set again") as caught:
        gathered(shards, [39])
    assert caught.value.errno == errno.EIO
    assert np.array_equal(gathered(open_shards(shards.path), [39]), pixels([39]))


_OTHER_FAULT = """\
import faulthandler, os, signal, sys
import numpy as np
how, path = sys.argv[1:]
if how in ("faulthandler before", "disabled"):
    faulthandler.enable()
from shardio.reading.shardset import open_shards
shards = open_shards(path)
out = np.empty((1, *shards.sample_shape), np.uint8)
shards.gather(np.array([1]), out)
if how == "faulthandler after":
    faulthandler.enable()
if how == "disabled":
    faulthandler.disable()  # puts back what was there before it, in our place
os.truncate(os.path.join(path, "train-00001.npy"), 4096)
try:
    shards.gather(np.array([39]), out)
except ValueError:
    print("an error", flush=True)
if how == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
print(int(shards.mapped().file_rows[1][19].sum()))  # not in a copy of ours
"""


@pytest.mark.parametrize("how", ["no handler", "sent", "faulthandler before", "faulthandler after", "disabled"])
def test_faults_elsewhere_end_the_process_as_ever(path: Path, how: str) -> None:
    if how in ("faulthandler before", "disabled"):  # before shardio is imported
        command = [sys.executable, "-c", _OTHER_FAULT, how, str(path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    else:
        result = run_forked("-c", _OTHER_FAULT, how, path)
    assert result.returncode == -signal.SIGBUS
    assert result.stdout == "an error\n"
    assert ("Fatal Python error: Bus error" in result.stderr) == how.startswith("faulthandler")
