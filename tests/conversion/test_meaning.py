"""What folders are taken for: class folders are no question, other layouts have their readings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from folders import put
from pictures import encode
from storages import scan

from shardio.conversion.sources import tree
from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.table import Table

NUMBERS = "0 1 2 3"
NAMES = "beach forest tower lake"


def write(text: str, root: Path) -> int:
    """Writes the files that a text describes, and returns the number of pictures.

    The text has "FOLDER ...: FILE ..." or, for each split, "SPLIT = FOLDER ...: FILE ...". A folder with ~ after it has
    gray pictures, a folder with - has none; a picture in no folder may be gray, too. In the name of a file, {i} is the
    number of the folder, {s} a suffix of its own, {t} an ending, and @20 the width. A file of "+ ..." lies beside the
    pictures.
    """
    count, last = 0, dict[str, None]()
    for one in text.split(";"):
        split, _, rest = one.strip().rpartition(" = ")
        folders, _, names = rest.partition(": ")
        names, _, beside = names.partition(" + ")
        written: dict[str, None] = {}
        for i, folder in enumerate(folders.split() or [""]):
            put(root / split, f"./{folder.rstrip('~-')}/")
            for name in [] if folder.endswith("-") else names.split():
                file = name.rstrip("~").format(i=i, t=("", "_m")[i % 2], s=("jpg", "png")[i % 2])
                file = file if "." in file else f"{file}.jpg"
                shape = (32, int(Path(file).stem.partition("@")[2] or 40), 3)
                is_gray = folder.endswith("~") or name.endswith("~")
                picture = encode(np.zeros(shape[: 3 - is_gray], np.uint8), "PNG")
                put(root / split / folder.rstrip("~-"), file, content=picture)
                written[file], count = None, count + 1
        written = last = written or last  # a table without pictures beside it lists those of the last split
        rows = "".join(f"{file},a\n" for file in written)
        objects = "".join(f'{{"file_name": "{file}", "label": "a"}}\n' for file in written)
        for name in beside.split():
            put(root / split, name, content=(objects if name.endswith("l") else f"file_name,label\n{rows}").encode())
    return count


TEN = "bus car train tram labels images extra dog cat mask"

CLEAR = {
    "PetImages": f"Cat Dog: {NUMBERS}",
    "CIFAR-10": f"airplane automobile bird cat deer dog frog horse ship truck: {NUMBERS}",
    "GTSRB": "00000 00001 00002: 00000_00000 00000_00001 + 00000/GT-00000.csv",
    "Fruits-360": "Apple Banana: 0_100 1_100 r_0_100 r2_1_100",
    "Caltech-101": "accordion airplanes anchor: image_0001 image_0002 image_0003",
    "Office-31": "back_pack bike: frame_0001 frame_0002 frame_0003",
    "mask and no_mask": f"mask no_mask: {NUMBERS}",
    "other names": "left right: {i}beach {i}forest {i}tower",
    "helmets": f"with_helmet without_helmet: {NAMES}",
    "pictures of X-rays": f"NORMAL~ PNEUMONIA~: {NUMBERS}",
    "real and fake": f"real fake: {NUMBERS}",
    "ten classes with odd names": f"{TEN}: {NUMBERS}",
    "stations and tubes": f"train_station test_tube valley lake: {NUMBERS}",
    "a class box and a class train": f"box train tram: {NUMBERS}",
    "digits and a train": f"0 1 2 train: {NUMBERS}",
    "same names without a second sign": f"a b: {NAMES}",
    "splits": f"train = cat dog: {NUMBERS}; val = cat dog: {NUMBERS}",
    "faces": f"s1 s2 s3: {NUMBERS}",
    "digits": f"0 1 2 3 4 5 6 7 8 9: {NUMBERS}",
    "other scripts": f"图像 標籤: {NUMBERS}",
    "empty folders of other names": f"cat dog tiger- wolf-: {NUMBERS}",
    "files of no splits": f"cat dog: {NUMBERS} + labels.txt labels.csv train.csv classes.txt README.txt train.zip",
    "unpacked archives": f"train = cat dog: {NUMBERS}; val = cat dog: {NUMBERS}; :  + train.zip val.tar.gz images.tar",
    "flat": f": {NUMBERS}",
    "flat with names of classes": f": {NUMBERS} + classes.txt README.txt",
    "parts of archives": f"train = cat dog: {NUMBERS}; :  + annotations_test.tar.gz image_info_test2017.zip",
}


@pytest.mark.parametrize("name", CLEAR)
def test_class_folders_are_no_question(tmp_path: Path, name: str) -> None:
    count = write(CLEAR[name], tmp_path)
    found = scan(tmp_path, empty_classes="keep")
    folders = CLEAR[name].partition(":")[0].rpartition(" = ")[2]
    assert found.classes == tuple(sorted(folder.rstrip("~-") for folder in folders.split()))
    assert found.num_sources == count


MASKS = "{1} holds the masks of {0}; no image in {0} has a label"
CLASSES = "these 2 folders are classes; "
NO_LABELS = "no image has a label"
PICTURES = "all files are pictures, without labels"
LEAVES = "the deepest folders are classes; no image has a label"
TWO_LEAVES = "the deepest folders are 2 classes; no image has a label"
FIRST_LISTS = "{} lists the images; no image has a label"
ONE_SPLIT = "all are of one split, without labels"
IN_SPLITS = "{} holds the masks of {} in each split; no image in train/{} has a label"
THE_TWO = "the 2 folders in {} are classes; "
SPLITS = "no image in {0} has a label; no image in {1} has a label; " + ONE_SPLIT

IN_DOUBT = {
    "images and masks": ("images masks~: 0.{s} 1.{s}", MASKS.format("images", "masks")),
    "images and labels": ("images labels~: 0.{s} 1.{s}", MASKS.format("images", "labels")),
    "VOC": (
        "JPEGImages SegmentationClass~ Annotations- ImageSets-: 0.{s} 1.{s}",
        MASKS.format("JPEGImages", "SegmentationClass"),
    ),
    "VOC without masks": (f"JPEGImages Annotations- ImageSets-: {NUMBERS}", "no image in JPEGImages has a label"),
    "KITTI": (f"image_2 image_3: {NUMBERS}", NO_LABELS),
    "low and high resolution": (f"HR LR: {NUMBERS}", "no image in HR has a label; no image in LR has a label"),
    "rgb and depth": (f"depth rgb: {NUMBERS}", MASKS.format("rgb", "depth")),
    "left and right": (f"left right: {NUMBERS}", CLASSES + "no image in left has a label"),
    "input and target": (f"input target: {NUMBERS}", CLASSES + "no image in input has a label"),
    "A and B": (f"A B: {NUMBERS}", CLASSES + "no image in A has a label"),
    "gray beside color": (f"x y~: {NUMBERS}", CLASSES + "y holds the masks of x; no image in x has a label"),
    "a role and names": (f"cells masks: {NAMES}", CLASSES + MASKS.format("cells", "masks")),
    "other kinds of files": ("x y: beach.{s} lake.{s}", CLASSES + "no image in x has a label"),
    "sizes that pair up": ("x y: beach@20 forest@30 tower@40", CLASSES + "no image in x has a label"),
    "images and masks in splits": (
        "train = images masks~: 0.{s} 1.{s}; val = images masks~: 2.{s} 3.{s}",
        IN_SPLITS.format("masks", "images", "images"),
    ),
    "masks with other endings in splits": (
        "train = images masks~: 1{t} 2{t}; val = images masks~: 3{t} 4{t}",
        IN_SPLITS.format("masks", "images", "images"),
    ),
    "masks in one of the splits": (
        f"train = images gt~: {NUMBERS}; test = images: 7",
        "train/gt holds the masks of train/images; no image in train/images has a label",
    ),
    "KITTI scene flow": (
        "train = image_2 image_3 disp_0~ obj_map~: 1_0 1_1; test = image_2 image_3: 2_0",
        "train/disp_0 holds the masks of train/image_2; train/obj_map holds the masks of train/image_2; "
        "no image in train/image_2 has a label; no image in train/image_3 has a label",
    ),
    "Cityscapes": (
        "leftImg8bit/train gtFine/train~: a{t} b{t}",
        "gtFine holds the masks of leftImg8bit; leftImg8bit is the collection",
    ),
    "LEVIR": ("train = A B label~: 0.{s} 1.{s}; val = A B label~: 2.{s} 3.{s}", IN_SPLITS.format("label", "A", "A")),
    "a folder called image": ("image: {i}1 {i}2", NO_LABELS),
    "Omniglot": ("Greek/c1 Greek/c2 Latin/c1 Latin/c2: {i}1 {i}2", CLASSES + TWO_LEAVES),
    "pairs in splits": (
        f"train = left right: {NUMBERS}; val = left right: {NUMBERS}",
        "the 2 folders in each split are classes; no image in train/left has a label",
    ),
    "all but one": (f"images masks other: {NUMBERS}", CLASSES.replace("2", "3") + MASKS.format("images", "masks")),
    "Kaggle": (
        f"train_images test_images: {NUMBERS} + train.csv",
        "train.csv lists the images; no image in test_images has a label; all are of one split, without labels",
    ),
    "DIV2K": (f"DIV2K_train_HR DIV2K_valid_HR: {NUMBERS}", SPLITS.format("DIV2K_train_HR", "DIV2K_valid_HR")),
    "CycleGAN": (f"trainA trainB: {NUMBERS}", SPLITS.format("trainA", "trainB")),
    "ALASKA2": (f"Cover JMiPOD UERD Test: {NUMBERS}", "these 4 folders are classes; no image has a label"),
    "dogs-vs-cats": (f"train test1: {NUMBERS}", SPLITS.format("train", "test1")),
    "STL10": (f"train unlabeled: {NUMBERS}", SPLITS.format("train", "unlabeled")),
    "SVHN": (f"train test extra: {NUMBERS}", SPLITS.format("train", "extra")),
    "splits of classes": (
        f"training_fake training_real: {NUMBERS}",
        CLASSES + SPLITS.format("training_fake", "training_real"),
    ),
    "Cars": (f"cars_train cars_test devkit-: {NUMBERS}", SPLITS.format("cars_train", "cars_test")),
    "BUSI": (
        "benign normal: {i}1 {i}1_mask.png",
        "these 2 folders are classes, all files pictures; names that end with _mask are masks; " + PICTURES,
    ),
    "masks beside images": (": 855_sat 855_mask", "names that end with _mask are masks; " + PICTURES),
    "masks with a suffix": ("images masks~: 1{t}.{s} 2{t}.{s}", MASKS.format("images", "masks")),
    "CamVid": (f"train train_labels: {NUMBERS}", MASKS.format("train", "train_labels") + "; " + ONE_SPLIT),
    "Intel": (
        "seg_train/seg_train/sea seg_train/seg_train/ice seg_test/seg_test/sea seg_test/seg_test/ice: {i}1 {i}2",
        THE_TWO.format("seg_train/seg_train") + THE_TWO.format("seg_test/seg_test") + ONE_SPLIT,
    ),
    "cat-and-dog": (
        "training_set/cats training_set/dogs test_set/cats test_set/dogs: {i}1 {i}2",
        THE_TWO.format("training_set") + THE_TWO.format("test_set") + ONE_SPLIT,
    ),
    "HAM10000": (
        "HAM10000_images_part_1 HAM10000_images_part_2: ISIC_{i}1 ISIC_{i}2 + HAM10000_metadata.csv",
        FIRST_LISTS.format("HAM10000_metadata.csv"),
    ),
    "BigEarthNet": ("S2A_0_45 S2A_1_45: S2A_{i}_45_B01 S2A_{i}_45_B8A", NO_LABELS),
    "backslashes": (r": train\cat\1 train\dog\2 val\cat\3", NO_LABELS),
    "DCIM": ("100APPLE 101APPLE: IMG_{i}1 IMG_{i}2", NO_LABELS),
    "SA-1B": ("sa_0020 sa_0021: sa_{i}1 sa_{i}2 + sa_0020/sa_01.json", NO_LABELS),
    "img2dataset": ("00000 00001: {i}1 {i}2 + 00000/01.json", NO_LABELS),
    "StyleGAN": ("00000 00001: img{i}1 img{i}2 + dataset.json", NO_LABELS),
    "FFHQ": ("00000 01000: {i}0 {i}1", NO_LABELS),
    "photographs by years": ("Photos_from_2019 Photos_from_2020: IMG_{i}1 IMG_{i}2", CLASSES + NO_LABELS),
    "photographs by days": ("2019-05-01 2019-05-02: a{i} b{i}", CLASSES + NO_LABELS),
    "two observers": (": 01L 01L_1stHO~ 01L_2ndHO~ 02L 02L_1stHO~ 02L_2ndHO~", PICTURES),
    "iNaturalist": ("Aves/2761 Aves/2762 Plantae/2763: {i}1 {i}2", LEAVES),
    "Places365": ("a/airfield b/bar/indoor b/cafe/indoor: {i}1 {i}2", NO_LABELS),
    "splits in classes": ("n1/train n1/test n2/train: {i}1 {i}2", ONE_SPLIT),
    "scenes of several depths": (
        "a/abbey s/church/indoor s/church/outdoor t/bar/indoor t/bar/outdoor u/zoo/indoor u/zoo/outdoor: {i}1 {i}2",
        CLASSES.replace("2", "4") + NO_LABELS,
    ),
    "sessions": ("cat/day1 cat/day2 dog/day1 dog/day2: {i}1 {i}2", CLASSES + TWO_LEAVES),
    "patients": ("8863/benign 8863/malign 8864/benign 8864/malign: {i}1 {i}2", TWO_LEAVES),
    "numbered classes of patients": ("8863/0 8863/1 8864/0 8864/1: {i}1 {i}2", TWO_LEAVES),
    "classes of domains": (
        "amazon/images/bike amazon/images/mug dslr/images/bike dslr/images/mug: {i}1 {i}2",
        TWO_LEAVES,
    ),
    "numbered videos of classes": ("cat/0 cat/1 dog/0 dog/1: {i}1 {i}2", CLASSES + TWO_LEAVES),
    "videos": ("Biking/v_Biking_1 Biking/v_Biking_2 Diving/v_Diving_1: {i}1 {i}2", CLASSES + LEAVES),
    "different depths": ("cat dog/poodle dog/corgi: {i}1 {i}2", CLASSES + LEAVES),
    "a folder too high": ("x/cat x/dog: {i}1 {i}2", THE_TWO.format("x") + NO_LABELS),
    "splits a folder too high": ("x/train/cat x/val/cat: {i}1 {i}2", "x is the collection; no image has a label"),
    "one class": (f"cat: {NUMBERS}", "cat is the only class; no image has a label"),
    "Food-101": ("images/cake images/pie meta-: {i}1 {i}2", THE_TWO.format("images") + NO_LABELS),
    "imagefolder": (f": {NUMBERS} + metadata.csv", FIRST_LISTS.format("metadata.csv")),
    "FairFace": (
        f"train = : {NUMBERS}; val = : {NUMBERS}; :  + fairface_label_train.csv fairface_label_val.csv",
        FIRST_LISTS.format("fairface_label_train.csv"),
    ),
    **{
        name: (f"train = : {NUMBERS}; test = : {NUMBERS}; :  + {name}", FIRST_LISTS.format(name))
        for name in ("Train.csv", "trainLabels.csv", "labels.txt", "labels.json")
    },
    "lists of splits": ("cat dog: {i}1 {i}2 + test.txt train.txt", CLASSES + FIRST_LISTS.format("test.txt")),
    "an archive of another split": (
        "train = cat dog: {i}1 {i}2; :  + val.zip",
        THE_TWO.format("train") + NO_LABELS,
    ),
    "Roboflow": (f"train = : {NUMBERS} + _classes.csv", FIRST_LISTS.format("_classes.csv")),
    "imagefolder in splits": (
        f"train = : {NUMBERS} + metadata.jsonl; val = : {NUMBERS} + metadata.jsonl",
        FIRST_LISTS.format("metadata.jsonl"),
    ),
}  # fmt: skip


def test_texts_that_name_no_images_are_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "read_rows", None)  # which would read a JSON document whole
    for name, layout in (("classes", f"cat dog: {NUMBERS}"), ("flat", f": {NUMBERS}")):
        count = write(layout, tmp_path / name)
        for text in ("requirements-test.txt", "label_names.txt", "test_stats.json", "1_caption.txt"):
            put(tmp_path / name, text, content=b"two words\n")
        if name == "classes":
            put(tmp_path / name, "annotations.json", content=b'{"images": [{"file_name": "1.jpg"}]}')
        assert scan(tmp_path / name).num_sources == count


@pytest.mark.parametrize("name", IN_DOUBT)
def test_each_reading_of_other_layouts_says_what_is_so(name: str, tmp_path: Path) -> None:
    text, expected = IN_DOUBT[name]
    write(text, tmp_path)
    with pytest.raises(DoubtError) as caught:  # whose commands a fixture runs
        scan(tmp_path)
    assert "; ".join(reading.meaning for reading in caught.value.readings) == expected


def test_src_as_its_own_folder_of_masks_is_not_that_of_a_folder_in_it(tmp_path: Path) -> None:
    text, expected = IN_DOUBT["images and masks"]
    write(text, tmp_path)
    with pytest.raises(DoubtError) as caught:  # whose commands a fixture runs
        scan(tmp_path, masks=tmp_path)
    assert "; ".join(reading.meaning for reading in caught.value.readings) == expected
    assert [str(tmp_path / "masks") in command for command in caught.value.commands] == [True, False]
    assert "--masks" not in caught.value.commands[1]


@pytest.mark.parametrize("column", ["Split", "is_train", "Usage", "5-fold"])
def test_a_column_of_splits_next_to_class_folders_is_a_doubt(tmp_path: Path, column: str) -> None:
    write("cat dog: {i}1", tmp_path)
    notes = f"file_name,label,{column}\ncat/01.jpg,cat,train\ndog/11.jpg,cat,test\n"
    put(tmp_path, "notes.csv", content=notes.encode())
    with pytest.raises(DoubtError, match=r"'notes\.csv' next to them") as caught:
        scan(tmp_path)
    assert [one.meaning for one in caught.value.readings] == [*(CLASSES + FIRST_LISTS.format("notes.csv")).split("; ")]
    assert [*scan(tmp_path, labels="folders").splits] == ["train"]
    assert [*scan(tmp_path, table=Table(tmp_path / "notes.csv", split_column=column)).splits] == ["train", "test"]


def test_tables_that_are_given_are_neither_asked_about_nor_replaced(tmp_path: Path) -> None:
    tables = {split: tmp_path / "src" / f"{split}.txt" for split in ("train", "test")}
    write("cat dog: {i}1", tmp_path / "src")
    for split, path in zip(tables, ("cat/01.jpg\ndog/11.jpg\n", "dog/11.jpg\n"), strict=True):
        put(tmp_path / "src", f"{split}.txt", content=path.encode())
    put(tmp_path / "src", "train.txt", content=b"cat/01.jpg\n")
    found = scan(tmp_path / "src", table=tables)
    assert {split: [one.label for one in some] for split, some in found.splits.items()} == {"train": [0], "test": [1]}
    write("images_001 images_002: {i}1 + BBox_List.csv", tmp_path / "chest")
    with pytest.raises(DoubtError) as caught:
        scan(tmp_path / "chest", table=tables)
    assert [one.meaning for one in caught.value.readings] == [NO_LABELS]
