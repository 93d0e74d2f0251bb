"""Damaged arrays of a set are made again from their sources, to the same bytes; those that cannot be are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import OPTIONS, SIZE
from folders import flip, hashes
from numpy.typing import NDArray
from pictures import encode
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.repair import repair
from shardio.errors import ConvertError, FormatError
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

# --- repair -----------------------------------------------------------------------------------------------------------


def damage(out: Path) -> set[str]:
    """Damages files of every kind. Returns their names."""
    flip(out / "train-mask-00001.npy")
    (out / "train-mask-00002.npy").unlink()
    (out / "val-mask-00000.npy").write_bytes(b"")
    flip(out / "val-mask-crc32.npy")
    return {"train-mask-00001.npy", "train-mask-00002.npy", "val-mask-00000.npy", "val-mask-crc32.npy"}


def test_damaged_arrays_are_made_again(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    damaged = damage(out)
    assert set(repair(out, src, masks=options["masks"]).repaired) == damaged
    assert hashes(out) == undisturbed
    damaged = damage(out)
    for name in ("train-00001.npy", "train-index.npy", "rejects.jsonl", "val-00000.npy", "train-mask-crc32.npy"):
        flip(out / name)
        damaged.add(name)
    assert set(repair(out, src, masks=options["masks"], workers=2).repaired) == damaged
    assert hashes(out) == undisturbed


def test_without_the_masks_all_else_is_repaired_and_the_masks_are_named(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    damaged = damage(out)
    flip(out / "train-00001.npy")
    with pytest.raises(ConvertError, match=r"train-mask-00001.npy, .*val-mask-crc32.npy cannot be made again without"):
        repair(out, src)
    assert {problem.file for problem in verify(out).problems} == damaged
    repair(out, src, masks=options["masks"])
    assert hashes(out) == undisturbed


def test_a_changed_mask_makes_no_other_set(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    for path in (options["masks"] / "train").glob("*/*.png"):
        height, width = np.asarray(Image.open(path)).shape
        path.write_bytes(encode(np.zeros((height, width), np.uint8), "PNG"))
    flip(out / "train-mask-00001.npy")
    flip(out / "train-00001.npy")
    with pytest.raises(ConvertError, match=r"1 files cannot be made again.*train-mask-00001.npy: expected sha256"):
        repair(out, src, masks=options["masks"])
    assert [problem.file for problem in verify(out).problems] == ["train-mask-00001.npy"]


def test_an_array_that_convert_did_not_make_is_named(image_tree: Path, tmp_path: Path) -> None:
    from arrays import change_split, some_arrays

    convert(image_tree, tmp_path / "out", **OPTIONS)
    count = len(open_shards(tmp_path / "out"))
    values: NDArray[Any] = some_arrays(count, SIZE, SIZE)["clip"][1]
    change_split(tmp_path / "out", {"clip": ("array", values)})
    flip(tmp_path / "out" / "train-clip-00000.npy")
    flip(tmp_path / "out" / "train-00000.npy")
    with pytest.raises((ConvertError, FormatError), match=r"train-clip-00000.npy: `convert` did not make it"):
        repair(tmp_path / "out", image_tree)
    assert [problem.file for problem in verify(tmp_path / "out").problems] == ["train-clip-00000.npy"]
