"""The whole life of a set of ImageNet's size: converted, shared, trained on, damaged, repaired, changed, merged.

    sudo python benchmarks/rehearsal.py FOLDER [--images IMAGES] [--samples 1331167] [--until PART]

1,281,167 images of train and 50,000 of val in 1,000 classes, each with a name of its own, are links to 2,000 drawn
JPEGs and those in IMAGES. At 64 x 64 the set takes 16.4 GB, its copy as much, and the set of 128 x 128 in yuv420, at
the end, 32.7 GB. The conversion is killed twice, and its disk becomes full once, which needs root: the set is on a
filesystem of its own, in a file. Four ranks train, are killed, and go on as three.

Every row of every set is compared with the row of its picture in a small set made of the pictures alone, and every
global batch with the order of a single rank.

Each part leaves its row in FOLDER/rehearsal.json, and a run goes on after the parts that are there. Rows of one run
have one number. Memory is the most that the processes of a part had of their own at once, without mapped files, seen
once per second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from common import describe_machine
from numpy.typing import NDArray

from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop
from shardio.format.manifest_file import load_manifest
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import ShardSet, open_shards

SAMPLES = 1_331_167
CLASSES, PICTURES = 1000, 2000
GLOBAL_BATCH = 768
KILLED_AT = (0.2, 0.45)  # shares of the set
FULL_AT = 0.65
SHARDIO = str(Path(sys.executable).with_name("shardio"))
TOOLS = Path(__file__).resolve().parents[1] / "tools"


def sizes(samples: int) -> dict[str, list[int]]:
    """Returns the number of images in each class of each split: in train 895 classes of 1,300 and 105 of fewer, about
    as in ImageNet."""
    val = samples * 50_000 // SAMPLES // CLASSES
    most = samples * 1300 // SAMPLES
    rest = samples - val * CLASSES - 895 * most
    small = [rest * (i + 1) // 105 - rest * i // 105 for i in range(105)]
    return {"train": [most] * 895 + small, "val": [val] * CLASSES}


def picture_of(name: bytes, count: int) -> int:
    return zlib.crc32(name) % count


def make_tree(here: Path, samples: int, images: Path | None) -> None:
    drawn, pictures = here / "drawn", here / "pictures"
    subprocess.run([sys.executable, TOOLS / "draw_images.py", drawn, "--images", str(PICTURES)], check=True)
    found = [path for folder in filter(None, (drawn, images)) for path in sorted(folder.rglob("*.JPEG"))]
    pictures.mkdir()
    for number, path in enumerate(found):
        shutil.copyfile(path, pictures / f"{number:05}.JPEG")
    ids = np.sort(np.random.default_rng(0).choice(15_000_000, CLASSES, replace=False))
    numbers = iter(range(1, samples))
    for split, counts in sizes(samples).items():
        for wnid, count in zip(ids.tolist(), counts, strict=True):
            folder = here / "tree" / split / f"n{wnid:08}"
            folder.mkdir(parents=True)
            for i in range(count):
                name = f"{folder.name}_{i}.JPEG" if split == "train" else f"ILSVRC2012_val_{next(numbers):08}.JPEG"
                os.link(pictures / f"{picture_of(name.encode(), len(found)):05}.JPEG", folder / name)


# --- processes --------------------------------------------------------------------------------------------------------


def private_nbytes(pid: int) -> int:
    """Returns the memory that a process and all below it have of their own."""
    total = 0
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Dirty", "Swap:")))
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(private_nbytes, map(int, (task / "children").read_text().split())))
    return total


class Part:
    """What one part of the rehearsal took: seconds and memory of its processes, and what was checked."""

    def __init__(self) -> None:
        self.seconds, self.memory, self.nbytes = 0.0, 0, 0
        self.checked: list[str] = []
        self.errors = ""

    def run(self, *commands: Sequence[object], until: Callable[[], bool] = lambda: False, code: int = 0) -> str:
        """Runs commands at the same time, and kills them once `until()`. Returns the last one's output; its errors are
        in `errors`."""
        start = time.perf_counter()
        running = [
            subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for words in commands
        ]
        killed = False
        while any(process.poll() is None for process in running):
            self.memory = max(self.memory, sum(private_nbytes(process.pid) for process in running))
            if not killed and until():
                killed = True
                for process in running:
                    process.kill()
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(0.2 if killed else 1)
        self.seconds += time.perf_counter() - start
        output = ""
        for process in running:
            output, self.errors = process.communicate()
            if process.returncode != (-signal.SIGKILL if killed else code):
                raise SystemExit(
                    f"{process.args}: expected exit code {code}, found {process.returncode}:\n{self.errors}"
                )
        return output

    def check(self, what: str, good: bool) -> None:
        if not good:
            raise SystemExit(f"not true: {what}")
        self.checked.append(what)


def used_nbytes(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            found += path.stat().st_blocks * 512
    return found


def written_nbytes(out: Path) -> int:
    """Returns the bytes of a set's files that no other set shares."""
    return sum(path.stat().st_size for path in out.iterdir() if path.stat().st_nlink == 1)


# --- what is compared -------------------------------------------------------------------------------------------------


def file_names(shards: ShardSet, numbers: NDArray[np.int64]) -> list[bytes]:
    return [key.rpartition(b"/")[2] for key in shards.column_of("key", numbers).tolist()]


def crc32s(shards: ShardSet) -> dict[bytes, int]:
    """Returns the checksum of each sample's row, by the name of its file."""
    found: dict[bytes, int] = {}
    for start in range(0, len(shards), 2048):
        numbers = np.arange(start, min(start + 2048, len(shards)))
        rows = shards.rows_of(numbers)
        found.update(zip(file_names(shards, numbers), map(zlib.crc32, rows.reshape(len(rows), -1)), strict=True))
    return found


def check_rows(part: Part, here: Path, out: Path, samples: int, *options: object) -> None:
    """Compares every sample of a set, as stored, with its picture, converted alone, and its label with its folder."""
    words = [SHARDIO, "convert", here / "pictures", here / "alone", "--labels", "none", *map(str, options)]
    subprocess.run(words, check=True, capture_output=True)
    alone = crc32s(open_shards(here / "alone"))
    shutil.rmtree(here / "alone")
    rows = [alone[b"%05d.JPEG" % number] for number in range(len(alone))]
    total = 0
    for split in load_manifest(out).splits:
        shards = open_shards(out, split=split)
        found = crc32s(shards)
        wrong = sum(crc != rows[picture_of(name, len(rows))] for name, crc in found.items())
        keys = shards.column_of("key", np.arange(len(shards))).tolist()
        labels = (shards.classes[label].encode() for label in shards.labels.tolist())
        wrong += sum(key.split(b"/")[-2] != label for key, label in zip(keys, labels, strict=True))
        total += len(found)
        if wrong:
            raise SystemExit(f"{out}: {split}: {wrong:,} samples are not as their pictures")
    part.check(f"all {total:,} rows and labels", total == samples)


# --- training ---------------------------------------------------------------------------------------------------------


def train(cache: Path, source: str, rank: int, world_size: int, epochs: list[int]) -> None:
    """One rank. Writes down the samples of each batch before it asks for the next one, and rank 0 also its place. Goes
    on from the place in kept.json, which no rank changes."""
    place, kept = cache / "place.json", cache / "kept.json"
    transform = Compose([RandomResizedCrop(56), HorizontalFlip(), Normalize("imagenet")])
    with ShardLoader(
        source, GLOBAL_BATCH // world_size, rank=rank, world_size=world_size, cache=cache / "copies", device="cpu",
        num_threads=1, transform=transform, return_indices=True,
    ) as loader:  # fmt: skip
        if kept.exists():
            loader.load_state_dict(json.loads(kept.read_text()))
        for epoch in epochs:
            loader.set_epoch(epoch)
            with open(cache / f"{world_size}-{rank}-{epoch}.log", "ab", buffering=0) as log:
                for step, (_, _, indices) in enumerate(loader):
                    log.write(indices.numpy().tobytes())
                    if rank == 0 and step % 10 == 9:
                        place.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
                        place.with_suffix(".new").replace(place)


def logged(cache: Path, world_size: int, epoch: int) -> NDArray[np.int64]:
    """Returns the samples of each global batch that all ranks had, (batches, GLOBAL_BATCH)."""
    ranks = [np.fromfile(cache / f"{world_size}-{rank}-{epoch}.log", np.int64) for rank in range(world_size)]
    each = GLOBAL_BATCH // world_size
    steps = min(len(samples) // each for samples in ranks)
    return np.concatenate([samples[: steps * each].reshape(steps, each) for samples in ranks], axis=1)


# --- the parts --------------------------------------------------------------------------------------------------------


class Rehearsal:
    def __init__(self, here: Path, samples: int, images: Path | None) -> None:
        self.here, self.samples, self.images = here, samples, images
        self.tree, self.disk, self.cache = here / "tree", here / "disk", here / "cache"
        self.shared = self.disk / "shared" / "imagenet-64"
        self.nbytes = samples * 64 * 64 * 3

    def mount(self) -> None:
        """Gives the sets a filesystem of their own, which may become full."""
        image = self.here / "disk.img"
        self.disk.mkdir(exist_ok=True)
        if os.geteuid() or self.disk.is_mount():
            return
        if not image.exists():
            with open(image, "wb") as file:
                file.truncate(self.nbytes * 3 // 2 + (1 << 30))
            subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, self.disk], check=True)

    def unmount(self) -> None:
        if self.disk.is_mount():
            subprocess.run(["umount", self.disk], check=True)

    def links(self, part: Part) -> None:
        start = time.perf_counter()
        make_tree(self.here, self.samples, self.images)
        part.seconds = time.perf_counter() - start

    def plan(self, part: Part) -> None:
        facts = json.loads(part.run([SHARDIO, "plan", self.tree, "--size", 64, "--json"]))
        part.nbytes = facts["nbytes"]
        good = (facts["num_sources"], facts["num_classes"]) == (self.samples, CLASSES)
        part.check(f"{self.samples:,} images, {CLASSES:,} classes; {facts['seconds']:,.0f} s foreseen", good)

    def convert(self, part: Part) -> None:
        out, ballast = self.disk / "out", self.disk / "ballast"
        words = [SHARDIO, "convert", self.tree, out, "--size", 64, "--shard-size", self.nbytes // 16]
        for share in KILLED_AT:
            part.run(words, until=lambda share=share: used_nbytes(out) > share * self.nbytes)
        part.check("killed twice", True)
        if self.disk.is_mount():

            def fill() -> bool:
                if not ballast.exists() and used_nbytes(out) > FULL_AT * self.nbytes:
                    free = os.statvfs(self.disk)
                    with open(ballast, "wb") as file:
                        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - self.nbytes // 32)
                return False

            part.run(words, until=fill, code=1)
            part.check("one full disk, which the error names", "No space left" in part.errors)
            ballast.unlink()
        part.run(words)
        part.nbytes = load_manifest(out).nbytes
        check_rows(part, self.here, out, self.samples, "--size", 64)

    def verify(self, part: Part) -> None:
        report = json.loads(part.run([SHARDIO, "verify", self.disk / "out", "--json"]))
        part.nbytes = report["nbytes"]
        part.check("intact", report["ok"])

    def publish(self, part: Part) -> None:
        self.shared.parent.mkdir(exist_ok=True)
        report = json.loads(part.run([SHARDIO, "publish", self.disk / "out", self.shared, "--move", "--json"]))
        part.check("same digest", load_manifest(self.shared, report["digest"]).digest == report["digest"])

    def stage(self, part: Part) -> None:
        report = json.loads(part.run([SHARDIO, "stage", self.shared, self.cache / "copies", "--json"]))
        part.nbytes = report["nbytes_copied"]
        part.check("copied and compared with sha256", part.nbytes == load_manifest(self.shared).nbytes)

    def train(self, part: Part) -> None:
        for path in chain(self.cache.glob("*.log"), self.cache.glob("*.json")):
            path.unlink()

        def ranks(count: int, *epochs: int) -> list[list[object]]:
            return [[sys.executable, __file__, self.here, "--rank", rank, count, *epochs] for rank in range(count)]

        log = self.cache / "4-0-0.log"
        nbytes = self.samples * 8 // 4 * 0.4
        part.run(*ranks(4, 0), until=lambda: log.exists() and log.stat().st_size > nbytes)
        (self.cache / "place.json").replace(self.cache / "kept.json")
        batches = json.loads((self.cache / "kept.json").read_text())["consumed"] // GLOBAL_BATCH
        part.run(*ranks(3, 0, 1))
        first = np.concatenate([logged(self.cache, 4, 0)[:batches], logged(self.cache, 3, 0)])
        with ShardLoader(self.shared, GLOBAL_BATCH, rank=0, world_size=1, device="cpu") as loader:
            for epoch, found in enumerate((first, logged(self.cache, 3, 1))):
                loader.set_epoch(epoch)
                expected = np.fromiter(loader.sampler, np.int64).reshape(-1, GLOBAL_BATCH)
                good = np.array_equal(found, expected)
                part.check(f"epoch {epoch}: {len(found):,} global batches are those of one rank", good)
        images = 2 * len(first) * GLOBAL_BATCH
        part.checked.append(f"killed after {batches:,} batches; {images / part.seconds:,.0f} images/s")

    def evaluate(self, part: Part) -> None:
        start, seen = time.perf_counter(), []
        for rank in range(3):
            with ShardLoader(
                self.shared, 256, split="val", shuffle=False, tail="short", rank=rank, world_size=3, device="cpu",
                return_indices=True,
            ) as loader:  # fmt: skip
                seen += [indices.numpy().copy() for _, _, indices in loader]
        part.seconds = time.perf_counter() - start
        found = np.sort(np.concatenate(seen))
        part.check(f"each of {len(found):,} once", np.array_equal(found, np.arange(sum(sizes(self.samples)["val"]))))

    def replay(self, part: Part) -> None:
        steps = logged(self.cache, 3, 1)
        each = GLOBAL_BATCH // 3
        for step, rank in ((0, 1), (len(steps) // 2, 2), (len(steps) - 1, 0)):
            place = ["--epoch", 1, "--step", step, "--rank", rank, "--world-size", 3]
            found = json.loads(part.run([SHARDIO, "replay", self.shared, "--batch-size", each, *place, "--json"]))
            part.check(f"step {step:,} of rank {rank}", found["indices"] == steps[step, rank * each :][:each].tolist())

    def repair(self, part: Part) -> None:
        manifest = load_manifest(self.shared)
        numbers = np.random.default_rng(41).choice(manifest.splits["train"].num_samples, 10, replace=False)
        shards = open_shards(self.shared)
        for number in numbers.tolist():
            entry, offset = shards.locate_one("", number)
            with open(self.shared / entry.file, "r+b") as file:
                file.seek(offset)
                value = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([value ^ 1]))
        report = json.loads(part.run([SHARDIO, "verify", self.shared, "--json"], code=1))
        named = sorted(sample for problem in report["problems"] for sample in problem["samples"])
        part.check("`verify` names the ten", named == sorted(numbers.tolist()))
        part.run([SHARDIO, "repair", self.shared, self.tree])
        part.run([SHARDIO, "verify", self.shared, "--digest", manifest.digest])
        part.check("every checksum is right again", True)

    def change(self, part: Part) -> None:
        classes = [word for name in open_shards(self.shared).classes[::2] for word in ("--class", name)]
        for way, name in (("--keep", "even"), ("--drop", "odd")):
            part.run([SHARDIO, "change", self.shared, self.disk / name, way, *classes])
        halves = self.disk / "even", self.disk / "odd"
        part.nbytes = sum(map(written_nbytes, halves))
        count = sum(split.num_samples for out in halves for split in load_manifest(out).splits.values())
        part.check("each sample is in one of the two", count == self.samples)

    def merge(self, part: Part) -> None:
        merged = self.disk / "merged"
        part.run([SHARDIO, "merge", self.disk / "even", self.disk / "odd", merged, "--same-images", "keep"])
        part.nbytes = written_nbytes(merged)
        check_rows(part, self.here, merged, self.samples, "--size", 64)

    def halved(self, part: Part) -> None:
        """Plan and conversion at 128 x 128 in yuv420, in the place of all that the other parts have made."""
        self.unmount()
        for path in (self.disk, self.cache):
            shutil.rmtree(path, ignore_errors=True)
        (self.here / "disk.img").unlink(missing_ok=True)
        options, out = ["--size", 128, "--pixels", "yuv420"], self.here / "halved"
        facts = json.loads(part.run([SHARDIO, "plan", self.tree, *options[:2], "--json"]))
        planned, part.seconds = part.seconds, 0
        part.run([SHARDIO, "convert", self.tree, out, *options])
        part.nbytes = load_manifest(out).nbytes
        nbytes = facts["nbytes_as"]["yuv420"]
        part.check(f"plan: {planned:.0f} s, {nbytes / 1e9:.1f} GB", abs(nbytes / part.nbytes - 1) < 0.01)
        check_rows(part, self.here, out, self.samples, *options)


PARTS = (
    *("links", "plan", "convert", "verify", "publish", "stage", "train", "evaluate", "replay", "repair"),
    *("change", "merge", "halved"),
)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("| part | run | seconds | memory, MB | GB | checked |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        seconds, memory, nbytes = (row[name] for name in ("seconds", "memory", "nbytes"))
        sizes = f"{memory / 1e6:,.0f}" * bool(memory), f"{nbytes / 1e9:,.2f}" * bool(nbytes)
        print(f"| {row['part']} | {row['run']} | {seconds:,.1f} | {' | '.join(sizes)} | {'; '.join(row['checked'])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on a disk with room for three sets of 64 x 64")
    parser.add_argument("--images", type=Path, help="a folder of JPEGs, *.JPEG, beside those that are drawn")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--until", choices=PARTS, default=PARTS[-1], help="the last part of this run (%(default)s)")
    parser.add_argument("--rank", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rehearsal = Rehearsal(options.folder.resolve(), options.samples, options.images)
    if options.rank:
        rank, world_size, *epochs = options.rank
        train(rehearsal.cache, str(rehearsal.shared), rank, world_size, epochs)
        return
    options.folder.mkdir(exist_ok=True)
    table = options.folder / "rehearsal.json"
    rows = json.loads(table.read_text()) if table.exists() else []
    run = rows[-1]["run"] + 1 if rows else 1
    print(f"{describe_machine()}; {options.samples:,} samples")
    for name in PARTS[len(rows) : PARTS.index(options.until) + 1]:
        if name != "halved":
            rehearsal.mount()
        part = Part()
        getattr(rehearsal, name)(part)
        row = {"part": name, "run": run, "seconds": part.seconds, "memory": part.memory}
        rows.append({**row, "nbytes": part.nbytes, "checked": part.checked})
        print_table(rows[-1:])
        table.write_text(json.dumps(rows, indent=1))
    rehearsal.unmount()
    print_table(rows)


if __name__ == "__main__":
    main()
