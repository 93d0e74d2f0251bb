"""`shardio view` and `shardio replay`: samples of a set, and the batches that a training process had."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import assert_one_clear_error, called, shardio
from folders import flip
from PIL import Image
from replay_training import Histories, train

from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop, ToDtype, Transform, Views
from shardio.cli.options import read_chain
from shardio.cli.output import levels_of
from shardio.conversion.convert import convert
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

CHAIN = Compose([RandomResizedCrop(8), HorizontalFlip(), Normalize("imagenet")])


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    return make_set(61, (12, 10, 3))


def pixels_of(path: Path) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))


def test_view_draws_the_samples_that_were_asked_for(out: Path, tmp_path: Path) -> None:
    text = called("view", out, "--indices", "3,17,20-22", "--side", 12, "-o", tmp_path / "sheet.png")
    drawn = pixels_of(tmp_path / "sheet.png")
    assert text == f"{tmp_path}/sheet.png: {drawn.shape[1]} x {drawn.shape[0]} pixels\n"
    shards = open_shards(out)
    for place, index in enumerate([3, 17, 20, 21, 22]):
        left = 6 + place * 16
        np.testing.assert_array_equal(drawn[6:18, left : left + 10], shards[index].image)


def test_view_draws_samples_of_a_class(out: Path, tmp_path: Path) -> None:
    """Each is the picture of a sample of its class, and no sample comes twice."""
    shards = open_shards(out)
    for words, labels in (
        (["--class", "c3", "--count", 4], [3] * 4),
        (["--per-class", 2], [label for label in np.unique(shards.labels) for _ in range(2)]),
    ):
        called("view", out, *words, "--side", 12, "-o", tmp_path / "sheet.png")
        drawn = pixels_of(tmp_path / "sheet.png")
        found = []
        row_height = (len(drawn) - 6) // -(-len(labels) // 8)
        for place, label in enumerate(labels):
            top, left = 6 + place // 8 * row_height, 6 + place % 8 * 16
            picture = drawn[top : top + 12, left : left + 10]
            of_class = np.flatnonzero(shards.labels == label).tolist()
            found += [index for index in of_class if np.array_equal(shards[index].image, picture)]
        assert len(found) == len(set(found)) == len(labels)


def test_view_shows_augmentations_and_views(out: Path, tmp_path: Path) -> None:
    for number, chain in enumerate((CHAIN, Views([CHAIN, CHAIN]))):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(chain.to_dict()))
        called(
            *("view", out, "--count", 2, "--augmented", path, "--draws", 3),
            *("--side", 12, "-o", tmp_path / "sheet.png"),
        )
        # The sample itself, and one picture of 12 x 12 for each view of each draw.
        assert pixels_of(tmp_path / "sheet.png").shape[1] == (4 + 3 * number) * 18 + 6


def test_augmented_pictures_of_a_squashed_set_are_those_of_training(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, shown = tmp_path / "out", []
    convert(image_tree / "train", out, size=16, fit="squash")
    chain, count = RandomResizedCrop(8), len(open_shards(out))
    (tmp_path / "chain.json").write_text(json.dumps(chain.to_dict()))
    monkeypatch.setattr("shardio.cli.view.show_sheet", lambda pictures, *_, **__: shown.extend(pictures))
    words = ("--indices", f"0-{count - 1}", "--augmented", tmp_path / "chain.json", "--draws", 1, "--seed", 3)
    called("view", out, *words)
    with ShardLoader(out, count, shuffle=False, seed=3, transform=chain, device="cpu") as loader:
        (images, _), *_ = loader
    np.testing.assert_array_equal(np.stack(shown[1::2]), images.permute(0, 2, 3, 1).numpy())


def test_view_shows_damaged_samples(out: Path, tmp_path: Path) -> None:
    assert called("view", out, "--damaged", "-o", tmp_path / "sheet.png") == "no sample of the split is damaged\n"
    flip(out / "train-00001.npy", 4096 + 2 * 360)
    called("view", out, "--damaged", "--side", 12, "-o", tmp_path / "sheet.png")
    np.testing.assert_array_equal(pixels_of(tmp_path / "sheet.png")[6:18, 6:16], open_shards(out)[12].image)
    none = called("view", out, "--damaged", "--indices", "13,14", "-o", tmp_path / "none.png")
    assert none == "no matching sample of the split is damaged\n"
    assert "no matching" in called("view", out, "--damaged", "--key", "*/13.png", "-o", tmp_path / "none.png")


# --- replay -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def histories(tmp_path: Path) -> Histories:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return Histories(tmp_path, seed, trained=train)


@pytest.mark.filterwarnings("ignore:.*empty on rank:RuntimeWarning")
def test_replay_gives_the_keys_and_pixels_that_training_had_through_resumes_on_other_ranks(
    histories: Histories,
) -> None:
    for _ in range(6):
        histories.round(replays=2)
    assert histories.counts.violations == []
    assert histories.counts.resumed


@pytest.mark.filterwarnings("ignore:.*empty on rank:RuntimeWarning")
def test_a_replay_of_other_random_numbers_is_noticed(histories: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(*words: Any) -> Transform:
        return Compose([HorizontalFlip(1.0), read_chain(*words)])

    monkeypatch.setattr("shardio.cli.train.read_chain", flipped)
    for _ in range(4):
        histories.round()
    assert any("other pixels" in violation for violation in histories.counts.violations)


def test_replay_finds_the_batches_of_a_stream_with_repeats(out: Path, tmp_path: Path) -> None:
    stream = ["--epoch-batches", 3, "--repeats", 2]
    with ShardLoader(out, 8, epoch_batches=3, repeats=2, device="cpu", return_indices=True) as loader:
        list(loader)
        iterator = iter(loader)
        next(iterator)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        state = {
            name: torch.tensor(value) if type(value) is int else value for name, value in loader.state_dict().items()
        }
        torch.save({"step": 1, "data": [], "state": {"loader": state}}, tmp_path / "checkpoint.pt")
        expected = next(iterator)[2].tolist()
    for words in (
        ["--epoch", 1, "--step", 1, *stream],
        ["--consumed", 32, *stream],
        ["--state", tmp_path / "state.json"],
        ["--state", tmp_path / "checkpoint.pt"],
    ):
        told = json.loads(called("replay", out, "--batch-size", 8, *words, "--json"))
        assert (told["indices"], told["consumed"]) == (expected, 32)


def test_replay_finds_the_batches_of_a_mixture(out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(out, tmp_path / "same")
    called("change", out, other, "--keep", "--random", "50%")
    mixed = ["--mix", f"{other}=0.5"]
    with ShardLoader({out: 2, other: 1}, 8, epoch_batches=3, seed=5, device="cpu", return_indices=True) as loader:
        iterator = iter(loader)
        next(iterator)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        expected = next(iterator)[2].tolist()
    for words in (
        ["--seed", 5, "--step", 1, "--epoch-batches", 3, *mixed],
        ["--state", tmp_path / "state.json", *mixed],
    ):
        told = json.loads(called("replay", out, "--batch-size", 8, *words, "--json"))
        assert told["indices"] == expected
    # A copy of the same set under another name has the same samples, and is found out.
    assert_one_clear_error(
        shardio("replay", out, "--batch-size", 8, "--mix", f"{tmp_path / 'same'}=1", "--epoch-batches", 3), 2, "once"
    )
    assert_one_clear_error(shardio("replay", out, "--batch-size", 8, *mixed), 2, "epoch_batches")


def test_replay_tells_a_table_and_draws_what_the_model_saw(out: Path, tmp_path: Path) -> None:
    text = called("replay", out, "--batch-size", 4, "--step", 2, "--shuffle", "false", "-o", tmp_path / "sheet.png")
    lines = text.splitlines()
    assert lines[1].split() == ["sample", "class", "key"]
    assert lines[2].split() == ["8", "c1", "c1/8.png"]
    assert lines[-1] == "epoch 0, after 8 samples of all ranks; rank 0 of 1"
    assert pixels_of(tmp_path / "sheet.png").size


@pytest.mark.parametrize(
    "transform",
    [None, CHAIN, Compose([Normalize(0.5, 0.25)]), *(ToDtype(torch.float32, scale) for scale in (True, False))],
)
def test_what_the_model_saw_is_shown_in_gray_levels(transform: Transform | None) -> None:
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    flat = Compose([Normalize("imagenet")]) if transform is CHAIN else transform
    seen = images if flat is None else flat(images)
    np.testing.assert_array_equal(levels_of(seen, transform), images.permute(0, 2, 3, 1).numpy())  # type: ignore[arg-type]


def test_each_view_is_shown_in_gray_levels_by_its_own_normalization() -> None:
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    casts = [Normalize("imagenet"), Normalize(0.5, 0.25), Compose([])]
    transform = Compose([Views([casts[0], Views(casts[1:])])])
    for number, seen in enumerate(transform(images)):
        np.testing.assert_array_equal(levels_of(seen, transform, number), images.permute(0, 2, 3, 1).numpy())


def test_samples_of_any_split_are_shown_next_to_their_sources(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out = image_tree / "train", tmp_path / "out"
    convert(src, out, size=16, val=0.4)
    shown: list[list[str]] = []
    monkeypatch.setattr("shardio.cli.view.show_sheet", lambda pictures, captions, *_, **__: shown.append(captions))
    for split in ("train", "val"):
        called("view", out, "--split", split, "--count", "20", "--against", src)
    assert [len(captions) // 2 for captions in shown] == [len(open_shards(out, split)) for split in ("train", "val")]
    assert all(text.startswith("source\n") for captions in shown for text in captions[1::2])
    elsewhere = shardio("view", out, "--against", image_tree, "-o", tmp_path / "sheet.png")  # keys begin with a split
    assert_one_clear_error(elsewhere, 1, str(image_tree), "found none")


def test_a_refused_image_of_any_split_is_on_the_page(image_tree: Path, tmp_path: Path) -> None:
    src, pages = image_tree / "train", []
    damaged = sorted(src.glob("*/*"))
    for path in damaged[::2]:
        path.write_bytes(path.read_bytes()[:-20])
    convert(src, tmp_path / "out", size=16, val=0.4, max_bad=1.0)
    for given in ([], ["--source", src]):
        called("report", tmp_path / "out", "-o", tmp_path / "page.html", *given)
        pages.append((tmp_path / "page.html").read_text().partition('id="refused"')[2].count("<img"))
    assert pages == [0, len(damaged[::2])]
