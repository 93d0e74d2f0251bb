"""What it takes to look at a set as large as ImageNet: seconds, memory and bytes of the page of `shardio report`.

The set has ImageNet's counts, keys, labels and sizes of images, and small pictures. So the index is as large as that,
and what is read of pixels is not: for that, give the folder of a real set.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import BUILD, describe_machine, measured, spread
from tqdm import tqdm

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.format.layout import MANIFEST_NAME

# What reads the index alone.
QUERIES = [
    ("info",),
    ("find", "--class", "n01440764"),
    ("find", "--key", "*_10026*"),
    ("find", "--where", "source_width >= 500"),
    ("find", "--json"),
]


def labeled_set(num_samples: int = 1_281_167, size: int = 16, num_classes: int = 1000) -> Path:
    """Returns a set of `size` x `size` x 3 with classes, keys and original sizes as ImageNet has them. One sample in
    10,000 has the picture of the one before. It is written once, in about a minute, and then found."""
    out = BUILD / f"labeled-{num_samples}-{size}-{num_classes}"
    if (out / MANIFEST_NAME).exists():
        return out
    rng = np.random.default_rng(0)
    # As in ImageNet: most classes have 1300 samples, and some down to 732.
    weights = np.minimum(rng.normal(1400, 150, num_classes).clip(732), 1300)
    labels = rng.permutation(np.repeat(np.arange(num_classes), rng.multinomial(num_samples, weights / weights.sum())))
    heights = (375 * 2 ** rng.normal(0, 0.35, num_samples)).astype(int).clip(20, 5000)
    widths = (heights * rng.choice([0.75, 1, 4 / 3, 1.5], num_samples, p=[0.15, 0.1, 0.6, 0.15])).astype(int)
    classes = [f"n{1440764 + 1009 * number:08d}" for number in range(num_classes)]
    picture = np.zeros((size, size, 3), np.uint8)
    with ShardWriter(out, picture.shape, classes=classes, shard_nbytes=1 << 28) as writer:
        for i in tqdm(range(num_samples), desc="generating", disable=None):
            if i % 10_000:
                picture = np.kron(
                    rng.integers(0, 256, (4, 4, 3), np.uint8), np.ones((size // 4, size // 4, 1), np.uint8)
                )
            name = classes[labels[i]]
            source_size = (int(heights[i]), int(widths[i]))
            writer.append(picture, int(labels[i]), key=f"train/{name}/{name}_{i}.JPEG", source_size=source_size)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", nargs="?", type=Path, help="a set; by default one is generated")
    parser.add_argument("--samples", type=int, default=1_281_167, help="of the generated set")
    parser.add_argument("--size", type=int, default=16, help="of its pictures, in pixels, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    options = parser.parse_args()
    print(describe_machine())
    out = options.set or labeled_set(options.samples, options.size)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        page = Path(folder) / "report.html"
        for command, *words in (("report", "-o", "report.html"), *QUERIES):
            paths = [str(Path(folder) / word) if word.startswith("report.") else word for word in words]
            call = [sys.executable, "-m", "shardio", command, str(out), *paths]
            seconds, megabytes = zip(*(measured(call) for _ in range(options.rounds)), strict=True)
            print(f"shardio {command} {' '.join(words)}: {spread(seconds, 2)} s, {spread(megabytes, 0)} MB of memory")
        print(f"the report has {page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
