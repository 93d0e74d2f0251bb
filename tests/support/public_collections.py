"""Tiny copies of public collections, laid out as they are unpacked. A picture is of one color, which is its number."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat
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

    def tree(self, above: str, names: Iterable[str], file: str = "{}.jpg", split: str = "train", each: int = 2) -> None:
        """Adds `each` pictures of each class, in a folder of its name below `above`."""
        for name in names:
            for i in range(each):
                self.add(f"{above}/{name}/{file.format(i)}", name.rpartition("/")[2], split)

    def mask(self, path: str, value: int = 1, mode: str = "L") -> None:
        file = io.BytesIO()
        Image.new(mode, (8, 8), value).save(file, "PNG")
        self.write(path, file.getvalue())

    def write(self, path: str, content: bytes | str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())

    def lines(self, path: str, *lines: str) -> None:
        self.write(path, "".join(f"{line}\n" for line in lines))


Build = Callable[[Copy], Any]
COLLECTIONS: dict[str, Build] = {}


def _named(name: str) -> Callable[[Build], Build]:
    def note(build: Build) -> Build:
        COLLECTIONS[name] = build
        return build

    return note


# --- ImageNet ---------------------------------------------------------------------------------------------------------


def _imagenet(copy: Copy, root: str) -> Path:
    for i, name in enumerate(CLASSES):
        copy.tree(f"{root}/train", (name,), f"{name}_{{}}.JPEG")
        copy.add(f"{root}/val/{name}/ILSVRC2012_val_{i + 1:08}.JPEG", name, "val")
    return copy.folder / root


@_named("ImageNet, class folders")
def _(copy: Copy) -> None:
    _imagenet(copy, "imagenet")


@_named("ImageNet, as downloaded")
def _(copy: Copy) -> None:
    write_archives(_imagenet(copy, "x"), copy.folder / "downloads")


@_named("ImageNet, Kaggle")
def _(copy: Copy) -> None:
    write_kaggle(_imagenet(copy, "x"), copy.folder / "kaggle")


@_named("ImageNet, Hugging Face")
def _(copy: Copy) -> None:
    for split, word in (("train", "train"), ("val", "validation")):
        images = [{"bytes": copy.data(str(i % 3), split), "path": f"{i}.JPEG"} for i in range(6)]
        path = copy.folder / f"imagenet-1k/data/{word}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"image": images, "label": [i % 3 for i in range(6)]}), path)


@_named("ImageNet, WebDataset")
def _(copy: Copy) -> None:
    write_webdataset(_imagenet(copy, "x"), copy.folder / "tars")


@_named("ImageNet-21k")
def _(copy: Copy) -> None:
    for name in CLASSES:
        members = [(f"{name}_{i}.JPEG", copy.data(name)) for i in range(2)]
        copy.write(f"winter21_whole/{name}.tar", tar_of(members))


@_named("Tiny ImageNet")
def _(copy: Copy) -> None:
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


@_named("Imagenette, Imagewoof")
def _(copy: Copy) -> None:
    for split in ("train", "val"):
        copy.tree(f"imagenette2/{split}", CLASSES, "x_{}.JPEG", split)
    copy.lines("imagenette2/noisy_imagenette.csv", "path,noisy_labels_0", "train/n01440764/x_0.JPEG,n01440764")


@_named("ImageNet-A, -O, -R, -Sketch")
def _(copy: Copy) -> None:
    copy.tree("imagenet-r", CLASSES, "art_{}.jpg")
    copy.lines("imagenet-r/README.txt", "n01440764 tench")


@_named("ImageNet-C")
def _(copy: Copy) -> None:
    copy.tree("imagenet-c/gaussian_noise/1", CLASSES, "ILSVRC2012_val_{}.JPEG")


# --- scenes, animals, things ------------------------------------------------------------------------------------------


@_named("Places365")
def _(copy: Copy) -> None:
    rows = []
    for i in range(8):
        path = f"/{'ab'[i % 2]}/{('airfield', 'bar')[i % 2]}{'/outdoor' * (i // 2 % 2)}/{i:08}.jpg"
        copy.add(f"data_256{path}", str(i % 4))
        rows.append(f"{path} {i % 4}")
    copy.lines("places365_train_standard.txt", *rows)


@_named("iNaturalist 2018")
def _(copy: Copy) -> None:
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


@_named("iNaturalist 2021")
def _(copy: Copy) -> None:
    for split in ("train", "val"):
        copy.tree(f"inat2021/{split}", ("00000_Animalia_Annelida", "00001_Animalia_Arthropoda"), split=split)


@_named("SUN397")
def _(copy: Copy) -> None:
    for path in ("a/abbey", "a/alley", "b/bar", "b/barn"):
        for i in range(2):
            copy.add(f"SUN397/{path}/sun_{i}{path[2:]}.jpg", path[2:])


@_named("CUB-200-2011")
def _(copy: Copy) -> None:
    names = ("001.Black_footed_Albatross", "002.Laysan_Albatross")
    paths = [f"{name}/{name[4:]}_{i:04}.jpg" for name in names for i in range(3)]
    for i, path in enumerate(paths):
        copy.add(f"CUB_200_2011/images/{path}", path.partition("/")[0], "test" if i % 3 == 2 else "train")
    copy.lines("CUB_200_2011/images.txt", *(f"{i + 1} {path}" for i, path in enumerate(paths)))
    copy.lines("CUB_200_2011/train_test_split.txt", *(f"{i + 1} {int(i % 3 < 2)}" for i in range(len(paths))))


@_named("Stanford Cars")
def _(copy: Copy) -> None:
    fields = [("class", "O"), ("fname", "O")]
    for split in ("train", "test"):
        rows = np.zeros((1, 4), fields)
        for i in range(4):
            copy.add(f"cars_{split}/{i + 1:05}.jpg", str(i % 2), split)
            rows[0, i] = (i % 2 + 1, f"{i + 1:05}.jpg")
        copy.write(f"devkit/cars_{split}_annos.mat", _mat(annotations=rows))


def _mat(**values: Any) -> bytes:
    file = io.BytesIO()
    savemat(file, values)
    return file.getvalue()


@_named("Oxford Flowers 102")
def _(copy: Copy) -> None:
    splits = ("train", "val", "test")
    for i in range(9):
        copy.add(f"flowers/jpg/image_{i + 1:05}.jpg", str(i // 3), splits[i % 3])
    copy.write("flowers/imagelabels.mat", _mat(labels=np.arange(9) // 3 + 1))
    ids = {"trnid": np.array([1, 4, 7]), "valid": np.array([2, 5, 8]), "tstid": np.array([3, 6, 9])}
    copy.write("flowers/setid.mat", _mat(**ids))


@_named("Oxford-IIIT Pets")
def _(copy: Copy) -> None:
    names = ("Abyssinian", "american_bulldog")
    for split, file in (("train", "trainval"), ("test", "test")):
        ids = [f"{name}_{i}" for name in names for i in ((1, 2) if split == "train" else (3,))]
        for one in ids:
            copy.add(f"pets/images/{one}.jpg", one.rpartition("_")[0], split)
            copy.mask(f"pets/annotations/trimaps/{one}.png")
        rows = (f"{one} {names.index(one.rpartition('_')[0]) + 1} 1 1" for one in ids)
        copy.lines(f"pets/annotations/{file}.txt", *rows)


@_named("Stanford Dogs")
def _(copy: Copy) -> None:
    for name in ("n02085620-Chihuahua", "n02085782-Japanese_spaniel"):
        copy.tree("Images", (name,), f"{name[:9]}_{{}}.jpg", split="", each=16)


@_named("Food-101")
def _(copy: Copy) -> None:
    for split, numbers in (("train", (1, 2, 3)), ("test", (4,))):
        for name in CD:
            for i in numbers:
                copy.add(f"food-101/images/{name}/{i}.jpg", name, split)
        copy.lines(f"food-101/meta/{split}.txt", *(f"{name}/{i}" for name in CD for i in numbers))


@_named("DTD")
def _(copy: Copy) -> None:
    for split, number in (("train", 1), ("val", 2), ("test", 3)):
        paths = [f"{name}/{name}_{number:04}.jpg" for name in ("banded", "dotted")]
        for path in paths:
            copy.add(f"dtd/images/{path}", path.partition("/")[0], split)
        copy.lines(f"dtd/labels/{split}1.txt", *paths)


@_named("Caltech-101, Caltech-256")
def _(copy: Copy) -> None:
    copy.tree("101_ObjectCategories", ("BACKGROUND_Google", "accordion"), "image_{:04}.jpg", split="", each=16)


@_named("Fruits-360")
def _(copy: Copy) -> None:
    for split, word in (("train", "Training"), ("test", "Test")):
        copy.tree(f"fruits-360/{word}", ("Apple Golden 1", "Banana"), "{}_100.jpg", split)


@_named("Office-31")
def _(copy: Copy) -> None:
    copy.tree("office31/amazon/images", ("back_pack", "bike"), "frame_{:04}.jpg")


@_named("Cats and Dogs, PetImages")
def _(copy: Copy) -> None:
    copy.tree("PetImages", ("Cat", "Dog"))


@_named("Dogs vs. Cats, Kaggle")
def _(copy: Copy) -> None:
    for i in range(32):
        copy.add(f"dogs-vs-cats/train/{CD[i % 2]}.{i}.jpg", CD[i % 2], "")


@_named("LFW, VGGFace2")
def _(copy: Copy) -> None:
    for name, each in (("Aaron_Eckhart", 1), ("Abdullah_Gul", 3)):
        copy.tree("lfw", (name,), f"{name}_{{:04}}.jpg", each=each)


@_named("GTSRB")
def _(copy: Copy) -> None:
    above = "GTSRB/Final_Training/Images"
    copy.tree(above, ("00000", "00001", "00002"), "00000_{:05}.ppm")
    copy.lines(f"{above}/00000/GT-00000.csv", "Filename;Width;Height;ClassId", "00000_00000.ppm;8;8;0")


@_named("PlantVillage")
def _(copy: Copy) -> None:
    copy.tree("plantvillage/color", ("Apple___Apple_scab", "Apple___healthy"), "{}.JPG")


@_named("Intel scenes")
def _(copy: Copy) -> None:
    for split in ("train", "test"):
        copy.tree(f"intel/seg_{split}/seg_{split}", ("buildings", "forest"), split=split)


# --- from above -------------------------------------------------------------------------------------------------------


@_named("EuroSAT")
def _(copy: Copy) -> None:
    for name in ("AnnualCrop", "Forest"):
        copy.tree("EuroSAT/2750", (name,), f"{name}_{{}}.jpg", split="", each=16)


@_named("UC Merced, AID, RESISC45")
def _(copy: Copy) -> None:
    for name in ("agricultural", "airplane"):
        copy.tree("UCMerced_LandUse/Images", (name,), f"{name}{{:02}}.tif", split="", each=16)


@_named("BigEarthNet")
def _(copy: Copy) -> None:
    for i in range(4):
        name = f"S2A_MSIL2A_20170613T101031_{i}"
        pixels = copy.pixels()
        for channel, band in enumerate(("B04", "B03", "B02")):
            file = io.BytesIO()
            Image.fromarray(pixels[..., channel].astype(np.uint16) * 10).save(file, "TIFF")
            copy.write(f"BigEarthNet-v1.0/{name}/{name}_{band}.tif", file.getvalue())


# --- small arrays -----------------------------------------------------------------------------------------------------


@_named("CIFAR-10, CIFAR-100")
def _(copy: Copy) -> None:
    for split, file in (("train", "data_batch_1"), ("test", "test_batch")):
        images = np.stack([copy.pixels(str(i % 2), split, 32) for i in range(4)]).transpose(0, 3, 1, 2)
        batch = {b"data": images.reshape(4, -1), b"labels": [0, 1, 0, 1]}
        copy.write(f"cifar-10-batches-py/{file}", pickle.dumps(batch))
    copy.write("cifar-10-batches-py/batches.meta", pickle.dumps({b"label_names": [b"cat", b"dog"]}))


@_named("MNIST, Fashion-MNIST, KMNIST")
def _(copy: Copy) -> None:
    for split, word, grays in (("train", "train", (0, 21)), ("test", "t10k", (42,))):
        images = np.stack([copy.pixels(str(i), split, 28, gray) for i, gray in enumerate(grays)])[..., 0]
        head = struct.pack(">4I", 0x803, len(images), 28, 28)
        copy.write(f"mnist/{word}-images-idx3-ubyte.gz", gzip.compress(head + images.tobytes()))
        labels = struct.pack(">2I", 0x801, len(images)) + bytes(range(len(images)))
        copy.write(f"mnist/{word}-labels-idx1-ubyte.gz", gzip.compress(labels))


@_named("STL-10")
def _(copy: Copy) -> None:
    for split in ("train", "test"):
        images = np.stack([copy.pixels(str(i % 2), split, 96) for i in range(4)])
        copy.write(f"stl10_binary/{split}_X.bin", images.transpose(0, 3, 2, 1).tobytes())
        copy.write(f"stl10_binary/{split}_y.bin", bytes([1, 2, 1, 2]))


@_named("SVHN")
def _(copy: Copy) -> None:
    for split in ("train", "test"):
        images = np.stack([copy.pixels(str(i % 2), split, 32) for i in range(4)], axis=3)
        copy.write(f"svhn/{split}_32x32.mat", _mat(X=images, y=np.array([[10], [1], [10], [1]], np.uint8)))


@_named("MedMNIST")
def _(copy: Copy) -> None:
    arrays = {}
    for split in ("train", "val", "test"):
        arrays[f"{split}_images"] = np.stack([copy.pixels(str(i % 2), split, 28) for i in range(2)])
        arrays[f"{split}_labels"] = np.array([[0], [1]], np.uint8)
    np.savez(copy.folder / "pathmnist.npz", **arrays)


# --- faces and people -------------------------------------------------------------------------------------------------


@_named("CelebA, identities")
def _(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"img_align_celeba/{i + 1:06}.jpg", str(i % 2))
    copy.lines("identity_CelebA.txt", *(f"{i + 1:06}.jpg {i % 2}" for i in range(4)))


@_named("CelebA, attributes")
def _(copy: Copy) -> None:
    rows = []
    for i in range(4):
        values = (2 * (i % 2) - 1, 2 * (i // 2) - 1)
        copy.add(f"img_align_celeba/{i + 1:06}.jpg", tuple(map(float, values)))
        rows.append(f"{i + 1:06}.jpg,{values[0]},{values[1]}")
    copy.lines("list_attr_celeba.csv", "image_id,Smiling,Young", *rows)


@_named("FFHQ, StyleGAN's folders")
def _(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"ffhq/{i // 2:05}/img{i:08}.png")
    copy.write("ffhq/dataset.json", json.dumps({"labels": None}))


@_named("MS1M, Glint360K, CASIA (.rec)")
def _(copy: Copy) -> None:
    content = b""
    for i in range(4):
        image = struct.pack("<IfQQ", 0, i % 2, i, 0) + copy.data(str(i % 2))
        content += struct.pack("<II", 0xCED7230A, len(image)) + image + bytes(-len(image) % 4)
    head = struct.pack("<IfQQff", 2, 4, 0, 0, 5, 7)
    copy.write("faces/train.rec", struct.pack("<II", 0xCED7230A, len(head)) + head + content)


@_named("Market-1501")
def _(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"bounding_box_train/{2 + i % 2:04}_c1s1_{i:06}_03.jpg", f"id{2 + i % 2:04}")


# --- masks ------------------------------------------------------------------------------------------------------------


@_named("ADE20K")
def _(copy: Copy) -> None:
    for split in ("training", "validation"):
        for i in range(2):
            name = f"{split}/ADE_{split[:5]}_{i:08}"
            copy.add(f"ADEChallengeData2016/images/{name}.jpg", None, {"training": "train"}.get(split, "val"))
            copy.mask(f"ADEChallengeData2016/annotations/{name}.png")


@_named("Cityscapes")
def _(copy: Copy) -> None:
    for split in ("train", "val"):
        for city in ("aachen", "bochum"):
            name = f"{split}/{city}/{city}_000000_000019"
            copy.add(f"leftImg8bit/{name}_leftImg8bit.png", None, split)
            copy.mask(f"gtFine/{name}_gtFine_labelIds.png")
            copy.mask(f"gtFine/{name}_gtFine_instanceIds.png")


@_named("CamVid")
def _(copy: Copy) -> None:
    for i in range(3):
        copy.add(f"CamVid/train/0001TP_{i:06}.png")
        copy.mask(f"CamVid/trainannot/0001TP_{i:06}.png")


@_named("Pascal VOC")
def _(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"VOC2012/JPEGImages/2007_{i:06}.jpg", None, ("train", "val")[i // 2])
        copy.mask(f"VOC2012/SegmentationClass/2007_{i:06}.png", 1, "P")
        copy.lines(f"VOC2012/Annotations/2007_{i:06}.xml", "<annotation/>")
    for split, numbers in (("train", (0, 1)), ("val", (2, 3))):
        copy.lines(f"VOC2012/ImageSets/Segmentation/{split}.txt", *(f"2007_{i:06}" for i in numbers))


@_named("Kvasir-SEG")
def _(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"Kvasir-SEG/images/cju{i}.jpg")
        copy.mask(f"Kvasir-SEG/masks/cju{i}.png")


# --- without labels, or with several ----------------------------------------------------------------------------------


@_named("COCO, LVIS, as pictures")
def _(copy: Copy) -> None:
    for split in ("train", "val"):
        for i in range(2):
            copy.add(f"coco/{split}2017/{i:012}.jpg", None, split)
    copy.write("coco/annotations/instances_val2017.json", "{}")


@_named("OpenImages")
def _(copy: Copy) -> None:
    names = ("/m/01g317", "/m/0bt9lr")
    rows = []
    for i in range(4):
        copy.add(f"openimages/train/{i:016x}.jpg", (1.0, float(i % 2)))
        rows += [f"{i:016x},verification,{names[0]},1", f"{i:016x},verification,{names[1]},{i % 2}"]
    copy.lines("train-annotations-human-imagelabels.csv", "ImageID,Source,LabelName,Confidence", *rows)


@_named("LAION, CC3M, DataComp (img2dataset)")
def _(copy: Copy) -> None:
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


@_named("img2dataset, as files")
def _(copy: Copy) -> None:
    for i in range(4):
        name = f"cc3m/{i // 2:05}/{i // 2:05}{i % 2:04}"
        copy.add(f"{name}.jpg")
        copy.write(f"{name}.txt", "words")
        copy.write(f"{name}.json", '{"caption": "words", "key": "1"}')


@_named("DIV2K")
def _(copy: Copy) -> None:
    for i in range(3):
        copy.add(f"DIV2K_train_HR/{i + 1:04}.png")


# --- medicine and Kaggle ----------------------------------------------------------------------------------------------


@_named("NIH ChestX-ray14")
def _(copy: Copy) -> None:
    names = ("Hernia", "Mass")
    rows = []
    for i in range(24):
        found = [names[k] for k in range(2) if (i + 1) >> k & 1] or [names[0]]
        name = f"{i // 2:08}_{i % 2:03}.png"
        copy.add(f"chest/images_{1 + i // 12:03}/images/{name}", tuple(float(one in found) for one in names), "")
        rows.append(f"{name},{'|'.join(found)},{i % 2},{i // 2}")
    copy.lines("Data_Entry_2017.csv", "Image Index,Finding Labels,Follow-up #,Patient ID", *rows)


@_named("HAM10000, ISIC")
def _(copy: Copy) -> None:
    rows = []
    for i in range(24):
        copy.add(f"ham/HAM10000_images_part_{1 + i // 12}/ISIC_{i:07}.jpg", ("mel", "nv")[i % 2], "")
        rows.append(f"HAM_{i // 2:07},ISIC_{i:07},{('mel', 'nv')[i % 2]},histo,80.0,male,scalp")
    copy.lines("HAM10000_metadata.csv", "lesion_id,image_id,dx,dx_type,age,sex,localization", *rows)


@_named("APTOS 2019, Cassava, Plant Pathology")
def _(copy: Copy) -> None:
    for i in range(6):
        copy.add(f"aptos/train_images/{i:012x}.png", str(i % 3))
    copy.lines("aptos/train.csv", "id_code,diagnosis", *(f"{i:012x},{i % 3}" for i in range(6)))


@_named("Dog Breed, Kaggle")
def _(copy: Copy) -> None:
    for i in range(6):
        copy.add(f"dog-breed/train/{i:032x}.jpg", ("boxer", "pug")[i % 2])
    copy.lines("dog-breed/labels.csv", "id,breed", *(f"{i:032x},{('boxer', 'pug')[i % 2]}" for i in range(6)))


@_named("Lists of MXNet")
def _(copy: Copy) -> None:
    for i in range(4):
        copy.add(f"photos/{i}.jpg", str(i % 2))
    copy.lines("photos.lst", *(f"{i}\t{i % 2}.000000\t{i}.jpg" for i in range(4)))
