"""Measures how long it takes to list an archive of as many images as ImageNet has, and how much memory that takes.

This writes a tar of class tars to a temporary folder (1.3 GB with the default numbers, as each image is one byte and
its header), lists it as `shardio convert` does, and prints one JSON object. Headers come from the page cache: on a cold
disk, every image costs a read besides.
"""

import argparse
import json
import os
import resource
import tarfile
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from shardio.conversion.sources.imagenet import TRAIN_NAME, list_ilsvrc
from shardio.conversion.sources.tar import BLOCK_NBYTES

_END = bytes(2 * BLOCK_NBYTES)


def header(name: str, nbytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = nbytes
    return info.tobuf(tarfile.GNU_FORMAT)


def write_archive(file: BinaryIO, num_images: int, num_classes: int) -> None:
    body = b"x".ljust(BLOCK_NBYTES, b"\0")
    for label in range(num_classes):
        count = num_images * (label + 1) // num_classes - num_images * label // num_classes
        wnid = f"n{label:08d}"
        file.write(header(f"{wnid}.tar", 2 * BLOCK_NBYTES * count + len(_END)))
        for i in range(count):
            file.write(header(f"{wnid}_{i}.JPEG", 1) + body)
        file.write(_END)
    file.write(_END)


def resident_nbytes() -> int:
    """Returns the memory of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="Where to put the archive.  [default: the system's]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        with open(Path(folder, TRAIN_NAME), "wb") as file:
            write_archive(file, arguments.images, arguments.classes)
        nbytes = os.path.getsize(Path(folder, TRAIN_NAME))
        before, start = resident_nbytes(), time.perf_counter()
        collection = list_ilsvrc(Path(folder)).collect("folders")
        seconds, after = time.perf_counter() - start, resident_nbytes()
    assert collection.num_sources == arguments.images
    assert len(collection.classes) == arguments.classes
    facts = {
        "num_images": collection.num_sources,
        "archive_nbytes": nbytes,
        "seconds": round(seconds, 2),
        "microseconds_per_image": round(seconds / arguments.images * 1e6, 2),
        "resident_nbytes_per_image": round((after - before) / arguments.images),
        "peak_resident_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
