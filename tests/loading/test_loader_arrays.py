"""Arrays in batches: the same values with every way of reading, for as long as a batch is held."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrays import Given, change_split, some_arrays
from by_hand import flat
from numpy.typing import NDArray
from pictures import as_batch, sample_pixels
from torch.utils.data import DataLoader

from shardio import augment
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.format.layout import HEADER_NBYTES
from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.reading.choose import Io
from shardio.system.pour import direct_alignment

COUNT, HEIGHT, WIDTH = 23, 6, 5
RNG = np.random.default_rng(3)
ARRAYS: dict[str, Given] = {
    **some_arrays(COUNT, HEIGHT, WIDTH),
    "small": ("array", RNG.integers(0, 256, (COUNT, 4, 3, 3), dtype=np.uint8)),
    "words": ("array", RNG.integers(0, 1 << 63, (COUNT, 2), dtype=np.uint64)),
    "counts": ("array", RNG.integers(0, 1 << 32, (COUNT, 1, 3), dtype=np.uint32)),
    "score": ("array", np.linspace(-1, 1, COUNT)),
    "year": ("array", np.arange(COUNT) + 2000),
}
NAMES = list(ARRAYS)
# Rows come twice, and not at all.
ORDER = np.array([5, 22, 5, 0, 19, 1, 1, 7, 20, 21, 3, 2, 4, 8, 9, 10, 11, 12, 22, 6, 13, 13, 14, 15, 16, 17, 18])


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with arrays of every kind, whose samples are in another order than they are stored in."""
    out = tmp_path_factory.mktemp("arrays") / "set"
    with ShardWriter(out, (HEIGHT, WIDTH, 3), classes=list("abcdefg"), shard_nbytes=HEADER_NBYTES + 10 * 90) as writer:
        for i in range(COUNT):
            writer.append(sample_pixels(i), i % 7)
    change_split(out, ARRAYS, ORDER)
    return out


@pytest.fixture
def path(made_once: Path, tmp_path: Path) -> Path:
    """A copy of that set, which a test may damage."""
    return shutil.copytree(made_once, tmp_path / "set")


@pytest.fixture
def loader_of(path: Path, closing: ExitStack) -> Callable[..., ShardLoader]:
    """loader_of(...): a loader on the CPU, which is closed in the end."""

    def make(batch_size: int = 5, **options: Any) -> ShardLoader:
        if options.get("io") == "direct" and direct_alignment(path / "train-00000.npy") is None:
            pytest.skip("O_DIRECT does not work here")
        options = {"device": "cpu", "tail": "short", **options}
        return closing.enter_context(ShardLoader(path, batch_size, return_indices=True, **options))

    return make


def value_of(name: str, index: int) -> NDArray[Any]:
    value: NDArray[Any] = ARRAYS[name][1][ORDER[index]]
    return value


def check(batch: tuple[Any, ...]) -> list[int]:
    """Checks every value of a batch. Returns its samples."""
    images, labels, indices, *rest = batch
    more = rest[0] if rest else {}
    for number, index in enumerate(indices.tolist()):
        np.testing.assert_array_equal(images[number].permute(1, 2, 0).numpy(), sample_pixels(ORDER[index]))
        assert labels[number] == ORDER[index] % 7
        for name, tensor in more.items():
            if name in ARRAYS:
                expected = value_of(name, index)
                assert tensor.numpy().dtype == expected.dtype
                np.testing.assert_array_equal(tensor[number].numpy(), expected)
    numbers: list[int] = indices.tolist()
    return numbers


@pytest.mark.parametrize(("io", "check_option"), [("mmap", "off"), ("pread", "sample"), ("direct", "off")])
def test_no_pixels_are_read_where_none_are_wanted(
    io: Io, check_option: str, loader_of: Callable[..., ShardLoader]
) -> None:
    with loader_of(io=io, check=check_option, images=None, arrays=["clip"]) as loader:
        for labels, indices, more in loader:
            np.testing.assert_array_equal(more["clip"], np.stack([value_of("clip", i) for i in indices.tolist()]))
            assert labels.tolist() == (ORDER[indices] % 7).tolist()
        read = loader.stats()["read_nbytes"]
    assert "x no pixels with clip, rank 0" in repr(loader)
    # Not a byte of pixels: their values, and by pread their rows of the index and of checksums; or sectors of them.
    nbytes = ARRAYS["clip"][1][0].nbytes
    assert len(ORDER) * nbytes <= read < len(ORDER) * (nbytes + 60) or io == "direct"


def test_batches_of_nothing_are_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", (HEIGHT, WIDTH, 3), labels=None) as writer:
        writer.append(sample_pixels(0))
    with pytest.raises(ValueError, match=r"set, train: .*images=None"):
        ShardLoader(tmp_path / "set", 1, device="cpu", images=None)
    with ShardLoader(tmp_path / "set", 1, device="cpu", images=None, return_indices=True) as loader:
        assert len(next(iter(loader))) == 1


def test_a_batch_has_a_dict_only_where_arrays_were_asked_for(path: Path) -> None:
    state: dict[str, Any] = {}
    for options, parts in (
        ({}, 2),
        ({"arrays": ["clip"]}, 3),
        ({"arrays": ["year"], "return_indices": True}, 4),
        ({"images": None, "return_indices": True}, 2),
    ):
        with ShardLoader(path, 5, device="cpu", **options) as loader:  # type: ignore[arg-type]
            loader.load_state_dict(state or loader.state_dict())  # which says nothing of parts
            assert len(next(iter(loader))) == parts
            state = loader.state_dict()


def test_a_slot_comes_back_when_the_last_of_its_views_dies(loader_of: Callable[..., ShardLoader]) -> None:
    with loader_of(arrays=["clip", "mask", "year"], prefetch=0) as loader:
        assert "x (6, 5, 3) with clip, mask, year, rank 0" in repr(loader)
        ring, batches = loader._pipeline._ring, iter(loader)
        images, labels, indices, more = next(batches)
        assert ring.num_free == 0
        assert loader.stats()["nbytes"] == len(indices) * (HEIGHT * WIDTH * 4 + 32 + 8)
        del images
        clip = more["clip"][2:, :3]
        years = more["year"]
        more.clear()
        gc.collect()
        assert ring.num_free == 0
        del clip
        assert ring.num_free == 1
        # Labels, indices and small arrays are copies: collecting them over an epoch keeps no slot.
        assert years.tolist() == [2000 + ORDER[i] for i in indices.tolist()]
        assert labels.tolist() == [int(ORDER[i]) % 7 for i in indices.tolist()]


class Own(augment.Transform):
    """A transform of a user's own, which turns masks into what can be told apart."""

    def apply(self, batch: Any, purpose: str) -> Any:
        changed = {name: mask + 1 for name, mask in batch.masks.by_name.items()}
        return replace(batch, masks=replace(batch.masks, by_name=changed))


class Caller(Own):
    def __call__(self, images: Any, *_: Any, **__: Any) -> Any:
        return images


def test_a_transform_of_the_users_own_is_given_masks(loader_of: Callable[..., ShardLoader]) -> None:
    with loader_of(arrays=["clip", "mask"], transform=Own()) as loader:
        _, _, indices, more = next(iter(loader))
    assert list(more) == ["clip", "mask"]
    for number, index in enumerate(indices.tolist()):
        np.testing.assert_array_equal(more["clip"][number].numpy(), value_of("clip", index))
        np.testing.assert_array_equal(more["mask"][number].numpy(), value_of("mask", index) + np.uint8(1))
    with pytest.raises(TypeError, match="Caller"):
        loader_of(transform=Caller())


@pytest.mark.parametrize(
    "function",
    [
        lambda images: images.flip(-1),
        partial(augment.RandomCrop(4, padding=2), mask_fill=255),
        torch.nn.Sequential(torch.nn.Identity()),
    ],
)
def test_a_function_of_the_pictures_alone_is_refused_beside_masks(
    loader_of: Callable[..., ShardLoader], function: Callable[[Any], Any]
) -> None:
    with pytest.raises(ValueError, match="mask"):
        loader_of(arrays=["clip", "mask"], transform=function)
    with loader_of(arrays=["mask"]) as loader:
        with pytest.raises(ValueError, match="mask"):
            loader.transform = function
        assert loader.transform is None
    with loader_of(arrays=["clip"], transform=function) as loader:
        assert len(next(iter(loader))) == 4


@pytest.mark.filterwarnings("ignore:.*empty on rank:RuntimeWarning")
@pytest.mark.parametrize(
    ("transform", "arrays"),
    [
        (None, ["mask", "depth"]),
        (augment.Views([augment.RandomResizedCrop(4), augment.RandomCrop(3, padding=1)]), ["mask", "depth"]),
        (augment.Compose([augment.CenterCrop(4), augment.RandomRotation(9), augment.ToDtype(torch.float16)]), []),
        (augment.Compose([augment.CenterCrop(4), augment.CutMix(7)]), []),
        (augment.PerSample(torch.Tensor.double), []),
    ],
)
def test_a_rank_without_samples_gets_an_empty_batch_like_the_others(
    path: Path, transform: augment.Transform | None, arrays: list[str]
) -> None:
    """Two ranks share 27 samples, 13 each in a step: the last step has one, for rank 1."""
    options: dict[str, Any] = {"device": "cpu", "arrays": arrays, "tail": "short", "world_size": 2}
    with ShardLoader(path, 13, rank=0, transform=transform, **options) as loader:
        first, last = loader
    for full, empty in zip(flat(first), flat(last), strict=True):
        assert empty.shape == (0, *full.shape[1:])
        assert empty.dtype == full.dtype


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("seed", "haste"),
    [pytest.param(n, h, marks=pytest.mark.gpu(seed=n, haste=h)) for n, h in enumerate((0, 0.4, 0.95))],
)
def test_arrays_arrive_on_the_device_whenever_it_gets_to_them(seed: int, haste: float, path: Path) -> None:
    options: dict[str, Any] = {"arrays": NAMES, "return_indices": True, "seed": seed, "prefetch": seed}
    with ShardLoader(path, 5, device="cuda", **options) as loader:
        batches = []
        for epoch in range(2):
            expected = [i for batch in loader._position.sampler.batches(epoch) for i in batch.tolist()]
            for batch in loader:
                assert all(tensor.is_cuda for tensor in flat(batch))
                batches.append([tensor.clone() for tensor in flat(batch)])
            seen = []
            while batches:
                images, labels, indices, *more = [tensor.cpu() for tensor in batches.pop(0)]
                seen += check((images, labels, indices, dict(zip(NAMES, more, strict=True))))
            assert seen == expected


def test_a_dataset_gives_arrays_by_name(path: Path) -> None:
    dataset = ShardDataset(path, arrays=["mask", "number"])
    image, label, values = dataset[3]
    assert torch.equal(image, as_batch(sample_pixels(ORDER[3])[None])[0])
    assert label == ORDER[3] % 7
    assert list(values) == ["mask", "number"]
    np.testing.assert_array_equal(values["mask"].numpy(), value_of("mask", 3))
    for number, (_, labels, batch) in enumerate(DataLoader(dataset, batch_size=4)):
        assert batch["number"][0] == value_of("number", 4 * number)
        assert len(labels) == len(batch["mask"])
    with pytest.raises(ValueError, match="found 'masks'"):
        ShardDataset(path, arrays=["masks"])
    with pytest.raises(ValueError, match="mask"):
        ShardDataset(path, transform=torch.Tensor.float, arrays=["mask"])
    with pytest.raises(ValueError, match="mask"):
        dataset.transform = torch.Tensor.float
    assert dataset.transform is None
    assert ShardDataset(path, transform=torch.Tensor.float, arrays=["number"])[0][0].dtype == torch.float32
    with ShardLoader(path, 5, device="cpu", arrays=["mask"]) as loader:
        assert len(loader.dataset[3]) == 2
