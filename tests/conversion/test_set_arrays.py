"""Arrays that `convert` makes: of masks, of smaller pictures, of what a dataset's items hold; the same bytes always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import OPTIONS, SIZE, TWO_PROCESSES, Interrupt
from folders import everything, flip, hashes
from pictures import encode, random_picture
from PIL import Image

from shardio.conversion import task as shardtask
from shardio.conversion.convert import convert
from shardio.conversion.images.fit import Fit
from shardio.conversion.options import Progress
from shardio.errors import ConvertError
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify


def test_the_pixels_and_the_index_are_those_of_a_set_without_arrays(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    convert(Items(7), plain, **OPTIONS)
    convert(Items(7), out, arrays=DECLARED, **OPTIONS)
    shared = hashes(plain).keys() - {"manifest.json"}
    assert {name: hashes(out)[name] for name in shared} == {name: hashes(plain)[name] for name in shared}
    assert not {"masks", "arrays"} & load_manifest(plain).provenance["conversion"].keys()


def test_another_choice_of_arrays_is_another_conversion(
    with_masks: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    src, options = with_masks
    year: dict[str, Any] = {"year": ("array", "int64", ())}
    for _ in range(2):
        convert(src, tmp_path / "out-masks", **options)
        convert(Items(3), tmp_path / "items", size=SIZE, arrays=year)
    before = everything(tmp_path)
    with pytest.raises(ConvertError, match=r"finished set of another conversion .*masks 'uint8', here None"):
        convert(src, tmp_path / "out-masks", **{**options, "masks": None})
    for items, arrays in ((Items(3), None), (Items(3, {1: {"year": np.int64(7)}}), year)):
        with pytest.raises(ConvertError, match="another conversion"):
            convert(items, tmp_path / "items", size=SIZE, arrays=arrays)
    assert everything(tmp_path) == before


# --- the same bytes ---------------------------------------------------------------------------------------------------


def test_any_number_of_workers_and_parts_makes_the_same_bytes(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    for workers in (3, TWO_PROCESSES):
        convert(src, tmp_path / str(workers), **{**options, "workers": workers})
        assert hashes(tmp_path / str(workers)) == undisturbed
    for part in (3, 1, 2):
        report = convert(src, tmp_path / "parts", **options, part=(part, 3))
        assert (report.unfinished is None) == (part == 2)
    assert hashes(tmp_path / "parts") == undisturbed


def test_few_values_in_memory_make_the_same_bytes(
    with_masks: tuple[Path, dict[str, Any]],
    undisturbed: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shardtask, "_VALUES_NBYTES", 2 * SIZE * SIZE)
    src, options = with_masks
    convert(src, tmp_path / "out", **{**options, "workers": 3})
    assert hashes(tmp_path / "out") == undisturbed


def test_a_conversion_that_is_interrupted_among_arrays_resumes_to_the_same_bytes(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    for workers in (1, 2):
        out = tmp_path / str(workers)
        with pytest.raises(KeyboardInterrupt, match="of 16 images are kept"):
            convert(src, out, **{**options, "workers": workers}, on_progress=Interrupt(10))
        recorded = [path.stem for path in (out / ".convert").glob("*.npy.json")]
        shards = {name: (out / name).stat().st_ino for name in recorded}
        assert convert(src, out, **options).num_converted < 16
        assert hashes(out) == undisturbed
        assert {name: (out / name).stat().st_ino for name in recorded} == shards


def test_a_shard_with_a_damaged_array_is_made_again(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "out", **options, on_progress=Interrupt(16))
    flip(tmp_path / "out" / "train-mask-00001.npy")
    assert len(list((tmp_path / "out" / ".convert").glob("*.npy.json"))) == 5
    seen: list[Progress] = []
    report = convert(src, tmp_path / "out", **options, on_progress=seen.append)
    assert (seen[-1].done, seen[-1].refused) == (16, 1)
    assert report.num_converted == 2 + 3  # the last shard of val, and that of the array
    assert hashes(tmp_path / "out") == undisturbed


def test_a_shard_whose_images_are_all_refused_needs_no_arrays(
    with_masks: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    src, options = with_masks
    options = {**options, "order": "source", "max_bad": 16}
    for i in (0, 2, 6):
        (options["masks"] / "train" / "a" / f"{i}.png").unlink(missing_ok=True)
    for part in (1, 2):
        convert(src, tmp_path / "out", **options, part=(part, 2))
    assert verify(tmp_path / "out").ok
    entry = load_manifest(tmp_path / "out").splits["train"]
    assert entry.num_samples == 8
    for array in entry.arrays.values():
        assert [shard.num_samples for shard in array.shards] == [shard.num_samples for shard in entry.shards]


# --- datasets ---------------------------------------------------------------------------------------------------------

DECLARED: dict[str, Any] = {
    "mask": ("mask", "int16", (SIZE, SIZE)),
    "flow": ("mask", "float32", (SIZE, SIZE, 2)),
    "clip": ("array", "float16", (4,)),
    "year": ("array", "int64", ()),
}


def item(i: int, changed: dict[str, Any] | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    height, width = 20 + i, 40 - i
    return {
        "image": random_picture(rng, height, width),
        "label": i % 3,
        "mask": rng.integers(-9, 9, (height, width), dtype=np.int16),
        "flow": torch.from_numpy(rng.standard_normal((height, width, 2)).astype(np.float32)),
        "clip": rng.standard_normal(4).astype(np.float16),
        "year": np.int64(i),
        "comment": "not declared",
        **(changed or {}),
    }


class Items:
    def __init__(self, count: int, bad: dict[int, Any] | None = None) -> None:
        self.count, self.bad = count, bad or {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return item(i, self.bad.get(i))


def test_items_of_a_dataset_bring_their_arrays(tmp_path: Path) -> None:
    options = {**OPTIONS, "fit": "pad", "order": "source"}
    convert({"train": Items(7), "val": Items(2)}, tmp_path / "out", arrays=DECLARED, **options)
    assert verify(tmp_path / "out").ok
    how = Fit((SIZE, SIZE), "pad")
    for split, count in (("train", 7), ("val", 2)):
        shards = open_shards(tmp_path / "out", split)
        assert len(shards) == count
        for i, sample in enumerate(shards):
            given = item(i)
            assert np.array_equal(sample.arrays["mask"], how.apply_nearest(given["mask"]))
            assert np.array_equal(sample.arrays["flow"], how.apply_nearest(given["flow"].numpy()))
            assert np.array_equal(sample.arrays["clip"], given["clip"])
            assert sample.arrays["year"] == i


def test_the_mask_of_an_encoded_item_turns_with_its_picture(tmp_path: Path) -> None:
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[: SIZE // 2] = 7
    exif = Image.Exif()
    exif[0x0112] = 3
    items = [{"image": encode(np.dstack([mask] * 3), "PNG", exif=exif), "mask": mask}]
    options: dict[str, Any] = {"size": SIZE, "arrays": {"mask": ("mask", np.uint8, (SIZE, SIZE))}}
    convert(items, tmp_path / "out", **options, exif_rotate=True)
    assert np.array_equal(open_shards(tmp_path / "out")[0].arrays["mask"], mask[::-1])


def test_pil_masks_and_dicts_without_arrays_are_taken(tmp_path: Path) -> None:
    indices = np.random.default_rng(0).integers(0, 20, (SIZE, SIZE), dtype=np.uint8)
    mask = Image.fromarray(indices, "P")
    items = [{"image": Image.new("RGB", (SIZE, SIZE)), "label": 1, "mask": mask}]
    convert(items, tmp_path / "out", size=SIZE, arrays={"mask": ("mask", np.uint8, (SIZE, SIZE))})
    assert np.array_equal(open_shards(tmp_path / "out")[0].arrays["mask"], indices)
    convert(items, tmp_path / "plain", size=SIZE)
    assert not load_manifest(tmp_path / "plain").splits["train"].arrays


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"mask": np.zeros((20, 31), np.int16)}, ValueError, r"array 'mask': expected a mask of the picture's size"),
        ({"mask": np.zeros((29, 31, 1), np.int16)}, ValueError, r"array 'mask': expected a mask of the picture's size"),
        ({"mask": np.zeros((29, 31), np.int32)}, TypeError, "array 'mask': expected int16, found int32"),
        ({"year": np.zeros(1, np.int64)}, ValueError, r"array 'year': expected shape \(\), found \(1,\)"),
    ],
)
def test_a_wrong_value_names_its_item_and_array(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^dataset 'train', item 9: {message}"):
        convert(Items(20, {9: changed}), tmp_path / "out", arrays=DECLARED, **OPTIONS, order="source")


def test_items_without_what_was_declared_and_wrong_declarations_are_refused(tmp_path: Path, image_tree: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TypeError, match=r"item 0: .*keys image, depth, found the keys image, label, mask"):
        convert(Items(3), out, arrays={"depth": ("array", "u1", ())}, size=SIZE)
    pairs = [(item(0)["image"], 0)]
    with pytest.raises(TypeError, match=r"item 0: .*keys image, depth, found tuple"):
        convert(pairs, out, arrays={"depth": ("array", "u1", ())}, size=SIZE)
    with pytest.raises(ValueError, match="array 'mask': a mask must have the samples' height and width"):
        convert(Items(3), out, arrays={"mask": ("mask", "u1", (8, 8))}, size=SIZE)
    with pytest.raises(ValueError, match="`src` is a path"):
        convert(image_tree, out, arrays=DECLARED, size=SIZE)
    assert not out.exists()
