"""Damaged images and bombs end no process: short forms of mutate_images.py, and whether it would notice."""

from __future__ import annotations

import mutate_images
import numpy as np
import pytest
from command import printed_by
from mutate_images import judge, mutated_image, sound_images
from places import CHAOS

from shardio.conversion.images.decode import DecodedImage
from shardio.errors import DecodeError


def test_mutated_images_end_no_process_and_raise_nothing_else() -> None:
    printed = printed_by(CHAOS / "mutate_images.py", "--images", "1000", "--seed", "5")
    assert printed.splitlines()[-1] == "1000 images, 0 aborts, 0 hangs, 0 other exceptions or wrong shapes"


def test_bombs_are_refused_within_the_memory_that_the_guide_promises() -> None:
    printed_by(CHAOS / "mutate_images.py", "--bombs", "1")


def test_every_kind_is_mutated_and_some_of_each_still_decode() -> None:
    found: dict[str, set[str]] = {}
    for number in range(1000):
        kind, data = mutated_image(9, number)
        assert mutated_image(9, number) == (kind, data)
        found.setdefault(kind, set()).add(judge(data, number % 2 == 1)[0])
    assert set(found) == set(sound_images())
    for kind, outcomes in found.items():
        assert outcomes >= {"decoded", "damaged", "unsupported"}, kind


def black(height: int, width: int, channels: int = 3) -> np.ndarray:  # type: ignore[type-arg]
    return np.zeros((height, width, channels), np.uint8)


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        (ZeroDivisionError(), "ZeroDivisionError"),
        (DecodeError("odd", "x"), "without a known reason"),
        (DecodeError("damaged", ""), "without a known reason and a detail"),
        (DecodedImage(black(40, 56, 4)), "pixels of uint8 (40, 56, 4)"),
        (DecodedImage(black(40, 55)), "but the header claims {(40, 56)}"),
        (DecodedImage(black(20, 28), "", 4, (40, 56)), "for a source of (40, 56) over 4"),
    ],
)
def test_what_a_decoder_must_not_do_is_noticed(
    result: DecodedImage | Exception, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_image(data: bytes, least_size: object) -> DecodedImage:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(mutate_images, "decode_image", decode_image)
    outcome, text = judge(sound_images()["PNG"][0], False)
    assert outcome == "exception"
    assert wrong in text


def test_a_process_that_dies_or_hangs_is_noticed_and_the_others_images_are_decoded() -> None:
    script = """
import os
import mutate_images as tool
tool.PATIENCE_SECONDS = 0.5
judge = tool.judge
def broken(data, reduce):
    if data == tool.mutated_image(0, 7)[1]:
        os.abort()
    while data == tool.mutated_image(0, 8)[1]:
        pass
    return judge(data, reduce)
tool.sound_images()
tool.judge = broken
counts = tool.mutate_images(40, 0, 2)
print(counts.num_images, counts.aborts, counts.hangs, counts.exceptions)
print(*counts.violations, sep="\\n")
"""
    first, *violations = printed_by("-c", script).splitlines()
    assert first == "40 1 1 0"
    assert [line.split(",")[0] for line in sorted(violations)] == ["image 7 of seed 0", "image 8 of seed 0"]
