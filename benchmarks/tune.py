"""How far the choice of `shardio tune` is from the best combination, which is measured exhaustively in the same run.

Every way that `tune` tries is measured in `--rounds` rounds, all in turn, as `tune` measures a trial, before and after
`tune` runs. The figure is the chosen way's rate over that of the best way: the median of the ratios of all rounds. The
default's is beside it. `--limit` runs all of it in a cgroup with so much memory: a larger set is read from storage
there. It needs root, and cgroups of version 1 or 2 that are mounted.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

from common import cgroup, describe_machine

from shardio.conversion.amounts import parse_nbytes
from shardio.measure.race import best_of, ratio
from shardio.measure.report import Combination
from shardio.measure.tune import Trial, Tuning, tune
from shardio.reading.shardset import open_shards


def exhaustive(trial: Trial, ways: list[Combination], rounds: int, first: int) -> dict[Combination, list[float]]:
    rates: dict[Combination, list[float]] = {way: [] for way in ways}
    rng = random.Random(first)
    for number in range(rounds):
        # What comes before a trial can slow it down or speed it up.
        for place, way in enumerate(rng.sample(ways, len(ways))):
            rates[way].append(trial.measure(way, first + number * len(ways) + place))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path, help="a set, such as benchmarks/loader.py generates")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0, help="for `tune`")
    parser.add_argument("--rounds", type=int, default=12, help="of all ways, half of them before `tune`")
    parser.add_argument("--limit", type=parse_nbytes, help="memory of a cgroup, such as 500MB")
    options = parser.parse_args()
    if options.limit is not None:
        words = [str(options.shards)]
        for name in ("batch_size", "seconds", "rounds"):
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        with cgroup(options.limit) as procs:
            script = f'echo $$ > {procs} && exec "$@"'
            code = subprocess.run(["sh", "-c", script, "sh", sys.executable, sys.argv[0], *words], check=False)
        sys.exit(code.returncode)
    print(describe_machine())
    probe = tune(options.shards, batch_sizes=[options.batch_size], device="cpu", seconds=0.0)
    ways = list(probe.rates)
    trial = Trial(open_shards(options.shards), "train", probe.situation)
    half = max(options.rounds // 2, 1)
    before = exhaustive(trial, ways, half, 10_000)
    result = tune(options.shards, batch_sizes=[options.batch_size], device="cpu", seconds=options.seconds)
    after = exhaustive(trial, ways, half, 20_000)
    tell(result, {way: before[way] + after[way] for way in ways})


def tell(result: Tuning, rates: dict[Combination, list[float]]) -> None:
    best = best_of(rates)
    print(f"{len(rates)} ways, from {result.situation}: {result.reason}")
    for name, way in (("best", best), ("chosen", result.chosen), ("default", result.default)):
        words = f"threads {way.num_threads or 'default'}, prefetch {way.prefetch}, io {way.io}"
        print(f"{name:<8} {words:<44} {ratio(rates[way], rates[best]):.3f} of the best")
    print(result.line)
    for way, some in sorted(rates.items(), key=lambda item: -ratio(item[1], rates[best])):
        tuned = result.rates[way]
        print(
            f"{way.num_threads or 'default':>8} {way.prefetch} {way.io:<8} {ratio(some, rates[best]):.3f} of the best; "
            f"by tune {ratio(tuned, result.rates[best]):.3f} in {len(tuned)} trials"
        )


if __name__ == "__main__":
    main()
