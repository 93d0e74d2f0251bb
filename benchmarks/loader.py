"""ShardLoader beside np.take(out=, mode="clip") on generated samples: `shardio bench` on a set made for it."""

from __future__ import annotations

import argparse
import subprocess
import sys

from common import describe_machine, generated_set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--shard-size", type=int, default=1 << 30)
    options, bench_options = parser.parse_known_args()
    print(describe_machine())
    out = generated_set(options.samples, options.size, options.shard_size)
    subprocess.run([sys.executable, "-m", "shardio", "bench", str(out), *bench_options], check=True)


if __name__ == "__main__":
    main()
