"""What is left of refused images: as much as a forgiving decoder finds, and no error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pictures import encode, random_picture
from PIL import ImageFile

from shardio.cli.view import refused_pictures
from shardio.conversion.images.decode import decode_leniently
from shardio.conversion.records import Reject

_PICTURE = random_picture(np.random.default_rng(1), 80, 120)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_torn_image_shows_its_upper_part(kind: str) -> None:
    whole = encode(_PICTURE, kind)
    shown = decode_leniently(whole, 400)
    torn = decode_leniently(whole[: len(whole) * 4 // 5], 400)
    assert shown is not None
    assert torn is not None
    assert torn.shape == shown.shape == _PICTURE.shape
    np.testing.assert_array_equal(torn[:16], shown[:16])
    small = decode_leniently(whole, 30)
    assert small is not None
    assert small.shape == (20, 30, 3)


def test_of_odd_and_damaged_images_none_raises_and_the_switch_stays_as_it_was(bad_images: Path) -> None:
    sizes = [None if (shown := decode_leniently(path.read_bytes(), 32)) is None else max(shown.shape[:2])
             for path in sorted(bad_images.rglob("*")) if path.is_file()]  # fmt: skip
    assert {size for size in sizes if size is not None and size > 32} == set()
    assert None in sizes
    assert sum(size is not None for size in sizes) > len(sizes) // 2
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_images_that_are_gone_or_were_too_large_are_not_decoded(tmp_path: Path) -> None:
    for name in ("a/0.jpg", "b/1.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(encode(_PICTURE, "JPEG"))
    rejects = [
        Reject("train", b"a/0.jpg", "damaged", ""),
        Reject("train", b"b/1.jpg", "too large", ""),
        Reject("train", b"c/2.jpg", "damaged", ""),
    ]
    found = refused_pictures(tmp_path, rejects)
    assert [picture is None for picture in found] == [False, True, True]
