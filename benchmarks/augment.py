"""Augmentation beside other libraries: RandomResizedCrop(224) and a flip of half of the samples of 256 x 256 x 3.

On the CPU, on one core, in turn, and all from decoded pixels in memory. The results are batches of uint8, or normalized
ones of float32:

shardio         shardio.augment, on batches in memory as the loader has them.
Pillow          crop, resize and transpose of one PIL image after the other, as torchvision does with these; and
                stacked.
torchvision     transforms.v2 on uint8 tensors, one by one, contiguous and in channels_last memory, and on PIL images;
                and stacked. In the environment of --torchvision-python.
Kornia          batches, which become float32 and uint8 again. In the environment of --kornia-python.
Albumentations  arrays, one by one, and stacked. In the environment of --albumentations-python.
FFCV            its loader with one worker, from a file of raw pixels. In the environment of --ffcv-python.

All draw boxes from the same distribution. Then the same with a third transform, uint8 to uint8, for each of the CHAINS
of augment_peer.py, in turn with shardio's crop and flip alone; what a library lacks is left out. Then the ShardLoader,
with and without the transform, with one and two gather threads.

With --device cuda instead: the loader with and without the transform, beside bare pinned copies of the stored samples.
Its gather threads crop, resize and flip on the CPU; the GPU normalizes and casts.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from augment_peer import CHAINS, LACKS
from classic import as_tensor, augmented, normalized
from common import describe_gpu, describe_machine, generated_set, in_turn, print_ratios
from PIL import Image

import shardio.augment
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop, ToDtype, recipe
from shardio.augment.batch import Batch
from shardio.augment.chain import Transform
from shardio.loading.loader import ShardLoader
from shardio.measure.limits import pinned_copies
from shardio.reading.shardset import ShardSet, open_shards

Way = Callable[[], int]
PEER = Path(__file__).with_name("augment_peer.py")
UNIT = "images/s"


def transforms(size: int) -> dict[str, Transform]:
    """The ways, by the dtype of their results."""
    crop = [RandomResizedCrop(size), HorizontalFlip()]
    return {"uint8": Compose(crop), "float32": Compose([*crop, Normalize("imagenet")])}


def chains(size: int) -> dict[str, Transform]:
    """Returns the chains whose results are uint8 and which do more than to crop and to flip."""
    crop = [RandomResizedCrop(size), HorizontalFlip()]
    return {name: Compose([*crop, getattr(shardio.augment, name)(**arguments)]) for name, arguments in CHAINS.items()}


def device_transforms(size: int) -> dict[str, Transform]:
    crop = [RandomResizedCrop(size), HorizontalFlip()]
    return {"uint8": Compose(crop), "bfloat16": Compose([*crop, Normalize("imagenet"), ToDtype(torch.bfloat16)])}


class Peer:
    """A library in an environment of its own, which augments the samples once for each line that it is sent."""

    def __init__(self, python: str, library: str, *arguments: object) -> None:
        command = [python, str(PEER), library, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.version, *self.ways = self._answer().split("|")
        except BaseException:
            self.close()
            raise

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer or answer.startswith("!"):
            raise PeerError(answer[1:] or "its process ended without a word")
        return answer

    def augment(self, way: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(way + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        try:
            self._process.communicate(timeout=20)  # it ends when its standard input does
        except subprocess.TimeoutExpired:  # FFCV 1.0.2 may wait for its own threads for ever
            self._process.kill()
            self._process.communicate()


class PeerError(Exception):
    """A library that is not there, or does not work."""


@contextmanager
def one_core() -> Iterator[None]:
    """Binds this process and those that it starts to one core: a library may have threads that it does not tell of."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def way_of_shardio(transform: Transform, images: torch.Tensor, batch_size: int) -> Way:
    epochs = count()

    def augment() -> int:
        epoch = next(epochs)
        for first in range(0, len(images), batch_size):
            some = images[first : first + batch_size]
            transform(some, indices=first + np.arange(len(some)), epoch=epoch)
        return len(images)

    return augment


def without_equal_views(way: Way) -> Way:
    """Makes Views compute each view alone, also those that are equal."""

    def augment() -> int:
        with mock.patch.object(Batch, "is_plain", False):
            return way()

    return augment


def way_of_pillow(
    finish: Callable[[torch.Tensor], torch.Tensor], images: list[Image.Image], batch_size: int, size: int
) -> Way:
    rng = np.random.default_rng(0)

    def augment() -> int:
        for first in range(0, len(images), batch_size):
            some = images[first : first + batch_size]
            torch.stack([finish(as_tensor(augmented(image, size, rng))) for image in some])
        return len(images)

    return augment


def measure_libraries(shards: ShardSet, options: argparse.Namespace) -> None:
    first_shard = shards.path / shards.manifest.splits[shards.split].shards[0].file
    samples = np.array(np.load(first_shard, mmap_mode="r")[: options.samples])
    tensors = torch.from_numpy(samples).permute(0, 3, 1, 2)
    pictures = [Image.fromarray(sample) for sample in samples]
    finishes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"uint8": lambda x: x, "float32": normalized}
    ways: dict[str, dict[str, Way]] = {
        output: {
            "shardio": way_of_shardio(transform, tensors, options.batch_size),
            "Pillow": way_of_pillow(finishes[output], pictures, options.batch_size, options.size),
        }
        for output, transform in transforms(options.size).items()
    }
    for name, transform in chains(options.size).items():
        ways[name] = {
            "shardio": way_of_shardio(transform, tensors, options.batch_size),
            "shardio, crop and flip alone": ways["uint8"]["shardio"],
        }
    with one_core(), ExitStack() as stack:
        for library in LACKS:
            python = getattr(options, f"{library}_python")
            try:
                peer = Peer(python, library, first_shard, len(samples), options.batch_size, options.size)
            except (OSError, PeerError) as error:
                print(f"{library}: not measured: {error}")
                continue
            stack.callback(peer.close)
            for name, reason in LACKS[library].items():
                print(f"{name}: {library} {peer.version}: not measured: {reason}")
            for way in peer.ways:
                table, _, layout = way.partition(", ")
                name = ", ".join(filter(None, [f"{library} {peer.version}", layout]))
                ways[table][name] = partial(peer.augment, way)
        for table, some in ways.items():
            in_turn(some, 1)
            rates = in_turn(some, options.rounds)
            print_ratios({f"{table}: {name}": values for name, values in rates.items()}, f"{table}: shardio", UNIT)


def measure_recipes(shards: ShardSet, options: argparse.Namespace) -> None:
    """Prints the rates of recipes on one core, and those of the same steps of torchvision."""
    first_shard = shards.path / shards.manifest.splits[shards.split].shards[0].file
    samples = np.array(np.load(first_shard, mmap_mode="r")[: options.samples])
    images = torch.from_numpy(samples).permute(0, 3, 1, 2)
    with one_core():
        try:
            peer = Peer(options.torchvision_python, "recipes", first_shard, len(samples), options.batch_size, 0)
        except (OSError, PeerError) as error:
            print(f"torchvision: not measured: {error}")
            return
        with closing(peer):
            for name in peer.ways:
                transform = recipe(name)
                if transform.mixes:  # the peer does not mix
                    transform = Compose(transform.transforms[:-1])  # type: ignore[attr-defined]
                ways = {
                    "shardio": way_of_shardio(transform, images, options.batch_size),
                    f"torchvision {peer.version}": partial(peer.augment, name),
                }
                if transform.has_views:
                    ways["shardio, each view alone"] = without_equal_views(ways["shardio"])
                in_turn(ways, 1)
                rates = in_turn(ways, options.rounds)
                print_ratios({f"{name}: {way}": values for way, values in rates.items()}, f"{name}: shardio", UNIT)


def measure_loader(path: Path, options: argparse.Namespace) -> None:
    def read(loader: ShardLoader) -> int:
        return sum(len(labels) for _, labels in loader)

    with ExitStack() as stack:

        def opened(transform: Transform | None, threads: int) -> ShardLoader:
            loader = ShardLoader(
                path,
                options.batch_size,
                transform=transform,
                num_threads=threads,
                tail="short",
                device="cpu",
                rank=0,
                world_size=1,
            )
            return stack.enter_context(loader)

        bare = "ShardLoader, no transform, 1 gather thread"
        ways = {bare: partial(read, opened(None, 1))}
        for output, transform in transforms(options.size).items():
            for threads, words in ((1, "1 gather thread"), (2, "2 gather threads")):
                ways[f"ShardLoader, {output}, {words}"] = partial(read, opened(transform, threads))
        in_turn(ways, 1)
        print_ratios(in_turn(ways, options.rounds), bare, UNIT)


def measure_device_loader(path: Path, shards: ShardSet, options: argparse.Namespace, device: torch.device) -> None:
    bare = "bare pinned copies"
    with ExitStack() as stack:
        ways: dict[str, Iterator[int]] = {
            bare: pinned_copies(device, options.batch_size, math.prod(shards.sample_shape))
        }
        for output, transform in {"no transform": None, **device_transforms(options.size)}.items():
            loader = ShardLoader(path, options.batch_size, transform=transform, device=device, rank=0, world_size=1)
            ways[f"ShardLoader, {output}"] = from_the_loader(stack.enter_context(loader), options.batches)
        steps: dict[str, Way] = {name: partial(next, way) for name, way in ways.items()}
        in_turn(steps, 1)
        print_ratios(in_turn(steps, options.rounds), bare, UNIT)


def from_the_loader(loader: ShardLoader, batches: int) -> Iterator[int]:
    """Yields images: the sizes of so many batches together, once the device has them."""
    sizes = (len(labels) for _ in count() for _, labels in loader)
    while True:
        images = sum(islice(sizes, batches))
        torch.cuda.synchronize(loader.device)
        yield images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, nargs="?", help="a set; generated if none is given")
    parser.add_argument(
        "--samples", type=int, help="samples to augment in a round (2048), or of the set for a GPU (20000)"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="side of the result (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument(
        "--batches", type=int, default=50, help="the loader's batches in a round, on a GPU (%(default)s)"
    )
    parser.add_argument("--recipes", action="store_true", help="measure recipe(name) for each name next to torchvision")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    for library in LACKS:
        help_text = f"Python of an environment that has {library}; by default the one that runs this"
        parser.add_argument(f"--{library}-python", metavar="PATH", default=sys.executable, help=help_text)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "no CUDA device is here; without --device, the CPU is measured\n")
    # The loader's epochs on a GPU are long: the change from one to the next is not what is measured.
    options.samples = options.samples or (20_000 if options.device == "cuda" else 2048)
    path = options.shards or generated_set(options.samples, 256)
    shards = open_shards(path)
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        print(f"{describe_machine()}; {describe_gpu(device)}")
        measure_device_loader(path, shards, options, device)
    elif options.recipes:
        print(describe_machine())
        measure_recipes(shards, options)
    else:
        print(describe_machine())
        measure_libraries(shards, options)
        measure_loader(path, options)


if __name__ == "__main__":
    main()
