"""ShardLoader beside np.take(out=, mode="clip") on generated samples: `shardio bench` on a set made for it."""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np
from common import BUILD, describe_machine
from tqdm import tqdm

from shardio.format import MANIFEST_NAME
from shardio.setwriter import ShardWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--shard-size", type=int, default=1 << 30)
    options, bench_options = parser.parse_known_args()
    print(describe_machine())
    out = BUILD / f"generated-{options.samples}-{options.size}-{options.shard_size}"
    if not (out / MANIFEST_NAME).exists():
        rng = np.random.default_rng(0)
        shape = (options.size, options.size, 3)
        with ShardWriter(out, shape, shard_nbytes=options.shard_size) as writer:
            for i in tqdm(range(options.samples), desc="generating", disable=None):
                writer.append(rng.integers(0, 256, shape, dtype=np.uint8), i % 1000)
    subprocess.run([sys.executable, "-m", "shardio", "bench", str(out), *bench_options], check=True)


if __name__ == "__main__":
    main()
