"""Boxes from COCO's JSON, VOC's XML and YOLO's text: each is in its picture's sample, or there is an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import shardio
from conversions import rejects
from numpy.typing import NDArray
from pictures import encode, random_picture

from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.conversion.convert import convert
from shardio.conversion.repair import repair
from shardio.errors import ConvertError, SourceError
from shardio.reading.shardset import open_shards
from shardio.sets.selection import Selection
from shardio.sets.verify import verify

SIDE = 32
OPTIONS: dict[str, Any] = {"size": SIDE, "fit": "squash", "order": "source", "workers": 1}

# (height, width) of each picture, and (left, top, right, bottom, class) of its boxes in whole pixels.
PICTURES: dict[str, tuple[tuple[int, int], list[tuple[int, int, int, int, str]]]] = {
    "a": ((20, 40), [(0, 0, 40, 20, "dog"), (3, 4, 9, 19, "ape")]),
    "b": ((64, 16), []),
    "c": ((33, 57), [(1, 2, 3, 5, "cat")]),
    "d": ((48, 32), [(5, 6, 30, 40, "ape"), (0, 1, 1, 2, "cat"), (8, 8, 24, 24, "ape")]),
}
CLASSES = ["dog", "cat", "ape"]


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def put_pictures(folder: Path, names: Sequence[str] = tuple(PICTURES)) -> Path:
    for i, name in enumerate(names):
        put(folder / f"{name}.png", encode(random_picture(np.random.default_rng(i), *PICTURES[name][0]), "PNG"))
    return folder


def coco(names: Sequence[str] = tuple(PICTURES), **changed: Any) -> str:
    """Returns a document in the format of COCO about these pictures, with 7, 10 and 13 as the ids of the classes."""
    images, annotations = [], []
    for number, name in enumerate(names):
        (height, width), boxes = PICTURES[name]
        images.append({"id": 100 - number, "file_name": f"{name}.png", "height": height, "width": width})
        for left, top, right, bottom, one in boxes:
            bbox = [left, top, right - left, bottom - top]
            category = 7 + 3 * CLASSES.index(one)
            annotations.append(
                {
                    "image_id": 100 - number,
                    "category_id": category,
                    "bbox": bbox,
                    "iscrowd": 0,
                    "segmentation": [[1, 2]],
                }
            )
    categories = [{"id": 7 + 3 * number, "name": name} for number, name in enumerate(CLASSES)]
    return json.dumps({"images": images, "annotations": annotations, "categories": categories, **changed})


def voc(name: str, start: int = 1) -> str:
    (height, width), boxes = PICTURES[name]
    objects = "".join(
        f"<object><name>{one}</name><bndbox><xmin>{left + start}</xmin><ymin>{top + start}</ymin><xmax>{right}</xmax>"
        f"<ymax>{bottom}</ymax></bndbox><part><name>head</name></part></object>"
        for left, top, right, bottom, one in boxes
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>{name}.png</filename>{size}{objects}</annotation>"


def yolo(name: str) -> str:
    (height, width), boxes = PICTURES[name]
    return "".join(
        f"{CLASSES.index(one)} {(left + right) / 2 / width!r} {(top + bottom) / 2 / height!r} "
        f"{(right - left) / width!r} {(bottom - top) / height!r}\n"
        for left, top, right, bottom, one in boxes
    )


def expected(name: str, classes: Sequence[str], rows: int = 3) -> NDArray[np.float32]:
    """Returns the boxes of a squashed sample by plain arithmetic."""
    (height, width), boxes = PICTURES[name]
    found = [
        [left * SIDE / width, top * SIDE / height, right * SIDE / width, bottom * SIDE / height, classes.index(one)]
        for left, top, right, bottom, one in boxes
    ]
    return np.array([*found, *[[0, 0, 0, 0, -1]] * (rows - len(found))], np.float32)


def stored(out: Path, split: str = "train") -> dict[str, NDArray[np.float32]]:
    """Returns the boxes of each sample by the stem of its key."""
    shards = open_shards(out, split)
    keys = shards.column_of("key", np.arange(len(shards))).tolist()
    return {
        key.decode().rpartition("/")[2].split(".")[0]: s.arrays["boxes"] for key, s in zip(keys, shards, strict=True)
    }


def check(out: Path, classes: Sequence[str], split: str = "train", names: Sequence[str] = tuple(PICTURES)) -> None:
    found = stored(out, split)
    assert sorted(found) == sorted(names)
    for name in names:
        np.testing.assert_allclose(found[name], expected(name, classes, len(found[name])), atol=1e-5)


def test_the_boxes_of_coco_keep_their_classes_in_the_order_of_the_file(tmp_path: Path) -> None:
    report = convert(
        put_pictures(tmp_path / "src"), tmp_path / "out", boxes=put(tmp_path / "b.json", coco()), **OPTIONS
    )
    check(tmp_path / "out", CLASSES)
    assert open_shards(tmp_path / "out").content.arrays["boxes"].names == tuple(CLASSES)
    assert any("6 boxes" in note and "at most 3" in note and "3 classes" in note for note in report.notes)


def test_coco_as_it_is_shipped_is_one_command(tmp_path: Path) -> None:
    for split, names in (("train", ["a", "b"]), ("val", ["c", "d"])):
        put_pictures(tmp_path / "coco" / f"{split}2017", names)
        put(tmp_path / "coco" / "annotations" / f"instances_{split}2017.json", coco(names))
    files = [f"--boxes={split}={tmp_path}/coco/annotations/instances_{split}2017.json" for split in ("train", "val")]
    made = shardio("convert", tmp_path / "coco", tmp_path / "out", "--size", SIDE, "--fit", "squash", *files)
    assert made.returncode == 0, made.stderr
    check(tmp_path / "out", CLASSES, "train", ["a", "b"])
    check(tmp_path / "out", CLASSES, "val", ["c", "d"])
    shown = shardio("info", tmp_path / "out").stdout
    assert "dog, cat, ape" in shown


def test_a_split_without_a_file_of_boxes_has_no_boxes(tmp_path: Path) -> None:
    for split, names in (("train", ["a", "b"]), ("val", ["c", "d"])):
        put_pictures(tmp_path / "src" / split, names)
    for given in ("train", "val"):
        names = ["a", "b"] if given == "train" else ["c", "d"]
        boxes = {given: put(tmp_path / f"{given}.json", coco(names))}
        convert(tmp_path / "src", tmp_path / given, boxes=boxes, max_boxes=3, **OPTIONS)
        check(tmp_path / given, CLASSES, given, names)
        other = open_shards(tmp_path / given, {"train": "val", "val": "train"}[given])
        assert len(other) == 2
        assert not other.arrays


def test_crowd_boxes_are_left_out_and_counted(tmp_path: Path) -> None:
    document = json.loads(coco())
    crowd = {**document["annotations"][0], "iscrowd": 1, "segmentation": {"counts": [1, 2], "size": [3, 3]}}
    text = coco(annotations=[*document["annotations"], crowd])
    report = convert(put_pictures(tmp_path / "src"), tmp_path / "out", boxes=put(tmp_path / "b.json", text), **OPTIONS)
    check(tmp_path / "out", CLASSES)
    assert any("1 crowd box left out" in note for note in report.notes)


def test_images_that_the_document_does_not_list_are_left_out_and_counted(tmp_path: Path) -> None:
    boxes = put(tmp_path / "b.json", coco(["a", "c"]))
    report = convert(put_pictures(tmp_path / "src"), tmp_path / "out", boxes=boxes, **OPTIONS)
    check(tmp_path / "out", CLASSES, names=["a", "c"])
    assert report.ignored["image in no table"] == 2


def test_images_of_classes_must_all_be_in_the_document(tmp_path: Path) -> None:
    for folder, names in (("x", ["a", "b"]), ("y", ["c", "d"])):
        put_pictures(tmp_path / "src" / folder, names)
    document = json.loads(coco())
    for image in document["images"]:
        image["file_name"] = f"{'x' if image['file_name'] in ('a.png', 'b.png') else 'y'}/{image['file_name']}"
    boxes = put(tmp_path / "b.json", json.dumps(document))
    convert(tmp_path / "src", tmp_path / "out", boxes=boxes, **OPTIONS)
    check(tmp_path / "out", CLASSES)
    assert open_shards(tmp_path / "out").labels.tolist() == [0, 0, 1, 1]
    put(boxes, json.dumps({**document, "images": document["images"][:3], "annotations": []}))
    with pytest.raises(SourceError, match=r"b\.json.*row"):
        convert(tmp_path / "src", tmp_path / "less", boxes=boxes, **OPTIONS)


@pytest.mark.parametrize("start", [0, 1])
def test_the_boxes_of_voc_count_pixels_from_1_unless_there_is_a_0(tmp_path: Path, start: int) -> None:
    for name in PICTURES:
        put(tmp_path / "Annotations" / f"{name}.xml", voc(name, start))
    src = put_pictures(tmp_path / "src")
    report = convert(src, tmp_path / "out", boxes=tmp_path / "Annotations", **OPTIONS)
    check(tmp_path / "out", sorted(CLASSES))
    assert open_shards(tmp_path / "out").content.arrays["boxes"].names == ("ape", "cat", "dog")
    assert any(f"from {start}" in note for note in report.notes)


@pytest.mark.parametrize("named", [True, False])
def test_a_picture_without_a_file_of_yolo_has_no_boxes(tmp_path: Path, named: bool) -> None:
    for name in "acd":
        put(tmp_path / "labels" / f"{name}.txt", yolo(name))
    if named:
        put(tmp_path / "labels" / "classes.txt", "\n".join(CLASSES))
    src = put_pictures(tmp_path / "images")
    report = convert(src, tmp_path / "out", boxes=tmp_path / "labels", **OPTIONS)
    check(tmp_path / "out", CLASSES)
    assert open_shards(tmp_path / "out").content.arrays["boxes"].names == (tuple(CLASSES) if named else ())
    assert any("1 picture without a file" in note for note in report.notes)


def test_text_files_may_lie_in_labels_next_to_images(tmp_path: Path) -> None:
    for split, names in (("train", ["a", "b"]), ("valid", ["c", "d"])):
        put_pictures(tmp_path / "src" / split / "images", names)
        for name in names:
            put(tmp_path / "src" / split / "labels" / f"{name}.txt", yolo(name))
    convert(tmp_path / "src", tmp_path / "out", labels="none", boxes=tmp_path / "src", **OPTIONS)
    check(tmp_path / "out", CLASSES, "train", ["a", "b"])
    check(tmp_path / "out", CLASSES, "val", ["c", "d"])


def test_more_boxes_than_fit_are_an_error_with_the_number_that_is_needed(tmp_path: Path) -> None:
    src, boxes = put_pictures(tmp_path / "src"), put(tmp_path / "b.json", coco())
    with pytest.raises(SourceError, match=r"b\.json.*'d\.png'.*--max-boxes 3"):
        convert(src, tmp_path / "out", boxes=boxes, max_boxes=2, **OPTIONS)
    convert(src, tmp_path / "out", boxes=boxes, max_boxes=5, **OPTIONS)
    np.testing.assert_allclose(stored(tmp_path / "out")["d"], expected("d", CLASSES, 5), atol=1e-5)


# --- files that are wrong ---------------------------------------------------------------------------------------------

IMAGE = {"id": 1, "file_name": "a.png"}
CATEGORY = {"id": 1, "name": "x"}


def annotation(**changed: Any) -> dict[str, Any]:
    return {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], **changed}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "images"),
        ('{"images": [], "annotations": []}', "categories"),
        (coco(categories=[]), "category"),
        (coco(categories=[CATEGORY, CATEGORY]), "1 category is wrong"),
        (coco(categories=[{}, {}]), "2 categories are wrong"),
        (coco(categories=[{"id": 1, "name": "x"}, {"id": 2, "name": "x"}]), "category 1"),
        (coco(categories=[{"id": 1, "name": "\ud800"}]), "category 0"),
        (coco(images=[{"id": 1}]), "image 0"),
        (coco(images=[{"id": 1, "file_name": "\ud800.png"}]), "image 0"),
        (coco(images=[IMAGE, IMAGE]), "image 1"),
        (coco(images=[{**IMAGE, "height": "20", "width": 40}]), "image 0"),
        (coco(images=[{"id": 1, "file_name": "z.png"}], annotations=[]), "a.png"),
        *(
            (coco(images=[IMAGE], categories=[CATEGORY], annotations=[annotation(), wrong]), "annotation 1")
            for wrong in (
                3,
                {},
                annotation(image_id=2),
                annotation(image_id=[1]),
                annotation(category_id=2),
                annotation(bbox=[1, 2, 3]),
                annotation(bbox=[1, 2, -3, 4]),
                annotation(bbox=[1, 2, "3", 4]),
                annotation(bbox=[1, 2, float("nan"), 4]),
                annotation(bbox=[1, 2, float("inf"), 4]),
                annotation(bbox=[1, 2, True, 4]),
                annotation(bbox=[10**400, 2, 3, 4]),
                annotation(bbox="1234"),
            )
        ),
    ],
)
def test_a_document_that_is_not_cocos_is_refused_with_its_name(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(SourceError) as caught:
        convert(put_pictures(tmp_path / "src"), tmp_path / "out", boxes=put(tmp_path / "b.json", text), **OPTIONS)
    assert "b.json" in str(caught.value)
    assert word in str(caught.value)


LAUGHS = '<!DOCTYPE a [<!ENTITY b "x"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'
FILE = (
    '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><annotation><object><name>&b;</name></object></annotation>'
)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("c.xml", "", "XML"),
        ("c.xml", "<annotation>", "XML"),
        ("c.xml", LAUGHS, "DOCTYPE"),
        ("c.xml", LAUGHS.encode("utf-16"), "DOCTYPE"),
        ("c.xml", FILE, "DOCTYPE"),
        ("c.xml", '<?xml version="1.0" encoding="nonsense"?><annotation/>', "XML"),
        ("c.xml", "<svg/>", "annotation"),
        ("c.xml", voc("c").replace("cat", ""), "name"),
        ("c.xml", voc("c").replace("<ymin>3", "<ymin>nan"), "number"),
        ("c.xml", voc("c").replace("<ymin>3", "<ymin>30"), "ymin"),
        ("c.xml", voc("c").replace("<xmax>3</xmax>", ""), "number"),
        ("c.xml", voc("c").replace("57", "58"), "(33, 58)"),
        ("c.xml", voc("c").replace("<xmax>3", "<xmax>300"), "300"),
        ("c.xml", None, "c.xml"),
        ("c.txt", b"\xff\xfe", "utf-8"),
        ("c.txt", "0 0.5 0.5 0.5", "4"),
        ("c.txt", "0 0.5 0.5 0.5 0.5 0.9", "6"),
        ("c.txt", "0.5 0.5 0.5 0.5 0.5", "0.5"),
        ("c.txt", "-1 0.5 0.5 0.5 0.5", "-1"),
        ("c.txt", "3 0.5 0.5 0.5 0.5", "3"),
        ("c.txt", "0 0.5 0.5 -0.5 0.5", "width"),
        ("c.txt", "0 0.5 0.5 nan 0.5", "number"),
        ("c.txt", "0 0.5 0.5 1_0 0.5", "number"),
        ("c.txt", "0 28 16 10 10", "picture"),
        ("c.txt", "0 1e308 0.5 1e308 0.5", "picture"),
    ],
)
def test_a_picture_whose_file_is_wrong_is_refused(
    tmp_path: Path, name: str, text: str | bytes | None, word: str
) -> None:
    write: Callable[[str], str] = voc if name.endswith(".xml") else yolo
    for other in "abd":
        put(tmp_path / "boxes" / f"{other}.{name[2:]}", write(other))
    put(tmp_path / "boxes" / "classes.txt", "\n".join(CLASSES))
    if text is not None:
        put(tmp_path / "boxes" / name, text)
    convert(put_pictures(tmp_path / "src"), tmp_path / "out", boxes=tmp_path / "boxes", max_bad=1, **OPTIONS)
    check(tmp_path / "out", CLASSES if name == "c.txt" else ["ape", "cat", "dog"], names=["a", "b", "d"])
    (refused,) = rejects(tmp_path / "out")
    assert refused["key"] == "c.png"
    assert "boxes" in refused["detail"]
    assert word in refused["detail"]


def test_options_that_do_not_fit_are_refused_before_work(tmp_path: Path) -> None:
    src, boxes = put_pictures(tmp_path / "src"), put(tmp_path / "b.json", coco())
    (tmp_path / "empty").mkdir()
    other = json.loads(coco())
    other["categories"].reverse()
    np.save(tmp_path / "x.npy", np.zeros((3, 4), np.float32))
    for given, options, error, word in (
        (src, {"max_boxes": 3}, ValueError, "max_boxes"),
        (src, {"boxes": boxes, "max_boxes": 0}, ValueError, "max_boxes"),
        (src, {"boxes": tmp_path / "none.json"}, SourceError, "none.json"),
        (src, {"boxes": tmp_path / "empty"}, SourceError, "empty"),
        (src, {"boxes": {"train": boxes, "val": put(tmp_path / "o.json", json.dumps(other))}}, SourceError, "o.json"),
        (tmp_path / "x.npy", {"boxes": boxes}, ValueError, "boxes"),
        ([(np.zeros((4, 4, 3), np.uint8), 0)], {"boxes": boxes}, ValueError, "boxes"),
    ):
        with pytest.raises(error, match=word):
            convert(given, tmp_path / "out", **{**OPTIONS, **options})
        assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_size_in_json_may_be_a_float_and_is_compared(tmp_path: Path) -> None:
    src, document = put_pictures(tmp_path / "src", ["a", "b"]), json.loads(coco(["a", "b"]))
    document["images"][0]["width"], document["images"][1]["width"] = 40.0, 17.0
    boxes = put(tmp_path / "b.json", json.dumps(document))
    convert(src, tmp_path / "out", boxes=boxes, max_bad=1, **OPTIONS)
    check(tmp_path / "out", CLASSES, names=["a"])
    assert [one["key"] for one in rejects(tmp_path / "out")] == ["b.png"]


@pytest.mark.parametrize(
    ("names", "word"), [("dog\n\ncat\nape", "empty"), ("dog\ncat\ndog", "twice"), ("dog\0\ncat\nape", "NUL")]
)
def test_names_of_classes_that_would_be_shifted_are_refused(tmp_path: Path, names: str, word: str) -> None:
    put(tmp_path / "labels" / "a.txt", yolo("a"))
    put(tmp_path / "labels" / "classes.txt", names)
    with pytest.raises(SourceError, match=rf"classes\.txt.*{word}"):
        convert(put_pictures(tmp_path / "src"), tmp_path / "out", boxes=tmp_path / "labels", **OPTIONS)


def test_names_of_classes_need_not_be_utf8(tmp_path: Path) -> None:
    put(tmp_path / "labels" / "a.txt", yolo("a"))
    put(tmp_path / "labels" / "classes.txt", b"\xe9t\xe9\ncat\nape\n\n")
    convert(put_pictures(tmp_path / "src"), tmp_path / "out", boxes=tmp_path / "labels", **OPTIONS)
    names = open_shards(tmp_path / "out").content.arrays["boxes"].names
    assert names == (b"\xe9t\xe9".decode("utf-8", "surrogateescape"), "cat", "ape")


def test_xml_and_text_for_one_picture_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "labels" / "a.txt", yolo("a"))
    put(tmp_path / "labels" / "a.xml", voc("a"))
    with pytest.raises(SourceError, match=r"a\.xml and .*a\.txt"):
        convert(put_pictures(tmp_path / "src"), tmp_path / "out", boxes=tmp_path / "labels", **OPTIONS)


def test_a_class_called_annotations_is_not_left_out(tmp_path: Path) -> None:
    put_pictures(tmp_path / "src" / "x", ["a"])
    put_pictures(tmp_path / "src" / "y", ["b"])
    put(tmp_path / "src" / "annotations" / "list.json", "{}")
    with pytest.raises(SourceError, match="'annotations'"):
        convert(tmp_path / "src", tmp_path / "out", **OPTIONS)


# --- sets with boxes --------------------------------------------------------------------------------------------------


def test_a_conversion_with_other_boxes_is_another_conversion(tmp_path: Path) -> None:
    src, boxes = put_pictures(tmp_path / "src"), put(tmp_path / "b.json", coco())
    convert(src, tmp_path / "out", boxes=boxes, **OPTIONS)
    put(boxes, boxes.read_text().replace("[3, 4, 6, 15]", "[3, 4, 6, 14]"))
    with pytest.raises(ConvertError, match="boxes"):
        convert(src, tmp_path / "out", boxes=boxes, **OPTIONS)


def test_a_damaged_file_of_boxes_is_made_again_from_the_same_files(tmp_path: Path) -> None:
    src, boxes = put_pictures(tmp_path / "src"), put(tmp_path / "b.json", coco())
    convert(src, tmp_path / "out", boxes=boxes, max_boxes=9, **OPTIONS)
    (file,) = (tmp_path / "out").glob("train-boxes-0*.npy")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConvertError, match="--boxes"):
        repair(tmp_path / "out", src)
    assert repair(tmp_path / "out", src, boxes=boxes).repaired == (file.name,)
    assert verify(tmp_path / "out").ok


def test_names_of_classes_of_boxes_stay_with_the_set(tmp_path: Path) -> None:
    src, boxes = put_pictures(tmp_path / "src"), put(tmp_path / "b.json", coco())
    convert(src, tmp_path / "one", boxes=boxes, **OPTIONS)
    change(tmp_path / "one", tmp_path / "same", drop=Selection(keys="a.png"))
    merge([tmp_path / "one", tmp_path / "same"], tmp_path / "both", same_keys="allow", same_images="keep")
    assert open_shards(tmp_path / "both").content.arrays["boxes"].names == tuple(CLASSES)
    put(boxes, coco().replace('"dog"', '"wolf"'))
    convert(src, tmp_path / "other", boxes=boxes, **OPTIONS)
    with pytest.raises(ConvertError, match="wolf"):
        merge([tmp_path / "one", tmp_path / "other"], tmp_path / "wrong", same_keys="allow", same_images="keep")
