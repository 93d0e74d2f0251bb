#!/usr/bin/env python
"""Changes sets at random, one change after the other, and compares each with a model in plain Python.

    python tools/chaos/change_sets.py [--sequences 1000] [--seed 0] [--folder PATH]

A sequence begins with small sets of one or two splits, all stored as rgb or all as yuv420. It makes new ones of any set
that it has so far, by merge, and change with some of its steps. Each is read back by ShardSet, and by NumPy alone from
its manifest, and must have the samples that the model has: keys, labels, pixels and arrays. A merge of sets that are
stored in two ways must be refused and change nothing. In some calls one call to the disk fails:
the process is killed before or halfway through it, a Ctrl-C arrives, or the disk is full or broken (faulty_disk.py).
Then the new set is whole or absent, and the same call must make it. No file of any set may ever change, and nothing may
be left beside them.

Exit code 1 if anything was otherwise. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import attack
import numpy as np
from attack import Child, Counts, Rounds, Say, hash_files, make_parser, verdict
from fail_convert import KILLED
from faulty_disk import KINDS_OF_WRITES, Fault, FaultyDisk
from numpy.typing import NDArray
from PIL import Image
from plain_yuv420 import plain_picture

import shardio
from shardio.conversion.arrays import ArrayDeclaration
from shardio.conversion.options import Pixels
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ConvertError, ShardioError
from shardio.format.layout import ArrayKind
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

SHAPE = (4, 6, 3)
NBYTES: dict[Pixels, int] = {"rgb": 72, "yuv420": 36}
"""Bytes of a sample, by how it is stored."""
CLASSES = [f"class{i}" for i in range(4)]
# Sets of a sequence; a change makes one more.
LENGTH = 6
PATIENCE_SECONDS = 60
# The disk that loses its power does not follow a folder that is renamed.
KINDS = [kind for kind in KINDS_OF_WRITES if not kind.startswith("power")]

Value = tuple[str, tuple[int, ...], bytes]
"""An array's value of one sample: dtype, shape, bytes."""


@dataclass(frozen=True)
class Row:
    """One sample as the model knows it."""

    key: bytes
    label: str
    pixels: bytes
    arrays: tuple[tuple[str, Value], ...] = ()

    @property
    def year(self) -> int | None:
        """The number in the array of this name; None if the split has no such array."""
        found = dict(self.arrays).get("year")
        return None if found is None else int(np.frombuffer(found[2], found[0])[0])


@dataclass(frozen=True)
class Model:
    """A set as it should be."""

    classes: tuple[str, ...]
    splits: Mapping[str, tuple[Row, ...]]


@dataclass
class ChangeCounts(Counts):
    changes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """Calls that failed, by kind of fault."""
    made_before_the_fault: int = 0
    refused: int = 0
    """Merges of sets that are stored in two ways."""


# --- reading sets back -----------------------------------------------------------------------------------------------


def read_by_shardset(folder: Path) -> Model:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    splits = {}
    for name in manifest["splits"]:
        opened = open_shards(folder, name)
        count = len(opened)
        indices = np.arange(count)
        pixels = np.empty((count, *SHAPE), np.uint8)
        opened.gather(indices, pixels)
        arrays = {}
        for array, entry in opened.content.arrays.items():
            arrays[array] = np.empty((count, *entry.row.shape), entry.row.dtype)
            opened.gather_array(array, indices, arrays[array])
        splits[name] = _rows(opened.index, opened.classes, pixels, arrays)
    return Model(tuple(manifest["classes"]), splits)


def read_by_numpy(folder: Path) -> Model:
    """Reads a set as docs/format.md says, without shardio."""
    manifest = json.loads((folder / "manifest.json").read_bytes())

    def stored(entry: Mapping[str, Any], orders: list[NDArray[np.int64]]) -> NDArray[Any]:
        rows = np.concatenate([np.load(folder / shard["file"]) for shard in entry["shards"]])
        return rows[orders[entry["order"]]] if "order" in entry else rows

    splits = {}
    for name, split in manifest["splits"].items():
        orders = [np.load(folder / order["file"]) for order in split.get("orders", ())]
        arrays = {array: stored(entry, orders) for array, entry in split.get("arrays", {}).items()}
        index = np.load(folder / split["index"]["file"])
        pixels = stored(split, orders)
        if manifest.get("pixels") == "yuv420":
            pixels = np.stack([plain_picture(row) for row in pixels])
        splits[name] = _rows(index, manifest["classes"], pixels, arrays)
    return Model(tuple(manifest["classes"]), splits)


def _rows(
    index: NDArray[np.void], classes: Any, pixels: NDArray[np.uint8], arrays: Mapping[str, NDArray[Any]]
) -> tuple[Row, ...]:
    return tuple(
        Row(
            bytes(row["key"]),
            classes[row["label"]],
            pixels[i].tobytes(),
            tuple(sorted((name, _value(values[i])) for name, values in arrays.items())),
        )
        for i, row in enumerate(index)
    )


def _value(value: NDArray[Any]) -> Value:
    return (np.asarray(value).dtype.str, np.shape(value), np.asarray(value).tobytes())


def different(folder: Path, model: Model) -> str:
    """Returns what is wrong with the set in `folder`; "" if it is as the model says."""
    for how, read in (("ShardSet", read_by_shardset), ("NumPy", read_by_numpy)):
        found = read(folder)
        if found.classes != model.classes:
            return f"{how}: classes {found.classes}, not {model.classes}"
        if found.splits != dict(model.splits):
            counts = {name: (len(found.splits.get(name, ())), len(rows)) for name, rows in model.splits.items()}
            return f"{how}: other samples; numbers found and expected: {counts}"
    problems = verify(folder, workers=1).problems
    return problems[0].detail if problems else ""


# --- changes ---------------------------------------------------------------------------------------------------------


@dataclass
class Change:
    """A call that makes a set, and what it should make."""

    name: str
    call: Callable[[Path], object]
    model: Model


class Drawer:
    """Draws changes of sets: the call, and the model of the set that it should make."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names = 0

    def draw(self, sets: list[tuple[Path, Model]]) -> Change:
        return self._rng.choice([*[self.change] * 5, self.merge])(sets)

    def change(self, sets: list[tuple[Path, Model]]) -> Change:
        """Draws one step of `change`, or several in their order."""
        folder, model = self._rng.choice(sets)
        split = self._rng.choice(sorted(model.splits))
        samples = self._rng.choice([self._indices, self._condition])
        steps = [samples, self._labels, self._arrays]
        drawn = [step for step in steps if self._rng.random() < 0.4] or [self._rng.choice(steps)]
        options: dict[str, Any] = {"split": split}
        for step in drawn:
            model = step(model, split, options)
        if "classes" not in options and self._rng.random() < 0.2:
            options["classes"] = "used"
            there = {row.label for part in model.splits.values() for row in part}
            model = replace(model, classes=tuple(name for name in model.classes if name in there))
        name = "+".join(sorted(options.keys() - {"split", "kinds", "array_keys"}))
        return Change(name, lambda new: shardio.change(folder, new, **options), model)

    def _condition(self, model: Model, split: str, options: dict[str, Any]) -> Model:
        rows = model.splits[split]
        row = self._rng.choice(rows)
        some = {self._rng.choice(rows).key for _ in range(self._rng.randint(1, 12))}
        choices: list[tuple[dict[str, Any], Callable[[Row], bool]]] = [
            ({"classes": row.label}, lambda one: one.label == row.label),
            ({"classes": [row.label, model.classes[0]]}, lambda one: one.label in (row.label, model.classes[0])),
            ({"where": f"label != {model.classes.index(row.label)}"}, lambda one: one.label != row.label),
            ({"keys": os.fsdecode(row.key[:-1]) + "*"}, lambda one: one.key.startswith(row.key[:-1])),
            ({"listed": sorted(some)}, lambda one: one.key in some),
        ]
        if (year := row.year) is not None:
            choices.append(({"where": f"year >= {year}"}, lambda one: one.year is not None and one.year >= year))
        conditions, matches = self._rng.choice(choices)
        kept = {drop: tuple(row for row in rows if matches(row) != drop) for drop in (False, True)}
        if not any(kept.values()):
            return self._indices(model, split, options)
        drop = self._rng.choice([drop for drop, part in kept.items() if part])
        options["drop" if drop else "keep"] = shardio.Selection(**conditions)
        return replace(model, splits={**model.splits, split: kept[drop]})

    def _indices(self, model: Model, split: str, options: dict[str, Any]) -> Model:
        rows = model.splits[split]
        count = self._rng.randint(1, min(2 * len(rows), 60))
        indices = [self._rng.randrange(len(rows)) for _ in range(count)]
        if self._rng.random() < 0.5:
            indices = sorted(set(indices))
        options["keep"] = shardio.Selection(indices=indices)
        return replace(model, splits={**model.splits, split: tuple(rows[i] for i in indices)})

    def _labels(self, model: Model, split: str, options: dict[str, Any]) -> Model:
        rows = model.splits[split]
        pictures: dict[bytes, set[bytes]] = {}
        for row in rows:
            pictures.setdefault(row.key, set()).add(row.pixels)
        known = [key for key, some in pictures.items() if len(some) == 1]  # others are refused
        if not known:
            return model if options.keys() - {"split"} else self._indices(model, split, options)
        keys = {self._rng.choice(known) for _ in range(self._rng.randint(1, 8))}
        self._names += 1
        choices = [*model.classes, f"new{self._names}"]
        labels = {key: self._rng.choice(choices) for key in keys}
        options.update(labels=labels, classes="new")
        made = tuple(replace(row, label=labels.get(row.key, row.label)) for row in rows)
        more = sorted(set(labels.values()) - set(model.classes))
        return Model((*model.classes, *more), {**model.splits, split: made})

    def _arrays(self, model: Model, split: str, options: dict[str, Any]) -> Model:
        rows = model.splits[split]
        self._names += 1
        name = f"a{self._names}"
        numpy_rng = np.random.default_rng(self._rng.getrandbits(32))
        choices: list[tuple[ArrayKind, NDArray[Any]]] = [
            ("array", numpy_rng.standard_normal((len(rows), 3)).astype("<f2")),
            ("array", numpy_rng.integers(0, 100, len(rows))),
            ("mask", numpy_rng.integers(0, 200, (len(rows), *SHAPE[:2])).astype(np.uint16)),
        ]
        kind, values = self._rng.choice(choices)
        made = tuple(
            replace(row, arrays=tuple(sorted((*row.arrays, (name, _value(values[i])))))) for i, row in enumerate(rows)
        )
        given: Any = values
        if len({row.key for row in rows}) == len(rows) and self._rng.random() < 0.5:
            shuffled = numpy_rng.permutation(len(rows))
            given, options["array_keys"] = values[shuffled], [rows[i].key for i in shuffled]
        elif self._rng.random() < 0.3:
            # As a list: the call may be made again.
            given = [values[start : start + 5] for start in range(0, len(values), 5)]
        options.update(arrays={name: given}, kinds={name: kind})
        return replace(model, splits={**model.splits, split: made})

    def merge(self, sets: list[tuple[Path, Model]]) -> Change:
        chosen = [self._rng.choice(sets) for _ in range(self._rng.randint(1, 3))]
        return Change(
            "merge",
            lambda new: shardio.merge(
                [folder for folder, _ in chosen], new, only_common=True, same_keys="allow", same_images="keep"
            ),
            merged([model for _, model in chosen]),
        )


def merged(models: list[Model]) -> Model:
    classes = tuple(dict.fromkeys(name for model in models for name in model.classes))
    splits: dict[str, tuple[Row, ...]] = {}
    for name in dict.fromkeys(name for model in models for name in model.splits):
        parts = [model.splits[name] for model in models if name in model.splits]
        kinds = [{(array, value[:2]) for array, value in part[0].arrays} for part in parts]
        common = set.intersection(*kinds)
        splits[name] = tuple(
            Row(
                row.key,
                row.label,
                row.pixels,
                tuple((array, value) for array, value in row.arrays if (array, value[:2]) in common),
            )
            for part in parts
            for row in part
        )
    return Model(classes, splits)


# --- the attack ------------------------------------------------------------------------------------------------------


def call_apart(call: Callable[[], object], folder: Path, read_only: Path, fault: Fault | None) -> tuple[int, str]:
    """Calls in a child, while the disk of `folder` has a fault. Returns how many calls to the disk there were, and what
    became of it other than an error, if anything."""

    def work(tell: attack.Tell) -> None:
        disk = FaultyDisk(folder, read_only, fault, lambda: tell({"calls": 0, "aborted": ""}))
        disk.install()
        aborted = ""
        try:
            call()
        except (ShardioError, OSError, KeyboardInterrupt):
            pass
        except BaseException:
            aborted = traceback.format_exc()
        tell({"calls": len(disk.calls), "aborted": aborted})

    told, code = Child(work, PATIENCE_SECONDS).finish()
    if not told or code not in (0, KILLED):
        return 0, f"exit code {code}"
    return told[-1]["calls"], told[-1]["aborted"]


class Items(list[dict[str, Any]]):
    """The items of a split, as a dataset."""

    classes = CLASSES


class ChangeRounds(Rounds[ChangeCounts]):
    def __init__(self, folder: Path, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, ChangeCounts())
        self._converted = {pixels: folder / f"converted-{pixels}" for pixels in NBYTES}
        rng = np.random.default_rng(self._random.getrandbits(32))
        for i in range(6):
            path = folder / "images" / f"class{i % 5}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
        for pixels, converted in self._converted.items():
            self._convert(folder / "images", converted, pixels, 4)

    def _convert(self, src: Any, out: Path, pixels: Pixels, most: int, **options: Any) -> None:
        shard_size = 4096 + most * NBYTES[pixels]
        shardio.convert(src, out, size=SHAPE[:2], pixels=pixels, workers=1, shard_size=shard_size, **options)

    def _write_set(self, folder: Path, seed: int, pixels: Pixels) -> Model:
        rng = np.random.default_rng(seed)
        most = int(rng.integers(2, 12))
        arrays: dict[str, ArrayDeclaration] = {"year": ("array", "int64", ())} if rng.random() < 0.7 else {}
        splits = {split: Items() for split in ("train", "val")[: int(rng.integers(1, 3))]}
        for items in splits.values():
            for _ in range(int(rng.integers(1, 40))):
                numbers = {name: int(rng.integers(1990, 2030)) for name in arrays}
                image, label = rng.integers(0, 256, SHAPE, dtype=np.uint8), int(rng.integers(0, 4))
                items.append({"image": image, "label": label, **numbers})
        if pixels == "yuv420":
            self._convert(splits, folder, pixels, most, arrays=arrays)
            return read_by_numpy(folder)
        nbytes = 4096 + most * NBYTES[pixels]
        with ShardWriter(folder, SHAPE, classes=CLASSES, arrays=arrays, shard_nbytes=nbytes) as writer:
            for split, items in splits.items():
                for i, item in enumerate(items):
                    writer.append(split=split, key=f"{seed % 1000}/{i:02d}.png", **item)
        return read_by_numpy(folder)

    def run(self, sequences: int) -> ChangeCounts:
        for _ in range(sequences):
            self.counts.rounds += 1
            root = self.folder / "sequence"
            root.mkdir()
            try:
                self._sequence(root)
            except Exception as error:
                self._violation(f"{type(error).__name__}: {error}")
            shutil.rmtree(root)
        return self.counts

    def _sequence(self, root: Path) -> None:
        pixels, other = self._random.sample(list(NBYTES), 2)
        shutil.copytree(self._converted[pixels], root / "0")
        sets = [(root / "0", read_by_numpy(root / "0"))]
        for number in range(1, 3):
            sets.append((root / str(number), self._write_set(root / str(number), self._random.getrandbits(32), pixels)))
        drawer = Drawer(self._random)
        for number in range(3, 3 + LENGTH):
            before = hash_files(root)
            change, new = drawer.draw(sets), root / str(number)
            if self._random.random() < 0.1:
                self._merge_both([self._random.choice(sets)[0], self._converted[other]], new)
            self.counts.changes[change.name] += 1
            if self._random.random() < 0.2:
                self._fail(change, new, before)
            try:
                if not new.exists():
                    change.call(new)
            except ShardioError as error:
                self._violation(f"{change.name}: {error}")
            after = hash_files(root)
            if changed := [name for name in before if after.get(name) != before[name]]:
                self._violation(f"{change.name}: changed {changed}")
            if left := [name for name in after if name not in before and name.split("/")[0] != new.name]:
                self._violation(f"{change.name}: left {left}")
            if wrong := different(new, change.model):
                self._violation(f"{change.name}: {wrong}")
            sets.append((new, change.model))

    def _merge_both(self, folders: list[Path], new: Path) -> None:
        """Merges sets that are stored in two ways, which must be refused and change nothing."""
        before, told = hash_files(self.folder), "not refused"
        self._random.shuffle(folders)
        try:
            shardio.merge(folders, new, only_common=True, same_keys="allow", same_images="keep")
        except ShardioError as error:
            told = str(error)
        self.counts.refused += 1
        if "--pixels" not in told or hash_files(self.folder) != before:
            self._violation(f"merge of both kinds: {told}, changed {hash_files(self.folder) != before}")
            shutil.rmtree(new, ignore_errors=True)

    def _fail(self, change: Change, new: Path, before: Mapping[str, str]) -> None:
        count, aborted = call_apart(lambda: change.call(new), new.parent, self.folder, None)
        shutil.rmtree(new, ignore_errors=True)
        kind = self._random.choice(KINDS)
        self.counts.faults[kind] += 1
        fault = Fault(self._random.randint(1, count), kind, self._random.getrandbits(32))
        _, aborted = call_apart(lambda: change.call(new), new.parent, self.folder, fault)
        if aborted:
            self._violation(f"{change.name}, {fault}: {aborted}")
        after = hash_files(new.parent)
        if changed := [name for name in before if after.get(name) != before[name]]:
            self._violation(f"{change.name}, {fault}: changed {changed}")
        if new.exists():
            self.counts.made_before_the_fault += 1
            if wrong := different(new, change.model):
                self._violation(f"{change.name}, {fault}: not whole: {wrong}")
            with contextlib.suppress(ConvertError):  # as it is there; but converted images may be left
                change.call(new)
            # What a failed call leaves beside the set goes with the next one into this folder.
            shardio.change(new, new.with_name("next"), keep=shardio.Selection(random=1.0))
            shutil.rmtree(new.with_name("next"))


def change_sets(folder: Path, sequences: int, seed: int, say: Say = print) -> ChangeCounts:
    attack.never_sync()
    return ChangeRounds(folder, seed, say).run(sequences)


def main() -> int:
    parser = make_parser(__doc__, "the changes")
    parser.add_argument("--sequences", type=int, default=1000, help="default %(default)s")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return verdict(change_sets(options.folder, options.sequences, options.seed))
    with tempfile.TemporaryDirectory() as folder:
        return verdict(change_sets(Path(folder), options.sequences, options.seed))


if __name__ == "__main__":
    sys.exit(main())
