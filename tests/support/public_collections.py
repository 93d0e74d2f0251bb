"""Tiny copies of public collections, laid out as they are unpacked. A picture is of one color, which is its number."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image
from storages import CLASSES, tar_of, write_archives, write_kaggle, write_webdataset

CD = ("cat", "dog")
_KINDS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".tif": "TIFF", ".ppm": "PPM", ".webp": "WebP"}


def color(number: int) -> tuple[int, int, int]:
    return 32 + number % 4 * 64, 32 + number // 4 % 4 * 64, 32 + number // 16 * 64


def number_of(pixels: NDArray[np.uint8]) -> int:
    found = np.rint((pixels.reshape(-1, 3).mean(0) - 32) / 64).astype(int)
    assert np.abs(pixels.reshape(-1, 3).mean(0) - (32 + found * 64)).max() < 16
    return int(found @ (1, 4, 16))


class Copy:
    """A copy of a collection in `folder`. `meaning` has the (split, label) of each picture; "" stands for any split."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meaning: dict[int, tuple[str, object]] = {}

    def pixels(
        self, label: object = None, split: str = "train", side: int = 8, number: int | None = None
    ) -> NDArray[np.uint8]:
        """Returns a new picture (side, side, 3)."""
        number = len(self.meaning) if number is None else number
        assert number < 64
        assert number not in self.meaning
        self.meaning[number] = (split, label)
        return np.full((side, side, 3), color(number), np.uint8)

    def data(self, label: object = None, split: str = "train", kind: str = "JPEG") -> bytes:
        file = io.BytesIO()
        Image.fromarray(self.pixels(label, split)).save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
        return file.getvalue()

    def add(self, path: str, label: object = None, split: str = "train") -> None:
        self.write(path, self.data(label, split, _KINDS[Path(path).suffix.lower()]))

    def tree(self, path: str, names: Iterable[str], split: str = "train", each: int = 2) -> None:
        """Adds `each` pictures of each class: the folder is {at}, its name {name}."""
        for at in names:
            name = at.rpartition("/")[2]
            for i in range(each):
                self.add(path.format(i, at=at, name=name), name, split)

    def mask(self, path: str, mode: str = "L", value: int | None = None) -> None:
        """Adds a mask whose value is the number of the last picture, or `value`."""
        file, image = io.BytesIO(), Image.new(mode, (8, 8), len(self.meaning) - 1 if value is None else value)
        if mode == "P":
            image.putpalette(bytes(range(256)) * 3)
        image.save(file, "PNG")
        self.write(path, file.getvalue())

    def write(self, path: str, content: bytes | str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())

    def lines(self, path: str, *lines: str) -> None:
        self.write(path, "".join(f"{line}\n" for line in lines))


def build(name: str, copy: Copy) -> None:
    """Fills the copy of the collection `name`, which is in one of the tables, or has a function of its name."""
    if name in BESIDE:
        copy.lines(*BESIDE[name])
    if name in TREES:
        _tree(copy, *TREES[name])
    elif name in FLAT:
        _flat(copy, *FLAT[name])
    else:
        globals()[re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")](copy)


IDS = ", ".join(CLASSES)
# Their paths, in which {split} stands for the word for a split, and the classes. The splits; "" of `--val`.
TREES = {
    "Imagenette, Imagewoof": ("imagenette2/{split}/{at}/x_{}.JPEG", IDS, "train val"),
    "ImageNet-A, -O, -R, -Sketch": ("imagenet-r/{at}/art_{}.jpg", IDS, "train"),
    "ImageNet-C": ("imagenet-c/gaussian_noise/1/{at}/ILSVRC2012_val_{}.JPEG", IDS, "train"),
    "iNaturalist 2021": ("inat2021/{split}/{at}/{}.jpg", "00000_Animalia_Annelida, 00001_Animalia_Worm", "train val"),
    "Stanford Dogs": ("Images/{at}/{at:.9}_{}.jpg", "n02085620-Chihuahua, n02085782-Japanese_spaniel", ""),
    "Fruits-360": ("fruits-360/{split}/{at}/{}_100.jpg", "Apple Golden 1, Banana", "train=Training test=Test"),
    "Office-31": ("office31/amazon/images/{at}/frame_{:04}.jpg", "back_pack, bike", "train"),
    "Cats and Dogs, PetImages": ("PetImages/{at}/{}.jpg", "Cat, Dog", "train"),
    "LFW, VGGFace2": ("lfw/{at}/{at}_{:04}.jpg", "Aaron_Eckhart, Abdullah_Gul", "train"),
    "GTSRB": ("GTSRB/Final_Training/Images/{at}/00000_{:05}.ppm", "00000, 00001, 00002", "train"),
    "PlantVillage": ("plantvillage/color/{at}/{}.JPG", "Apple___Apple_scab, Apple___healthy", "train"),
    "Intel scenes": ("intel/seg_{split}/seg_{split}/{at}/{}.jpg", "buildings, forest", "train test"),
    "Dogs vs. Cats, Kaggle": ("dogs-vs-cats/train/{at}.{}.jpg", "cat, dog", ""),
    "EuroSAT": ("EuroSAT/2750/{at}/{at}_{}.jpg", "AnnualCrop, Forest", ""),
    "UC Merced, AID, RESISC45": ("UCMerced_LandUse/Images/{at}/{at}{:02}.tif", "agricultural, airplane", ""),
}
BESIDE = {
    "Imagenette, Imagewoof": ("imagenette2/noisy_imagenette.csv", "path,noisy\ntrain/n01440764/x_0.JPEG,n01440764"),
    "ImageNet-A, -O, -R, -Sketch": ("imagenet-r/README.txt", "n01440764 tench"),
    "Fruits-360": ("fruits-360/test-multiple_fruits/apples.jpg", "no picture of a class"),
    "GTSRB": ("GTSRB/Final_Training/Images/00000/GT-00000.csv", "Filename;ClassId\n00000_00000.ppm;0"),
    "COCO, LVIS, as pictures": ("coco/annotations/instances_val2017.json", "{}"),
}


def _words(splits: str) -> Iterator[tuple[str, str]]:
    """The splits, each with the word for it."""
    for one in splits.split() or [""]:
        split, _, word = one.partition("=")
        yield split, word or split


def _tree(copy: Copy, path: str, classes: str, splits: str) -> None:
    for split, word in _words(splits):
        copy.tree(path.replace("{split}", word), classes.split(", "), split, 2 if split else 16)


# The splits, and the paths of the pictures and of their masks, with the word for the split.
FLAT = {
    "DIV2K": ("train", "DIV2K_train_HR/{:04}.png"),
    "COCO, LVIS, as pictures": ("train val", "coco/{split}2017/{:012}.jpg"),
    "CamVid": ("train", "CamVid/train/0001TP_{:06}.png", "CamVid/trainannot/0001TP_{:06}.png"),
    "Kvasir-SEG": ("train", "Kvasir-SEG/images/cju{}.jpg", "Kvasir-SEG/masks/cju{}.png"),
    "ADE20K": (
        "train=training val=validation",
        "ADEChallengeData2016/images/{split}/ADE_{split}_{:08}.jpg",
        "ADEChallengeData2016/annotations/{split}/ADE_{split}_{:08}.png",
    ),
}


def _flat(copy: Copy, splits: str, path: str, *masks: str) -> None:
    for split, word in _words(splits):
        for i in range(3):
            copy.add(path.format(i, split=word), None, split)
            for mask in masks:
                copy.mask(mask.format(i, split=word))


# --- ImageNet ---------------------------------------------------------------------------------------------------------


def _imagenet(copy: Copy, root: str) -> Path:
    for i, name in enumerate(CLASSES):
        copy.tree(f"{root}/train/{name}/{name}_{{}}.JPEG", (name,))
        copy.add(f"{root}/val/{name}/ILSVRC2012_val_{i + 1:08}.JPEG", name, "val")
    return copy.folder / root


def imagenet_class_folders(copy: Copy) -> None:
    _imagenet(copy, "imagenet")


def imagenet_as_downloaded(copy: Copy) -> None:
    write_archives(_imagenet(copy, "x"), copy.folder / "downloads")


def imagenet_kaggle(copy: Copy) -> None:
    write_kaggle(_imagenet(copy, "x"), copy.folder / "kaggle")


def imagenet_hugging_face(copy: Copy) -> None:
    for split, word in (("train", "train"), ("val", "validation")):
        images = [{"bytes": copy.data(str(i % 3), split), "path": f"{i}.JPEG"} for i in range(6)]
        path = copy.folder / f"imagenet-1k/data/{word}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"image": images, "label": [i % 3 for i in range(6)]}), path)


def imagenet_webdataset(copy: Copy) -> None:
    write_webdataset(_imagenet(copy, "x"), copy.folder / "tars")


def imagenet_21k(copy: Copy) -> None:
    for name in CLASSES:
        members = [(f"{name}_{i}.JPEG", copy.data(name)) for i in range(2)]
        copy.write(f"winter21_whole/{name}.tar", tar_of(members))


def tiny_imagenet(copy: Copy) -> None:
    copy.lines("tiny-imagenet-200/wnids.txt", *CLASSES)
    copy.lines("tiny-imagenet-200/words.txt", *(f"{name}\tsome words" for name in CLASSES))
    for name in CLASSES:
        for i in range(2):
            copy.add(f"tiny-imagenet-200/train/{name}/images/{name}_{i}.JPEG", name)
        copy.lines(f"tiny-imagenet-200/train/{name}/{name}_boxes.txt", f"{name}_0.JPEG\t0\t0\t9\t9")
    for i, name in enumerate(CLASSES):
        copy.add(f"tiny-imagenet-200/val/images/val_{i}.JPEG", name, "val")
    rows = (f"val_{i}.JPEG\t{name}\t0\t32\t44\t62" for i, name in enumerate(CLASSES))
    copy.lines("tiny-imagenet-200/val/val_annotations.txt", *rows)
    copy.add("tiny-imagenet-200/test/images/test_0.JPEG", None, "test")


# --- scenes, animals, things ------------------------------------------------------------------------------------------


def places365(copy: Copy) -> None:
    rows = []
    for i in range(8):
        path = f"/{'ab'[i % 2]}/{('airfield', 'bar')[i % 2]}{'/outdoor' * (i // 2 % 2)}/{i:08}.jpg"
        copy.add(f"data_256{path}", str(i % 4))
        rows.append(f"{path} {i % 4}")
    copy.lines("places365_train_standard.txt", *rows)


def inaturalist_2018(copy: Copy) -> None:
    names = ("Turdus merula", "Zea mays")
    for split, numbers in (("train", range(4)), ("val", range(4, 6))):
        paths = [f"train_val2018/{('Aves', 'Plantae')[i % 2]}/{2761 + i % 2}/{i}.jpg" for i in numbers]
        for i, path in zip(numbers, paths, strict=True):
            copy.add(f"inat/{path}", names[i % 2], split)
        described = {
            "images": [{"id": i, "file_name": path} for i, path in zip(numbers, paths, strict=True)],
            "annotations": [{"id": i, "image_id": i, "category_id": 2761 + i % 2} for i in numbers],
            "categories": [{"id": 2761 + i, "name": name} for i, name in enumerate(names)],
        }
        copy.write(f"{split}2018.json", json.dumps(described))


def sun397(copy: Copy) -> None:
    for place in ("a/abbey", "b/bar", "c/cathedral/indoor", "c/church/indoor", "c/church/outdoor"):
        copy.add(f"SUN397/{place}/sun_{place.replace('/', '')}.jpg", place[2:])
    copy.lines("SUN397/ClassName.txt", "/a/abbey", "/b/bar")


def caltech_101_caltech_256(copy: Copy) -> None:
    copy.tree("101_ObjectCategories/{at}/image_{:04}.jpg", ("056.dog", "accordion"), "", 14)
    for i in range(4):
        copy.add(f"101_ObjectCategories/056.dog/greg/vw_{i}.jpg", "056.dog", "")


def cub_200_2011(copy: Copy) -> None:
    names = ("001.Black_footed_Albatross", "002.Laysan_Albatross")
    paths = [f"{name}/{name[4:]}_{i:04}.jpg" for name in names for i in range(3)]
    for i, path in enumerate(paths):
        copy.add(f"CUB_200_2011/images/{path}", path.partition("/")[0], "test" if i % 3 == 2 else "train")
    copy.lines("CUB_200_2011/images.txt", *(f"{i + 1} {path}" for i, path in enumerate(paths)))
    copy.lines("CUB_200_2011/train_test_split.txt", *(f"{i + 1} {int(i % 3 < 2)}" for i in range(len(paths))))


def stanford_cars(copy: Copy) -> None:
    fields = [("class", "O"), ("fname", "O")]
    for split in ("train", "test"):
        rows = np.zeros((1, 4), fields)
        for i in range(4):
            copy.add(f"cars_{split}/{i + 1:05}.jpg", str(i % 2), split)
            rows[0, i] = (i % 2 + 1, f"{i + 1:05}.jpg")
        copy.write(f"devkit/cars_{split}_annos.mat", _mat(annotations=rows))


def _mat(**values: Any) -> bytes:
    from scipy.io import savemat

    file = io.BytesIO()
    savemat(file, values)
    return file.getvalue()


def oxford_flowers_102(copy: Copy) -> None:
    splits = ("train", "val", "test")
    for i in range(9):
        copy.add(f"flowers/jpg/image_{i + 1:05}.jpg", str(i // 3), splits[i % 3])
    copy.write("flowers/imagelabels.mat", _mat(labels=np.arange(9) // 3 + 1))
    ids = {"trnid": np.array([1, 4, 7]), "valid": np.array([2, 5, 8]), "tstid": np.array([3, 6, 9])}
    copy.write("flowers/setid.mat", _mat(**ids))


def oxford_iiit_pets(copy: Copy) -> None:
    names = ("Abyssinian", "american_bulldog")
    for split, file in (("train", "trainval"), ("test", "test")):
        ids = [f"{name}_{i}" for name in names for i in ((1, 2) if split == "train" else (3,))]
        for one in ids:
            copy.add(f"pets/images/{one}.jpg", one.rpartition("_")[0], split)
            copy.mask(f"pets/annotations/trimaps/{one}.png")
        rows = (f"{one} {names.index(one.rpartition('_')[0]) + 1} 1 1" for one in ids)
        copy.lines(f"pets/annotations/{file}.txt", *rows)


def food_101(copy: Copy) -> None:
    for split, numbers in (("train", (1, 2, 3)), ("test", (4,))):
        for name in CD:
            for i in numbers:
                copy.add(f"food-101/images/{name}/{i}.jpg", name, split)
        copy.lines(f"food-101/meta/{split}.txt", *(f"{name}/{i}" for name in CD for i in numbers))


def dtd(copy: Copy) -> None:
    for split, number in (("train", 1), ("val", 2), ("test", 3)):
        paths = [f"{name}/{name}_{number:04}.jpg" for name in ("banded", "dotted")]
        for path in paths:
            copy.add(f"dtd/images/{path}", path.partition("/")[0], split)
        copy.lines(f"dtd/labels/{split}1.txt", *paths)


def bigearthnet(copy: Copy) -> None:
    for i in range(4):
        name = f"S2A_MSIL2A_20170613T101031_{i}"
        pixels = copy.pixels()
        for channel, band in enumerate(("B04", "B03", "B02")):
            file = io.BytesIO()
            Image.fromarray(pixels[..., channel].astype(np.uint16) * 10).save(file, "TIFF")
            copy.write(f"BigEarthNet-v1.0/{name}/{name}_{band}.tif", file.getvalue())


def cifar_10_cifar_100(copy: Copy) -> None:
    for split, file in (("train", "data_batch_1"), ("test", "test_batch")):
        images = np.stack([copy.pixels(str(i % 2), split, 32) for i in range(4)]).transpose(0, 3, 1, 2)
        batch = {b"data": images.reshape(4, -1), b"labels": [0, 1, 0, 1]}
        copy.write(f"cifar-10-batches-py/{file}", pickle.dumps(batch))
    copy.write("cifar-10-batches-py/batches.meta", pickle.dumps({b"label_names": [b"cat", b"dog"]}))


def mnist_fashion_mnist_kmnist(copy: Copy) -> None:
    for split, word, grays in (("train", "train", (0, 21)), ("test", "t10k", (42,))):
        images = np.stack([copy.pixels(str(i), split, 28, gray) for i, gray in enumerate(grays)])[..., 0]
        head = struct.pack(">4I", 0x803, len(images), 28, 28)
        copy.write(f"mnist/{word}-images-idx3-ubyte.gz", gzip.compress(head + images.tobytes()))
        labels = struct.pack(">2I", 0x801, len(images)) + bytes(range(len(images)))
        copy.write(f"mnist/{word}-labels-idx1-ubyte.gz", gzip.compress(labels))


def stl_10(copy: Copy) -> None:
    for split in ("train", "test"):
        images = np.stack([copy.pixels(str(i % 2), split, 96) for i in range(4)])
        copy.write(f"stl10_binary/{split}_X.bin", images.transpose(0, 3, 2, 1).tobytes())
        copy.write(f"stl10_binary/{split}_y.bin", bytes([1, 2, 1, 2]))


def svhn(copy: Copy) -> None:
    for split in ("train", "test"):
        images = np.stack([copy.pixels(str(i % 2), split, 32) for i in range(4)], axis=3)
        copy.write(f"svhn/{split}_32x32.mat", _mat(X=images, y=np.array([[10], [1], [10], [1]], np.uint8)))


def medmnist(copy: Copy) -> None:
    arrays = {}
    for split in ("train", "val", "test"):
        arrays[f"{split}_images"] = np.stack([copy.pixels(str(i % 2), split, 28) for i in range(2)])
        arrays[f"{split}_labels"] = np.array([[0], [1]], np.uint8)
    np.savez(copy.folder / "pathmnist.npz", **arrays)


# --- faces and people -------------------------------------------------------------------------------------------------


def celeba_identities(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"img_align_celeba/{i + 1:06}.jpg", str(i % 2))
    copy.lines("identity_CelebA.txt", *(f"{i + 1:06}.jpg {i % 2}" for i in range(4)))


def celeba_attributes(copy: Copy) -> None:
    rows = []
    for i in range(4):
        values = (2 * (i % 2) - 1, 2 * (i // 2) - 1)
        copy.add(f"img_align_celeba/{i + 1:06}.jpg", tuple(map(float, values)))
        rows.append(f"{i + 1:06}.jpg,{values[0]},{values[1]}")
    copy.lines("list_attr_celeba.csv", "image_id,Smiling,Young", *rows)


def ffhq_stylegan_s_folders(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"ffhq/{i // 2:05}/img{i:08}.png")
    copy.write("ffhq/dataset.json", json.dumps({"labels": None}))


def ms1m_glint360k_casia_rec(copy: Copy) -> None:
    content = b""
    for i in range(4):
        image = struct.pack("<IfQQ", 0, i % 2, i, 0) + copy.data(str(i % 2))
        content += struct.pack("<II", 0xCED7230A, len(image)) + image + bytes(-len(image) % 4)
    head = struct.pack("<IfQQff", 2, 4, 0, 0, 5, 7)
    copy.write("faces/train.rec", struct.pack("<II", 0xCED7230A, len(head)) + head + content)


def market_1501(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"bounding_box_train/{2 + i % 2:04}_c1s1_{i:06}_03.jpg", f"id{2 + i % 2:04}")


# --- masks ------------------------------------------------------------------------------------------------------------


def cityscapes(copy: Copy) -> None:
    for split in ("train", "val"):
        for city in ("aachen", "bochum"):
            name = f"{split}/{city}/{city}_000000_000019"
            copy.add(f"leftImg8bit/{name}_leftImg8bit.png", None, split)
            copy.mask(f"gtFine/{name}_gtFine_labelIds.png")
            copy.mask(f"gtFine/{name}_gtFine_instanceIds.png", value=99)


def pascal_voc(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"VOC2012/JPEGImages/2007_{i:06}.jpg", None, ("train", "val")[i // 2])
        copy.mask(f"VOC2012/SegmentationClass/2007_{i:06}.png", "P")
        copy.lines(f"VOC2012/Annotations/2007_{i:06}.xml", "<annotation/>")
    for split, numbers in (("train", (0, 1)), ("val", (2, 3))):
        copy.lines(f"VOC2012/ImageSets/Segmentation/{split}.txt", *(f"2007_{i:06}" for i in numbers))


# --- without labels, or with several ----------------------------------------------------------------------------------


def openimages(copy: Copy) -> None:
    names = ("/m/01g317", "/m/0bt9lr")
    rows = []
    for i in range(4):
        copy.add(f"openimages/train/{i:016x}.jpg", (1.0, float(i % 2)))
        rows += [f"{i:016x},verification,{names[0]},1", f"{i:016x},verification,{names[1]},{i % 2}"]
    copy.lines("train-annotations-human-imagelabels.csv", "ImageID,Source,LabelName,Confidence", *rows)


def laion_cc3m_datacomp_img2dataset(copy: Copy) -> None:
    for k in range(2):
        members = []
        for i in range(3):
            name = f"{k:05}{i:04}"
            members += [
                (f"{name}.jpg", copy.data()),
                (f"{name}.txt", b"words"),
                (f"{name}.json", b'{"caption": "words"}'),
            ]
        copy.write(f"laion/{k:05}.tar", tar_of(members))
        pq.write_table(pa.table({"url": ["http"] * 3, "caption": ["words"] * 3}), copy.folder / f"laion/{k:05}.parquet")
        copy.write(f"laion/{k:05}_stats.json", "{}")


def img2dataset_as_files(copy: Copy) -> None:
    for i in range(4):
        name = f"cc3m/{i // 2:05}/{i // 2:05}{i % 2:04}"
        copy.add(f"{name}.jpg")
        copy.write(f"{name}.txt", "words")
        copy.write(f"{name}.json", '{"caption": "words", "key": "1"}')


# --- medicine and Kaggle ----------------------------------------------------------------------------------------------


def nih_chestx_ray14(copy: Copy) -> None:
    names = ("Hernia", "Mass")
    rows = []
    for i in range(24):
        found = [names[k] for k in range(2) if (i + 1) >> k & 1] or [names[0]]
        name = f"{i // 2:08}_{i % 2:03}.png"
        copy.add(f"chest/images_{1 + i // 12:03}/images/{name}", tuple(float(one in found) for one in names), "")
        rows.append(f"{name},{'|'.join(found)},{i % 2},{i // 2}")
    copy.lines("Data_Entry_2017.csv", "Image Index,Finding Labels,Follow-up #,Patient ID", *rows)


def ham10000_isic(copy: Copy) -> None:
    rows = []
    for i in range(24):
        copy.add(f"ham/HAM10000_images_part_{1 + i // 12}/ISIC_{i:07}.jpg", ("mel", "nv")[i % 2], "")
        rows.append(f"HAM_{i // 2:07},ISIC_{i:07},{('mel', 'nv')[i % 2]},histo,80.0,male,scalp")
    copy.lines("HAM10000_metadata.csv", "lesion_id,image_id,dx,dx_type,age,sex,localization", *rows)


def aptos_2019_cassava_plant_pathology(copy: Copy) -> None:
    for i in range(6):
        copy.add(f"aptos/train_images/{i:012x}.png", str(i % 3))
    copy.lines("aptos/train.csv", "id_code,diagnosis", *(f"{i:012x},{i % 3}" for i in range(6)))


def dog_breed_kaggle(copy: Copy) -> None:
    for i in range(6):
        copy.add(f"dog-breed/train/{i:032x}.jpg", ("boxer", "pug")[i % 2])
    copy.lines("dog-breed/labels.csv", "id,breed", *(f"{i:032x},{('boxer', 'pug')[i % 2]}" for i in range(6)))


def lists_of_mxnet(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"photos/{i}.jpg", str(i % 2))
    copy.lines("photos.lst", *(f"{i}\t{i % 2}.000000\t{i}.jpg" for i in range(4)))
