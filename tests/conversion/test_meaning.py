"""What folders are taken for, without files: class folders are no question, other layouts have their readings."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from folders import put
from pictures import encode
from storages import scan

from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.meaning import Disk, Layout, Part

ROOT = Path("/src")
TABLES = (".csv", ".json", ".jsonl")
NUMBERS = "0 1 2 3"
NAMES = "beach forest tower lake"


def read(text: str, root: Path = ROOT) -> tuple[list[Part], dict[Path, bool]]:
    """The parts in a text, and all files of the layout with whether each is gray.

    The text has "FOLDER ...: FILE ..." or, for each split, "SPLIT = FOLDER ...: FILE ...". A folder with ~ after it has
    gray pictures, a folder with - has none; a picture in no folder may be gray, too. In the name of a file, {i} is the
    number of the folder, {s} a suffix of its own, {t} an ending, and @20 the width. A file of "+ ..." lies beside the
    pictures.
    """
    parts, found = [], {}
    for one in text.split(";"):
        split, _, rest = one.strip().rpartition(" = ")
        folders, _, names = rest.partition(": ")
        names, _, beside = names.partition(" + ")
        path = root / split
        classes: dict[str, list[bytes]] = {word.rstrip("~-").split("/")[0]: [] for word in sorted(folders.split())}
        for i, word in enumerate(folders.split()):
            files = [
                name.format(i=i, t=("", "_m")[i % 2], s=("jpg", "png")[i % 2])
                for name in names.split()
                if not word.endswith("-")
            ]
            paths = [f"{word.rstrip('~-')}/{name}{'' if '.' in name else '.jpg'}" for name in files]
            classes[paths[0].split("/")[0] if paths else word.rstrip("-")] += sorted(map(os.fsencode, paths))
            found |= dict.fromkeys((path / name for name in paths), word.endswith("~"))
        flat = {} if folders else {f"{name.rstrip('~')}.jpg": name.endswith("~") for name in names.split()}
        images = [*map(os.fsencode, flat)]
        found |= {path / name: is_gray for name, is_gray in (flat | dict.fromkeys(beside.split(), False)).items()}
        parts.append(Part(path, split, images, classes))
    return parts, found


def width(path: Path) -> int:
    return int(path.stem.partition("@")[2] or 40)


def layout(text: str) -> Layout:
    parts, found = read(text)
    tables = {path for path in found if path.suffix in (".csv", ".jsonl")}
    return Layout(
        ROOT,
        parts,
        "images",
        Disk(
            found.__contains__,
            lambda path: (found[path], (width(path), 32)),
            lambda folder: sorted(path.name for path in tables if path.parent == folder),
        ),
    )


def write(text: str, root: Path) -> Path:
    parts, found = read(text, root)
    for folder in (part.path / name for part in parts for name in part.classes):
        folder.mkdir(parents=True, exist_ok=True)
    for path, is_gray in found.items():
        shape = (32, width(path)) if is_gray else (32, width(path), 3)
        picture = encode(np.zeros(shape, np.uint8), "PNG")
        rows = dict.fromkeys(f"{one.name},a" for one in found if one.suffix not in TABLES)
        table = "\n".join(("file_name,label", *rows)).encode()
        if path.suffix == ".jsonl":
            table = b"".join(b'{"file_name": "%s", "label": "a"}\n' % row[:-2].encode() for row in [*rows][:4])
        put(path.parent, path.name, content=table if path.suffix in TABLES else picture)
    return root


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
    "flat": f": {NUMBERS}",
}


@pytest.mark.parametrize("name", CLEAR)
def test_class_folders_are_no_question(tmp_path: Path, name: str) -> None:
    assert list(layout(CLEAR[name]).doubts()) == []
    parts, found = read(CLEAR[name], tmp_path)
    scanned = scan(write(CLEAR[name], tmp_path), empty_classes="keep")
    assert scanned.classes == tuple(parts[0].classes)
    assert scanned.num_sources == len([path for path in found if path.suffix not in TABLES])


MASKS = "{1} holds the masks of {0}; no image in {0} has a label"
CLASSES = "these 2 folders are classes; "
SPLITS = "no image in {0} has a label; no image in {1} has a label; all are of one split, without labels"

IN_DOUBT = {
    "images and masks": ("images masks~: 0.{s} 1.{s}", MASKS.format("images", "masks")),
    "images and labels": ("images labels~: 0.{s} 1.{s}", MASKS.format("images", "labels")),
    "VOC": (
        "JPEGImages SegmentationClass~ Annotations- ImageSets-: 0.{s} 1.{s}",
        MASKS.format("JPEGImages", "SegmentationClass"),
    ),
    "VOC without masks": (f"JPEGImages Annotations- ImageSets-: {NUMBERS}", "no image in JPEGImages has a label"),
    "KITTI": (f"image_2 image_3: {NUMBERS}", "no image has a label"),
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
        "masks holds the masks of images in each split; no image in train/images has a label",
    ),
    "masks with other endings in splits": (
        "train = images masks~: 1{t} 2{t}; val = images masks~: 3{t} 4{t}",
        "masks holds the masks of images in each split; no image in train/images has a label",
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
    "LEVIR": (
        "train = A B label~: 0.{s} 1.{s}; val = A B label~: 2.{s} 3.{s}",
        "label holds the masks of A in each split; no image in train/A has a label",
    ),
    "a folder called image": ("image: {i}1 {i}2", "no image has a label"),
    "Omniglot": (
        "Greek/c1 Greek/c2 Latin/c1 Latin/c2: {i}1 {i}2",
        "these 2 folders are classes; the deepest folders are 2 classes; no image has a label",
    ),
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
    "Cars": (
        f"cars_train cars_test devkit-: {NUMBERS}",
        SPLITS.format("cars_train", "cars_test"),
    ),
    "BUSI": (
        "benign normal: {i}1 {i}1_mask.png",
        "these 2 folders are classes, all files pictures; names that end with _mask are masks; "
        "all files are pictures, without labels",
    ),
    "masks beside images": (
        ": 855_sat 855_mask",
        "names that end with _mask are masks; all files are pictures, without labels",
    ),
    "masks with a suffix": (
        "images masks~: 1{t}.{s} 2{t}.{s}",
        MASKS.format("images", "masks"),
    ),
    "CamVid": (
        f"train train_labels: {NUMBERS}",
        MASKS.format("train", "train_labels") + "; all are of one split, without labels",
    ),
    "Intel": (
        "seg_train/seg_train/sea seg_train/seg_train/ice seg_test/seg_test/sea seg_test/seg_test/ice: {i}1 {i}2",
        "the 2 folders in seg_train/seg_train are classes; the 2 folders in seg_test/seg_test are classes; "
        "all are of one split, without labels",
    ),
    "cat-and-dog": (
        "training_set/cats training_set/dogs test_set/cats test_set/dogs: {i}1 {i}2",
        "the 2 folders in training_set are classes; the 2 folders in test_set are classes; "
        "all are of one split, without labels",
    ),
    "HAM10000": (
        "HAM10000_images_part_1 HAM10000_images_part_2: ISIC_{i}1 ISIC_{i}2 + HAM10000_metadata.csv",
        "HAM10000_metadata.csv lists the images; no image has a label",
    ),
    "BigEarthNet": ("S2A_0_45 S2A_1_45: S2A_{i}_45_B01 S2A_{i}_45_B8A", "no image has a label"),
    "DCIM": ("100APPLE 101APPLE: IMG_{i}1 IMG_{i}2", "no image has a label"),
    "SA-1B": ("sa_0020 sa_0021: sa_{i}1 sa_{i}2 + sa_0020/sa_01.json", "no image has a label"),
    "img2dataset": ("00000 00001: {i}1 {i}2 + 00000/01.json", "no image has a label"),
    "StyleGAN": ("00000 00001: img{i}1 img{i}2 + dataset.json", "no image has a label"),
    "FFHQ": ("00000 01000: {i}0 {i}1", "no image has a label"),
    "photographs by years": (
        "Photos_from_2019 Photos_from_2020: IMG_{i}1 IMG_{i}2",
        CLASSES + "no image has a label",
    ),
    "photographs by days": ("2019-05-01 2019-05-02: a{i} b{i}", CLASSES + "no image has a label"),
    "two observers": (
        ": 01L 01L_1stHO~ 01L_2ndHO~ 02L 02L_1stHO~ 02L_2ndHO~",
        "all files are pictures, without labels",
    ),
    "iNaturalist": (
        "Aves/2761 Aves/2762 Plantae/2763: {i}1 {i}2",
        "the deepest folders are classes; no image has a label",
    ),
    "Places365": ("a/airfield b/bar/indoor b/cafe/indoor: {i}1 {i}2", "no image has a label"),
    "sessions": (
        "cat/day1 cat/day2 dog/day1 dog/day2: {i}1 {i}2",
        "these 2 folders are classes; the deepest folders are 2 classes; no image has a label",
    ),
    "patients": (
        "8863/benign 8863/malign 8864/benign 8864/malign: {i}1 {i}2",
        "the deepest folders are 2 classes; no image has a label",
    ),
    "numbered classes of patients": (
        "8863/0 8863/1 8864/0 8864/1: {i}1 {i}2",
        "the deepest folders are 2 classes; no image has a label",
    ),
    "classes of domains": (
        "amazon/images/bike amazon/images/mug dslr/images/bike dslr/images/mug: {i}1 {i}2",
        "the deepest folders are 2 classes; no image has a label",
    ),
    "numbered videos of classes": (
        "cat/0 cat/1 dog/0 dog/1: {i}1 {i}2",
        "these 2 folders are classes; the deepest folders are 2 classes; no image has a label",
    ),
    "videos": (
        "Biking/v_Biking_1 Biking/v_Biking_2 Diving/v_Diving_1: {i}1 {i}2",
        "these 2 folders are classes; the deepest folders are classes; no image has a label",
    ),
    "different depths": (
        "cat dog/poodle dog/corgi: {i}1 {i}2",
        "these 2 folders are classes; the deepest folders are classes; no image has a label",
    ),
    "a folder too high": (
        "x/cat x/dog: {i}1 {i}2",
        "the 2 folders in x are classes; no image has a label",
    ),
    "splits a folder too high": ("x/train/cat x/val/cat: {i}1 {i}2", "x is the collection; no image has a label"),
    "one class": (f"cat: {NUMBERS}", "cat is the only class; no image has a label"),
    "Food-101": (
        "images/cake images/pie meta-: {i}1 {i}2",
        "the 2 folders in images are classes; no image has a label",
    ),
    "imagefolder": (f": {NUMBERS} + metadata.csv", "metadata.csv lists the images; no image has a label"),
    "Roboflow": (f"train = : {NUMBERS} + _classes.csv", "_classes.csv lists the images; no image has a label"),
    "imagefolder in splits": (
        f"train = : {NUMBERS} + metadata.jsonl; val = : {NUMBERS} + metadata.jsonl",
        "metadata.jsonl lists the images; no image has a label",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_DOUBT)
def test_each_reading_of_other_layouts_says_what_is_so(name: str, tmp_path: Path) -> None:
    text, expected = IN_DOUBT[name]
    given = layout(text)
    assert list(given.doubts())
    assert "; ".join(reading.meaning for reading in given.readings()) == expected
    with pytest.raises(DoubtError) as caught:  # whose commands a fixture runs
        scan(write(text, tmp_path))
    assert "; ".join(reading.meaning for reading in caught.value.readings) == expected
