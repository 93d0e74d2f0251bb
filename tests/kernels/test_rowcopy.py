"""Every kernel copies the same bytes, nothing beside them, and nothing at all if a row or a window is not inside."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from shardio.kernels import _rowcopy, rowcopy
from shardio.kernels.pixels import run_steps
from shardio.kernels.rowcopy import Windows, copy_rows, copy_spans, copy_windows
from shardio.kernels.rowread import read_rows, read_windows

FORMS = tuple(filter(None, _rowcopy.KERNELS))
# From here on native kernels store past the caches.
STREAMED = 1 << 20
GUARD = 0xA5


def fenced(shape: tuple[int, ...], shift: int) -> tuple[np.ndarray, Callable[[], bool]]:
    """Memory that begins `shift` bytes behind a cache line, and a check that the bytes around it were left alone."""
    nbytes = int(np.prod(shape))
    memory = np.full(nbytes + 64 + shift + 64 + 64, GUARD, np.uint8)
    start = 64 + -memory.ctypes.data % 64 + shift
    out = memory[start : start + nbytes].reshape(shape)
    return out, lambda: bool((memory[:start] == GUARD).all() and (memory[start + nbytes :] == GUARD).all())


def random_rows(rng: np.random.Generator, count: int, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, (count, nbytes), dtype=np.uint8)


@pytest.fixture(params=FORMS, autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant of the kernel that this processor can run."""
    monkeypatch.setattr(rowcopy, "_FORM", _rowcopy.KERNELS.index(request.param))


def test_small_rows_of_every_size_and_alignment_are_copied() -> None:
    rng = np.random.default_rng(0)
    for nbytes, shift in product([*range(1, 70), 127, 128, 129, 1023, 1024, 1025, 4097], (0, 1, 33, 63)):
        rows = random_rows(rng, 5, nbytes)
        for numbers in ([], [4], [0, 4, 4, 2]):
            out, untouched = fenced((len(numbers), nbytes), shift)
            copy_rows(rows, np.array(numbers, np.int64), out)
            assert np.array_equal(out, rows[numbers] if numbers else out), (nbytes, shift, numbers)
            assert untouched(), (nbytes, shift, numbers)


@pytest.mark.parametrize("nbytes", [63, 4097, 150_528, 196_609, STREAMED + 1])
@pytest.mark.parametrize("shift", [0, 1, 63])
def test_large_rows_are_copied_one_after_the_other_and_to_lines(nbytes: int, shift: int) -> None:
    rng = np.random.default_rng(nbytes + shift)
    rows = random_rows(rng, 4, nbytes)
    numbers = rng.integers(0, 4, max(3, 2 * STREAMED // nbytes))
    count = len(numbers)
    for lines in (None, rng.permutation(count + 3)[:count]):
        out, untouched = fenced((count if lines is None else count + 3, nbytes), shift)
        assert out.nbytes >= STREAMED
        expected = np.full_like(out, GUARD)
        expected[slice(None) if lines is None else lines] = rows[numbers]
        assert copy_rows(rows, numbers, out, lines) == count
        assert np.array_equal(out, expected)
        assert untouched()


def test_windows_of_several_sizes_are_copied_one_after_the_other() -> None:
    rng = np.random.default_rng(2)
    for shape, count in (((4, 5, 3), 400), ((256, 300, 4), 30), ((256, 300, 3), 40), ((256, 300, 1), 110)):
        images = rng.integers(0, 256, (6, *shape), dtype=np.uint8)
        heights, widths = (rng.integers(1, side + 1, count) for side in shape[:2])
        heights[:2], widths[1:3] = shape[0], shape[1]
        tops, lefts = rng.integers(0, shape[0] - heights + 1), rng.integers(0, shape[1] - widths + 1)
        windows, numbers = Windows(tops, lefts, heights, widths), rng.integers(0, 6, count)
        out, untouched = fenced((int(windows.num_pixels.sum()) * shape[2],), 3)
        assert (out.nbytes >= STREAMED) == (shape != (4, 5, 3))
        assert copy_windows(images, numbers, windows, out) == count
        expected = [images[number][windows.part(i)].reshape(-1) for i, number in enumerate(numbers)]
        assert np.array_equal(out, np.concatenate(expected))
        assert untouched()


@pytest.mark.parametrize("bad", [-1, 100_000, 2**61, 2**62, -(2**63)])
@pytest.mark.parametrize("at", [0, 7, 15])
def test_nothing_is_copied_if_one_number_window_or_line_is_outside(bad: int, at: int) -> None:
    images, zeros = np.zeros((5, 100, 1000, 1), np.uint8), np.zeros(16, np.int64)
    rows, wrong = images.reshape(5, -1), np.where(np.arange(16) == at, bad, 0)
    out, untouched = fenced((16, 100_000), 1)
    cut = out.reshape(-1)[: 16 * 81].reshape(16, 9, 9, 1)
    with pytest.raises(IndexError):
        copy_rows(rows, wrong, out)
    for numbers, tops, lefts in ((wrong, zeros, zeros), (zeros, wrong, zeros), (zeros, zeros, wrong)):
        with pytest.raises(IndexError):
            copy_windows(images, numbers, Windows.of_one_size(9, 9, tops, lefts), cut)
    with pytest.raises(IndexError):
        copy_rows(rows, zeros, out, wrong)
    assert (out == GUARD).all()
    assert untouched()


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows, images = np.zeros((5, 60), np.uint8), np.zeros((5, 4, 5, 3), np.uint8)
    two, out = np.arange(2), np.zeros((2, 60), np.uint8)
    for numbers, target in ((np.arange(3), out), (two, out[:, :59].copy()), (two, np.zeros((3, 60), np.uint8))):
        with pytest.raises(ValueError, match="out must have the shape"):
            copy_rows(rows, numbers, target)
    for height, width in ((5, 5), (4, 6), (0, 5), (4, 0)):
        with pytest.raises(IndexError, match=f"found {height} x {width} pixels"):
            copy_windows(images, two, Windows.of_one_size(height, width, two * 0, two * 0), out)
    with pytest.raises(ValueError, match="as large as"):
        copy_windows(images, two, Windows.of_one_size(4, 5, two * 0, two * 0), np.zeros((2, 4, 5, 2), np.uint8))
    for count in (0, 1, 3):
        some = np.zeros(count, np.int64)
        with pytest.raises(ValueError, match="one window"):
            copy_windows(images, two, Windows.of_one_size(1, 1, some, some), out)
        with pytest.raises(IndexError, match="expected as many tops"):
            copy_windows(images, two, Windows(two, two, two, some), out)


def test_no_kernel_writes_bytes_over_the_pointers_of_objects() -> None:
    rows, images, two = np.zeros((5, 60), np.uint8), np.zeros((5, 4, 5, 3), np.uint8), np.arange(2)
    out: Any = np.array([["kept"] * 60] * 2, object)
    calls: list[Callable[[], object]] = [
        lambda: copy_rows(rows, two, out),
        lambda: copy_windows(images, two, Windows.whole(2, 4, 5), out),
        lambda: copy_spans(rows.reshape(-1), two, out),
        lambda: read_rows(-1, two, two, 60, out, False),
        lambda: read_windows(-1, np.zeros((1, 4), np.int64), 1, 1, rows, out, False),
        lambda: run_steps(out.reshape(2, 4, 5, 3), np.zeros((1, 2), np.uint8), np.zeros((1, 2, 12))),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="uint8"):
            call()
    assert (out == "kept").all()


NATIVE: dict[str, Any] = {
    "rows": np.zeros((5, 20), np.uint8),
    "row_nbytes": 20,
    "numbers": np.array([0, 4]),
    "starts": np.zeros(2, np.int64),
    "pieces": np.array([2, 2]),
    "piece_nbytes": np.array([10, 10]),
    "stride": 10,
    "places": None,
    "out": np.zeros(40, np.uint8),
    "kernel": 0,
}


@pytest.mark.parametrize(
    "change",
    [
        *({"row_nbytes": nbytes} for nbytes in (0, -1, 21)),
        *({"pieces": np.array(pieces)} for pieces in ([1, 0], [1, -1], [1, 2**62], [2], [2, 1])),
        *({"piece_nbytes": np.array(nbytes)} for nbytes in ([1, 0], [1, 11], [1, 2**62], [10], [10, 9])),
        *({name: None} for name in ("pieces", "piece_nbytes")),
        *({"stride": stride} for stride in (-1, 0, 11, 2**62)),
        *({"numbers": numbers} for numbers in (np.zeros(3, np.int64), np.zeros(3, np.int8), np.array([0, 5]))),
        *({"starts": starts} for starts in (np.zeros(3, np.int64), np.array([0, 1]), np.array([0, -1]))),
        *({"out": out} for out in (np.full(41, GUARD, np.uint8), np.zeros(0, np.uint8), b"x" * 40)),
        *({"places": np.array(places)} for places in ([0, 21], [0, 41], [-1, 0], [0])),
        {"places": np.array([0, 20]), "pieces": np.array([2, 2**62])},
        *({"kernel": kernel} for kernel in (-1, 99)),
    ],
)
def test_the_native_code_itself_refuses_what_would_leave_its_memory(change: dict[str, Any]) -> None:
    _rowcopy.copy(*NATIVE.values())
    given = {**NATIVE, "out": np.full(40, GUARD, np.uint8), **change}
    with pytest.raises((ValueError, IndexError, TypeError, BufferError)):
        _rowcopy.copy(*given.values())
    assert set(given["out"]) <= {GUARD, ord("x")}
