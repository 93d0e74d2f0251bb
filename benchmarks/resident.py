"""A set in the device's memory (`resident="device"`) beside the same set read for each batch, in turn.

The default is CIFAR's size: 50,000 pictures of 32 x 32, batches of 512. A turn is an epoch, or several, in which
nothing is done to the batches: of pictures as they are stored, and of pictures that the usual transform of CIFAR
changes. The set is in the page cache. Each rate is the median of the rounds, its ratio the median of the ratios to
"read" of the same rounds. The seconds that it took to fill the memory are told, and are no part of the rates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from common import describe_gpu, describe_machine, generated_set, in_turn, print_ratios

from shardio import ShardLoader
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomCrop


def run(loader: ShardLoader, epochs: int) -> int:
    images = 0
    for _ in range(epochs):
        for _, labels in loader:
            images += len(labels)
    if loader.device.type == "cuda":
        torch.cuda.synchronize(loader.device)
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=32, help="pixels  [default: %(default)s]")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--device", help="cpu or cuda  [default: cuda where there is one]")
    parser.add_argument("--epochs", type=int, default=1, help="per turn")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    path = generated_set(options.samples, options.size)
    print(describe_machine())
    transform = Compose([RandomCrop(options.size, padding=options.size // 8), HorizontalFlip(), Normalize("imagenet")])
    for name, function in {"as stored": None, "RandomCrop, flip, normalize": transform}.items():
        with ExitStack() as stack:
            make = partial(ShardLoader, path, options.batch_size, device=options.device, transform=function)
            loaders = {"read": stack.enter_context(make()), "resident": stack.enter_context(make(resident="device"))}
            resident = loaders["resident"]
            if resident.device.type == "cuda":
                print(describe_gpu(resident.device))
            start = time.perf_counter()
            next(iter(resident))
            nbytes = resident.stats()["resident_nbytes"]
            print(f"{name}, on {resident.device}: {nbytes / 1e6:,.0f} MB in {time.perf_counter() - start:.2f} s")
            ways: dict[str, Callable[[], int]] = {
                way: partial(run, loader, options.epochs) for way, loader in loaders.items()
            }
            in_turn(ways, 1)  # touches pages and slots, and compiles
            print_ratios(in_turn(ways, options.rounds), "read", "images/s")


if __name__ == "__main__":
    main()
