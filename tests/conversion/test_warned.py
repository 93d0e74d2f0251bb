"""Warnings while an image is read stay with the image, whatever the filters are, and those of other threads do not."""

from __future__ import annotations

import json
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import shardio
from folders import put
from pictures import encode, random_picture
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.estimate import estimate
from shardio.conversion.images.warned import KeptWarnings

APNG = "Invalid APNG, will use default PNG image if possible"


@pytest.fixture(params=["error", "always", "default", "ignore"])
def filters(request: pytest.FixtureRequest) -> Iterator[str]:
    """The filters that the caller has set for warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter(request.param)
        yield request.param


def png_that_is_warned_of(number: int) -> bytes:
    """A sound picture, and an animation of no frames."""
    data, body = encode(random_picture(np.random.default_rng(number), 24, 24), "PNG"), b"acTL" + bytes(8)
    return data[:33] + struct.pack(">I", 8) + body + struct.pack(">I", zlib.crc32(body)) + data[33:]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number in range(12):
        put(tmp_path / "images", f"c{number % 2}/{number}.png", content=png_that_is_warned_of(number))
    return tmp_path / "images"


@pytest.mark.parametrize("workers", [1, 3])
def test_what_a_decoder_warns_of_is_kept_with_every_image(
    workers: int, filters: str, tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = convert(tree, tmp_path / "out", size=16, workers=workers, shard_size=8_000)
    assert {warned.key for warned in report.warned} == {b"c%d/%d.png" % (i % 2, i) for i in range(12)}
    assert {warned.warning for warned in report.warned} == {APNG}
    assert estimate(tree, size=16, workers=workers, seconds=10).refused == {}
    assert capfd.readouterr() == ("", "")


def test_no_warning_reaches_the_terminal_and_names_are_told(tree: Path, tmp_path: Path) -> None:
    frame = Image.fromarray(random_picture(np.random.default_rng(0), 12, 18))
    (tree / "c0" / "12.gif").write_bytes(encode(frame, "GIF", save_all=True, append_images=[frame.rotate(180)]))
    words = ("convert", tree, tmp_path / "out", "--size", "16", "--shard-size", "8kB", "--workers", 6)
    result = shardio(*words)  # with -W error
    assert result.returncode == 0
    assert all(line.startswith("shardio: ") for line in result.stderr.splitlines())
    lines = [line for line in result.stdout.splitlines() if " warning " in line]
    several = "GIF of several pictures: the first one was taken"
    assert sorted(line.split(maxsplit=2)[2] for line in lines) == [  # one for all images of the same warning
        several,
        f"and 11 more: {APNG}",
    ]
    facts = json.loads(shardio(*words[:2], tmp_path / "again", *words[3:], "--json").stdout)
    assert (len(facts["warned"]), set(facts["warned"].values()), facts["mended"]) == (13, {APNG, several}, [])


class OddItems:
    """A dataset that warns of items, and of its own code, and changes the filters."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        warnings.simplefilter("error", UserWarning)
        warnings.warn("this code is old", DeprecationWarning, stacklevel=1)
        with KeptWarnings():
            warnings.warn("kept by an inner block", stacklevel=1)
        if number % 2:
            warnings.warn(f"item {number}\nis odd", RuntimeWarning, stacklevel=1)
        return np.full((8, 8, 3), number, np.uint8), 0


def test_what_a_dataset_warns_of_is_kept_with_its_items(
    filters: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(warnings.filters)
    report = convert(OddItems(), tmp_path / "out", size=8)
    assert {m.key: m.warning for m in report.warned} == {b"%d" % i: f"item {i} is odd" for i in range(1, 12, 2)}
    assert len(warnings.filters) <= before + 2  # one of the dataset's, and one of ours
    assert capfd.readouterr() == ("", "")


def test_warnings_of_other_threads_go_where_they_would() -> None:  # here warnings are errors
    inside, done = threading.Event(), threading.Event()

    def keep() -> None:
        with KeptWarnings() as kept:
            inside.set()
            assert done.wait(30)
            warnings.warn("of the thread", stacklevel=1)
        found.extend(kept)

    found: list[str] = []
    thread = threading.Thread(target=keep)
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(UserWarning, match="of another"):
            warnings.warn("of another", stacklevel=1)
    finally:
        done.set()
        thread.join()
    assert found == ["of the thread"]
    with pytest.raises(UserWarning, match="after the block"):
        warnings.warn("after the block", stacklevel=1)
