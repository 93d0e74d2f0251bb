"""Contact sheets: pictures side by side with captions, as an image and in a terminal."""

from __future__ import annotations

import re
from unicodedata import east_asian_width

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from shardio.drawing.sheet import in_blocks, sheet


def flat(color: tuple[int, ...], height: int = 128, width: int = 128) -> NDArray[np.uint8]:
    return np.broadcast_to(np.array(color, np.uint8), (height, width, len(color))).copy()


def holds(image: Image.Image, color: tuple[int, int, int]) -> int:
    """Returns how many pixels have this color."""
    return int((np.asarray(image) == color).all(axis=2).sum())


def test_every_picture_is_on_the_sheet_in_its_own_pixels() -> None:
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)]
    drawn = sheet([flat(color) for color in colors], [""] * 5, columns=3)
    assert all(holds(drawn, color) == 128 * 128 for color in colors)
    assert drawn.size == (3 * 134 + 6, 2 * 148 + 6)


def test_small_pictures_are_enlarged_in_whole_multiples_and_large_ones_reduced() -> None:
    for height, width, shown in ((32, 32, 96), (96, 96, 96), (200, 100, 200), (500, 100, 224)):
        drawn = sheet([flat((9, 200, 9), height, width)], [""])
        assert drawn.height == shown + 12 + 14
        assert holds(drawn, (9, 200, 9)) == shown * round(shown * width / height)


def test_pictures_of_any_channels_are_shown() -> None:
    for channels in (1, 2, 3, 4, 7):
        assert holds(sheet([flat((70,) * channels)], [""]), (70, 70, 70)) == 128 * 128


def test_captions_are_cut_to_the_width_of_a_picture() -> None:
    without = sheet([flat((0, 0, 0))] * 2, ["", ""])
    lines = sheet([flat((0, 0, 0))] * 2, ["one\ntwo", "x" * 500])
    assert lines.width == without.width
    assert lines.height == without.height + 14
    # The second caption ends within its picture.
    right = np.asarray(lines)[-20:, -6:]
    assert (right == right[0, 0]).all()


def test_text_that_the_font_lacks_is_shown_as_question_marks() -> None:
    assert sheet([flat((0, 0, 0))], ["\udcff\u4e2d\x07"]).tobytes() == sheet([flat((0, 0, 0))], ["??\x07"]).tobytes()


def test_a_sheet_of_no_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one picture"):
        sheet([], [])


def test_half_blocks_fit_the_terminal_and_show_the_colors() -> None:
    lines = list(in_blocks([flat((10, 20, 30), 100, 200)], [""], 80, group=1))
    assert len(lines) == 22
    for line in lines[:20]:
        assert line.count("\u2580") == 80
        assert line.startswith("\x1b[38;2;10;20;30m\x1b[48;2;10;20;30m")
        assert line.endswith("\x1b[0m")


@pytest.mark.parametrize(
    ("width", "group", "per_row"),
    [(40, 1, 1), (80, 1, 3), (120, 1, 5), (120, 2, 4), (120, 9, 3), (9, 1, 1)],
)
def test_captions_are_text_below_pictures_of_20_cells_or_more(width: int, group: int, per_row: int) -> None:
    key = "train/\u732b\u732b\x07\x1b[31m/n01440764_10026.JPEG"
    captions = [f"{number}  cat\n{key}" for number in range(18)]
    text = "\n".join(in_blocks([flat((1, 2, 3))] * 18, captions, width, group=group))
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).split("\n")
    assert "\x1b[31m" not in text
    assert "\x07" not in text
    assert next(line for line in lines if "cat" in line).count("cat") == per_row
    assert max(sum(2 if east_asian_width(c) in "WF" else 1 for c in line) for line in lines) <= width
    if per_row == 1 and width > 20:
        assert rb"train/\u732b".decode("unicode_escape") in "".join(lines)
        assert r"\x07\x1b[31m/n01440764" in "".join(lines)
