"""Arrays without pictures as sources: trees of NPY files, NPY and NPZ files, and datasets of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import called
from conversions import rejects_of
from folders import contents, flip, put
from numpy.typing import NDArray
from pictures import random_picture, write_jpeg
from storages import npy_bytes, scan

from shardio.conversion.convert import convert
from shardio.conversion.repair import repair
from shardio.errors import ConvertError, DecodeError, SourceError, SpaceError
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

COUNT = 40
LATENTS = np.random.default_rng(0).normal(size=(COUNT, 2, 3, 4)).astype(np.float16)
TOKENS = np.random.default_rng(1).integers(0, 50_000, (COUNT, 5)).astype(np.int32)
LABELS = np.arange(COUNT) % 3
SOFT = np.random.default_rng(2).random((COUNT, 3))
SHARD_NBYTES = 4096 + 10 * LATENTS[0].nbytes
"""For ten samples in a shard."""


def npz(path: Path, save: Callable[..., None] = np.savez, **arrays: Any) -> Path:
    save(path, latent=LATENTS, token=TOKENS, **arrays)
    return path


def npy(path: Path, array: NDArray[Any] = LATENTS) -> Path:
    np.save(path, array)
    return path


def tree(root: Path, names: str = "train/{label}/{number}.npy") -> Path:
    for number, latent in enumerate(LATENTS):
        put(root, names.format(label="abc"[LABELS[number]], number=number), content=npy_bytes(latent))
    return root


@pytest.mark.parametrize(
    ("items", "names", "label"),
    [
        (list(LATENTS), ["array"], None),
        (LATENTS, ["array"], None),
        ([{"latent": a, "token": b} for a, b in zip(LATENTS, TOKENS, strict=True)], ["latent", "token"], None),
        ([{"latent": a, "label": i % 3} for i, a in enumerate(LATENTS)], ["latent"], int),
        ([{"latent": a, "label": i / 3} for i, a in enumerate(LATENTS)], ["latent"], float),
        ([{"latent": a, "label": s} for a, s in zip(LATENTS, SOFT, strict=True)], ["latent"], np.ndarray),
    ],
)
def test_datasets_of_arrays_become_sets(items: Any, names: list[str], label: type | None, tmp_path: Path) -> None:
    report = convert({"train": items[:30], "val": items[30:]}, tmp_path / "out", shard_size=SHARD_NBYTES)
    assert report.num_samples == {"train": 30, "val": 10}
    assert report.unlabeled == (() if label else ("train", "val"))
    shards = open_shards(tmp_path / "out", "val")
    for sample, key in zip(shards, shards.index["key"].tolist(), strict=True):
        number = 30 + int(key.removeprefix(b"val/"))
        assert sorted(sample.arrays) == names
        np.testing.assert_array_equal(sample.arrays[names[0]], LATENTS[number])
        assert sample.label is None if label is None else isinstance(sample.label, label)
    assert convert({"train": items[:30], "val": items[30:]}, tmp_path / "out", shard_size=SHARD_NBYTES).digest


@pytest.mark.parametrize(
    ("items", "options", "error", "match"),
    [
        ([np.zeros((8, 8, 5), np.uint8)], {}, TypeError, "item 0: expected a PIL image"),
        ([{"img": np.zeros((8, 8), np.uint8)}], {}, ValueError, "arrays={'img': "),
        (
            [{"img": np.zeros((8, 8), np.uint8)}],
            {"arrays": {"clip": ("array", "<f4", (2,))}},
            TypeError,
            "the key image, found img",
        ),
        ([{"clip": np.zeros(2)}], {"arrays": {"clip": ("mask", "<f4", (256, 256))}}, ValueError, "'clip': .* kind"),
        ([{"clip": np.array(["a"])}], {}, ValueError, "item 0: .*type must be one of"),
        ([{"label": 1}], {}, TypeError, "the key image, found label"),
        ([{"a": np.zeros(2), "label": 1, "labels": np.zeros(2)}], {}, ValueError, "'label' and 'labels'"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(3)}], {}, ValueError, r"item 1: array 'a': expected shape \(2,\)"),
        ([{"a": np.zeros(2)}, {"b": np.zeros(2)}], {}, TypeError, "item 1: .* keys a, found .* keys b"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(2), "c": np.zeros(2)}], {}, TypeError, "item 1: .*found 'c'"),
        ([np.zeros(2), np.zeros(2, np.int8)], {}, TypeError, "item 1: array 'array': expected float64, found int8"),
        ([{"a": np.zeros(2), "label": -1}], {}, ValueError, "expected a label from 0"),
        ([np.zeros(2)], {"size": 32}, ValueError, "size: .*SRC has only arrays"),
    ],
)
def test_datasets_that_are_no_arrays_are_refused(
    items: Any, options: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        convert(items, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_dataset_may_use_its_memory_again_for_the_next_array(tmp_path: Path) -> None:
    class Reusing:
        memory = np.empty_like(LATENTS[0])

        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> NDArray[np.float16]:
            self.memory[:] = LATENTS[index]
            return self.memory

    convert(Reusing(), tmp_path / "out", order="source")
    np.testing.assert_array_equal([sample.arrays["array"] for sample in open_shards(tmp_path / "out")], LATENTS)


def test_a_picture_that_is_declared_an_array_is_stored_as_it_is(tmp_path: Path) -> None:
    items = [{"plan": np.full((8, 8), i, np.uint8)} for i in range(9)]
    convert(items, tmp_path / "out", arrays={"plan": ("array", "uint8", (8, 8))}, order="source")
    assert [sample.arrays["plan"][0, 0] for sample in open_shards(tmp_path / "out")] == list(range(9))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "order"), [(">f4", "C"), ("<f4", "F"), ("|b1", "F"), (">i8", "F"), ("<u2", "C")])
def test_a_tree_takes_every_byte_order_and_layout(dtype: str, order: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2, (6, 3, 4)).astype(dtype)
    for number, value in enumerate(values):
        put(tmp_path / "src", f"{number}.npy", content=npy_bytes(np.asarray(value, order=order)))
    found = scan(tmp_path / "src")
    read = [found.origin.read(source).arrays["array"] for source in found.splits["train"]]  # type: ignore[union-attr]
    np.testing.assert_array_equal(read, values)
    assert read[0].dtype == np.dtype(dtype).newbyteorder("<")


def test_an_npy_file_of_big_endian_numbers_is_stored_little_endian(tmp_path: Path) -> None:
    convert(npy(tmp_path / "a.npy", np.arange(9, dtype=">i4")), tmp_path / "out", order="source")
    assert [int(sample.arrays["array"]) for sample in open_shards(tmp_path / "out")] == list(range(9))


def test_labels_that_are_no_classes_need_no_names(tmp_path: Path) -> None:
    labels = np.array([-5, 1 << 40], np.int64)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), label=labels)
    convert(tmp_path / "a.npz", tmp_path / "out", order="source")
    shards = open_shards(tmp_path / "out")
    assert (shards.classes, shards.labels.tolist()) == ((), labels.tolist())


def test_images_next_to_arrays_are_what_is_converted(tmp_path: Path) -> None:
    src = tree(tmp_path / "src")
    write_jpeg(src / "train" / "a" / "picture.jpg", random_picture(np.random.default_rng(0), 20, 20))
    write_jpeg(src / "train" / "b" / "picture.jpg", random_picture(np.random.default_rng(0), 20, 20))
    report = convert(src, tmp_path / "out", size=8, empty_classes="omit")
    assert (report.source, report.num_sources, report.ignored) == ("tree", 2, {"not an image": COUNT})
    assert convert(src, tmp_path / "arrays", source="arrays").num_sources == COUNT


def test_a_file_that_claims_billions_of_samples_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (10**12,)})
        file.truncate(file.tell() + 10**12)
    with pytest.raises(SpaceError, match=r"a\.npy: expected .* memory .* 1,000,000,000,000 samples"):
        convert(tmp_path / "a.npy", tmp_path / "out")


HOSTILE_SAMPLES: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", "empty", "an empty file"),
    "truncated": (npy_bytes(LATENTS[0])[:-1], "damaged", "found a file of 175 bytes"),
    "text": (b"hello", "damaged", "without Python objects"),
    "objects": (npy_bytes(np.array([{}, None])), "damaged", "Python objects"),
    "complex numbers": (npy_bytes(np.zeros(3, complex)), "unsupported", "type must be one of"),
    "another type": (npy_bytes(LATENTS[0].astype("<f4")), "unsupported", "shape (2, 3, 4), as in 0.npy"),
    "another shape": (npy_bytes(LATENTS[0][0]), "unsupported", "found <f2 and (3, 4)"),
}


def test_arrays_of_a_tree_that_cannot_be_stored_are_listed(tmp_path: Path) -> None:
    src = tree(tmp_path / "src", "{number}.npy")
    for number, (data, _, _) in enumerate(HOSTILE_SAMPLES.values(), 100):
        (src / f"{number}.npy").write_bytes(data)
    with pytest.raises(ConvertError, match="expected at most 0 refused") as caught:
        convert(src, tmp_path / "out", max_bad=0)
    assert "100.npy: empty" in str(caught.value)
    report = convert(src, tmp_path / "out", max_bad=0.5)
    assert report.num_samples == {"train": COUNT}
    found = {reject.key: (reject.reason, reject.detail) for reject in rejects_of(tmp_path / "out")}
    for number, (_, reason, detail) in enumerate(HOSTILE_SAMPLES.values(), 100):
        assert found[b"%d.npy" % number][0] == reason
        assert detail in found[b"%d.npy" % number][1]


def test_a_bool_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    data = npy_bytes(np.zeros((50, 4), bool))
    (tmp_path / "a.npy").write_bytes(data[:-1] + b"\x07")
    convert(tmp_path / "a.npy", tmp_path / "out", max_bad=1)
    (reject,) = rejects_of(tmp_path / "out")
    assert (reject.key, reject.reason, "found 7" in reject.detail) == (b"49", "damaged", True)


def test_folders_that_are_no_samples_say_what_they_are(tmp_path: Path) -> None:
    convert(npy(tmp_path / "a.npy"), tmp_path / "out")
    with pytest.raises(SourceError, match=r"out: expected arrays, found a shard set.* SRC is a shard set"):
        convert(tmp_path / "out", tmp_path / "again")
    with pytest.raises(SourceError, match=r"a\.npy: .*folder tree"):
        convert(tmp_path / "a.npy", tmp_path / "again", labels="folders")
    with pytest.raises(ValueError, match=r"fit: .*SRC has only arrays"):
        convert(tmp_path / "a.npy", tmp_path / "again", fit="pad")
    with pytest.raises(ValueError, match="for images"):
        convert(tmp_path / "a.npy", tmp_path / "again", masks=tmp_path / "out")
    write_jpeg(tmp_path / "images" / "picture.jpg", random_picture(np.random.default_rng(0), 20, 20))
    with pytest.raises(ValueError, match=r"size must be .* as SRC has images"):
        convert(tmp_path / "images", tmp_path / "again", size=None)
    assert not (tmp_path / "again").exists()


# --- kills, parts and repairs -----------------------------------------------------------------------------------------


def test_rows_and_checksums_tell_files_with_the_same_keys_apart(tmp_path: Path) -> None:
    one, other = scan(npy(tmp_path / "a.npy")), scan(npy(tmp_path / "b.npy", LATENTS[::-1]))
    assert one.identity != other.identity
    assert scan(npz(tmp_path / "a.npz")).identity != scan(npz(tmp_path / "b.npz", more=LABELS)).identity


def test_no_sample_is_read_from_a_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    src = npy(tmp_path / "a.npy")
    found = scan(src)
    (first, *_) = found.splits["train"]
    assert found.origin.read(first).arrays["array"].tolist() == LATENTS[0].tolist()  # type: ignore[union-attr]
    npy(tmp_path / "b.npy", LATENTS[::-1]).replace(src)
    with pytest.raises(DecodeError, match="changed"):
        found.origin.read(first)


def test_labels_of_float_are_said_to_be_no_classes(tmp_path: Path) -> None:
    report = convert(npz(tmp_path / "a.npz", label=LABELS.astype(np.float64)), tmp_path / "out")
    assert report.notes == ("a.npz: labels are float32, 1 number each", "train: 40 samples")


def test_labels_of_a_table_for_one_split_replace_labels_of_float(tmp_path: Path) -> None:
    src, table = npz(tmp_path / "a.npz", label=LABELS.astype(np.float64)), tmp_path / "t.csv"
    for name, text in (("names", "ab"), ("numbers", (0.5, 1.5))):
        table.write_text("path,label\n" + "".join(f"{number},{text[number % 2]}\n" for number in range(40)))
        report = convert(src, tmp_path / name, table={"train": table})
        assert not [note for note in report.notes if note.startswith("a.npz")]
        shards = open_shards(tmp_path / name)
        numbers = [int(key) % 2 for key in shards.index["key"]]
        assert shards.labels.tolist() == [text[one] if name == "numbers" else one for one in numbers]


def test_a_set_of_images_is_not_repaired_from_arrays_nor_the_other_way(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "images" / "0.jpg", random_picture(np.random.default_rng(0), 20, 20))
    convert(tmp_path / "images", tmp_path / "pictures", size=8)
    convert(npy(tmp_path / "a.npy"), tmp_path / "arrays")
    for out, src in (("pictures", "a.npy"), ("arrays", "images")):
        with pytest.raises(ConvertError, match=f"{out}: cannot be made again from"):
            repair(tmp_path / out, tmp_path / src)


# --- training and commands --------------------------------------------------------------------------------------------


@pytest.fixture
def latents(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A set of all arrays, in the order of LATENTS, with labels that are integers unless the test says otherwise."""
    kind = getattr(request, "param", "int")
    labels = {"int": {"label": LABELS}, "vector": {"labels": SOFT}, "none": {}}[kind]
    convert(npz(tmp_path / "src.npz", **labels), tmp_path / "out", shard_size=SHARD_NBYTES, order="source")
    return tmp_path / "out"


def _checked(batch: tuple[Any, ...]) -> list[int]:
    """Checks the values of a batch, and returns the samples."""
    *labels, indices, arrays = batch
    numbers = indices.tolist()
    assert sorted(arrays) == ["latent", "token"]
    np.testing.assert_array_equal(arrays["latent"].numpy(), LATENTS[numbers])
    np.testing.assert_array_equal(arrays["token"].numpy(), TOKENS[numbers])
    for found in labels:
        expected = LABELS if found.ndim == 1 else SOFT.astype(np.float32)
        np.testing.assert_array_equal(found.numpy(), expected[numbers])
    return list(numbers)


@pytest.mark.parametrize(
    ("latents", "io"), [("int", "mmap"), ("vector", "pread"), ("none", "mmap")], indirect=["latents"]
)
def test_a_loader_yields_all_arrays_of_any_reader_rank_and_place(latents: Path, io: Any, tmp_path: Path) -> None:
    """By ranks, resumed, staged, from a cache, and replayed."""

    def make(rank: int = 0, world_size: int = 1, batch_size: int = 8, **more: Any) -> ShardLoader:
        options: dict[str, Any] = {"device": "cpu", "seed": 3, "return_indices": True, "io": io}
        options["check"] = "sample" if io == "mmap" else "off"  # which wraps the reader
        return ShardLoader(latents, batch_size, rank=rank, world_size=world_size, **options, **more)

    with make() as loader:
        batches = list(loader)
        whole = [_checked(batch) for batch in batches]
    assert sorted(number for batch in whole for number in batch) == list(range(8 * len(whole)))
    with make() as loader:
        some = iter(loader)
        assert [_checked(next(some)) for _ in range(2)] == whole[:2]
        state = loader.state_dict()
    ranks = []
    for rank in range(2):
        with make(rank, 2, 4) as loader:
            loader.load_state_dict(state)
            ranks.append([_checked(batch) for batch in loader])
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(batch) for batch in whole[2:]]
    if io == "mmap":
        for _ in range(2):  # while it is staged, and from the copy
            with make(cache=tmp_path / "cache") as loader:
                assert [_checked(batch) for batch in loader] == whole
    options = ["--batch-size=8", "--seed=3", "--step=1", f"--save={tmp_path / 'batch.npz'}"]
    called("replay", latents, *options)
    with np.load(tmp_path / "batch.npz") as batch:
        assert batch["indices"].tolist() == whole[1]
        np.testing.assert_array_equal(batch["latent"], batches[1][-1]["latent"].numpy())


def test_a_copy_of_a_compressed_array_that_rots_is_made_again_by_a_call_that_resumes(tmp_path: Path) -> None:
    src, out = npz(tmp_path / "src.npz", np.savez_compressed), tmp_path / "out"
    for part in (1, 2):
        convert(src, out, shard_size=SHARD_NBYTES, order="source", part=(part, 2))
        for copy in out.glob(".convert/*.rows"):
            flip(copy)
    convert(src, tmp_path / "undisturbed", shard_size=SHARD_NBYTES, order="source")
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_commands_speak_of_samples(latents: Path, tmp_path: Path) -> None:
    src = tmp_path / "src.npz"
    output = called("convert", src, tmp_path / "again")
    assert f"converted {COUNT} samples" in output
    assert f"next: shardio info {tmp_path / 'again'}" in output
    assert "images" not in output
    assert f"npz, {COUNT} samples" in called("plan", src, "--seconds", "0.01")
    assert f"`shardio convert`: source, seed 0, {COUNT} samples" in called("info", latents)
    assert "intact, 0 files repaired" in called("repair", latents, src)
    page = tmp_path / "page.html"
    assert "0 pictures read" in called("report", latents, "-o", page)
    assert "Their arrays:" in page.read_text()
    assert "Resizing" not in page.read_text()


@pytest.mark.parametrize("latents", ["vector"], indirect=True)
def test_bench_measures_arrays(latents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.measure.limits.BLOCK_NBYTES", 1 << 20)  # the first touch of the usual block is slow
    output = called("bench", latents, "--rounds", "1", "--seconds", "0.01", "--threads", "1")
    nbytes = LATENTS[0].nbytes + TOKENS[0].nbytes + SOFT[0].astype(np.float32).nbytes
    assert f"{COUNT} samples of {nbytes} bytes of arrays" in output
    assert "np.take into slots" in output
    assert "samples/s" in output
