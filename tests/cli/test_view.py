"""`shardio view` and `shardio replay`: samples of a set, and the batches that a training process had."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import assert_one_clear_error, called, shardio
from folders import flip
from pictures import sample_pixels
from PIL import Image
from replay_training import Histories, train

from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop, ToDtype, Transform, Views
from shardio.cli.options import read_chain
from shardio.cli.output import levels_of
from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

Sheets = list[tuple[Any, list[str], int | None]]
CHAIN = Compose([RandomResizedCrop(8), HorizontalFlip(), Normalize("imagenet")])


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    return make_set(61, (12, 10, 3))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Sheets:
    """The pictures of each sheet, their captions, and how many a row has, instead of a sheet."""
    sheets: Sheets = []

    def show(pictures: Any, captions: list[str], *_: Any, per_row: int | None, **__: Any) -> None:
        sheets.append((pictures, captions, per_row))

    monkeypatch.setattr("shardio.cli.view.show_sheet", show)
    return sheets


def pixels_of(path: Path) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))


def test_view_draws_the_samples_that_were_asked_for(out: Path, tmp_path: Path) -> None:
    text = called("view", out, "--indices", "3,17,20-22", "--side", 12, "-o", tmp_path / "sheet.png")
    drawn = pixels_of(tmp_path / "sheet.png")
    assert text == f"{tmp_path}/sheet.png: {drawn.shape[1]} x {drawn.shape[0]} pixels\n"
    np.testing.assert_array_equal(drawn, open_shards(out).show([3, 17, 20, 21, 22], side=12))


@pytest.mark.parametrize(
    ("words", "labels"),
    [(["--class", "c3", "--count", 4], [3] * 4), (["--per-class", 2], [label for label in range(7) for _ in range(2)])],
)
def test_view_draws_samples_of_a_class(out: Path, words: list[Any], labels: list[int], shown: Sheets) -> None:
    """Each is the picture of a sample of its class, and no sample comes twice."""
    called("view", out, *words)
    ((pictures, captions, _),) = shown
    numbers = [int(caption.partition(":")[0]) for caption in captions]
    assert len(set(numbers)) == len(labels)
    shards = open_shards(out)
    assert shards.labels[numbers].tolist() == labels
    np.testing.assert_array_equal(np.stack(pictures), [shards[number].image for number in numbers])


def test_view_shows_augmentations_and_views(out: Path, tmp_path: Path, shown: Sheets) -> None:
    for number, chain in enumerate((CHAIN, Views([CHAIN, CHAIN])), start=1):
        (tmp_path / "chain.json").write_text(json.dumps(chain.to_dict()))
        called("view", out, "--count", 2, "--augmented", tmp_path / "chain.json", "--draws", 3)
        # The sample itself, and one picture for each view of each draw.
        pictures, captions, per_row = shown.pop()
        assert (len(pictures), len(captions), per_row) == (2 * (1 + 3 * number), 2 * (1 + 3 * number), 1 + 3 * number)


def test_augmented_pictures_of_a_squashed_set_are_those_of_training(
    image_tree: Path, tmp_path: Path, shown: Sheets
) -> None:
    out = tmp_path / "out"
    convert(image_tree / "train", out, size=16, fit="squash")
    chain, count = RandomResizedCrop(8), len(open_shards(out))
    (tmp_path / "chain.json").write_text(json.dumps(chain.to_dict()))
    words = ("--indices", f"0-{count - 1}", "--augmented", tmp_path / "chain.json", "--draws", 1, "--seed", 3)
    called("view", out, *words)
    with ShardLoader(out, count, shuffle=False, seed=3, transform=chain, device="cpu") as loader:
        (images, _), *_ = loader
    np.testing.assert_array_equal(np.stack(shown[0][0][1::2]), images.permute(0, 2, 3, 1).numpy())


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


def test_replay_takes_the_state_of_the_split_and_no_option_against_it(tmp_path: Path) -> None:
    sets, states, out = {}, {}, tmp_path / "out"
    with ShardWriter(out, (6, 5, 3)) as writer:
        for i in range(62):
            writer.append(sample_pixels(i), i % 7, split=("train", "val")[i % 2])
    for split, shuffle in (("val", False), ("train", True)):
        with ShardLoader(out, 4, split=split, shuffle=shuffle, seed=3, device="cpu", return_indices=True) as loader:
            iterator = iter(loader)
            next(iterator)
            states[split], sets[split] = loader.state_dict(), next(iterator)[2].tolist()
            next(iterator)
            later = loader.state_dict()

    def write(name: str, *found: Any) -> Path:
        (tmp_path / name).write_text(json.dumps({"loaders": found, "best": found[-1:]}))
        return tmp_path / name

    both, alone = write("both.json", states["val"], states["train"]), write("alone.json", states["train"])
    for file, *words in ([alone], [alone, "--split", "train", "--seed", 3, "--epoch", 0], [both, "--split", "train"]):
        told = json.loads(called("replay", out, "--batch-size", 4, "--state", file, *words, "--json"))
        assert (told["split"], told["indices"]) == ("train", sets["train"])
    for words, name, word in (
        ([], both, "--split"),
        (["--split", "test"], both, "'split': 'val'"),
        (["--split", "train", "--epoch", 0], write("twice.json", states["train"], later), "'epoch': 0"),
        (["--split", "val"], alone, "--split"),
        (["--seed", 4], alone, "--seed"),
        (["--epoch", 1], alone, "--epoch"),
        (["--shuffle", "block"], alone, "--shuffle"),
    ):
        result = shardio("replay", out, "--batch-size", 4, "--state", name, *words)
        assert_one_clear_error(result, 2, str(name), word)


def test_replay_finds_the_batches_of_a_mixture(out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
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
    assert_one_clear_error(shardio("replay", out, "--batch-size", 8, *mixed), 2, "epoch_batches")


def test_replay_tells_a_table_and_draws_what_the_model_saw(out: Path, tmp_path: Path) -> None:
    text = called("replay", out, "--batch-size", 4, "--step", 2, "--shuffle", "false", "-o", tmp_path / "sheet.png")
    lines = text.splitlines()
    assert lines[1].split() == ["sample", "class", "key"]
    assert lines[2].split() == ["8", "c1", "c1/8.png"]
    assert lines[-1] == "epoch 0, after 8 samples of all ranks; rank 0 of 1"
    assert pixels_of(tmp_path / "sheet.png").size


def test_what_the_model_saw_is_shown_in_gray_levels() -> None:
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    floats = [ToDtype(torch.float32, scale) for scale in (True, False)]
    for flat in (None, Normalize("imagenet"), Normalize(0.5, 0.25), *floats):
        seen = images if flat is None else flat(images)
        transform = Compose([RandomResizedCrop(8), flat]) if isinstance(flat, Normalize) else flat
        np.testing.assert_array_equal(levels_of(seen, transform), images.permute(0, 2, 3, 1).numpy())  # type: ignore[arg-type]
    # Each view by its own normalization.
    casts = [Normalize("imagenet"), Normalize(0.5, 0.25), Compose([])]
    transform = Compose([Views([casts[0], Views(casts[1:])])])
    for number, seen in enumerate(transform(images)):
        np.testing.assert_array_equal(levels_of(seen, transform, number), images.permute(0, 2, 3, 1).numpy())


def test_samples_of_any_split_are_shown_next_to_their_sources(image_tree: Path, tmp_path: Path, shown: Sheets) -> None:
    src, out = image_tree / "train", tmp_path / "out"
    convert(src, out, size=16, val=0.4)
    for split in ("train", "val"):
        called("view", out, "--split", split, "--count", "20", "--against", src)
        ((_, captions, _),) = shown
        assert len(captions) // 2 == len(open_shards(out, split))
        assert all(text.startswith("source\n") for text in captions[1::2])
        shown.clear()
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
