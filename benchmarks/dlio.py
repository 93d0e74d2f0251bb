"""DLIO, the benchmark behind MLPerf Storage: how many emulated accelerators one machine feeds.

    python benchmarks/dlio.py --accelerators 1,8,16,20

Each accelerator is a process of MPI that takes 400 images of 224 x 224 x 3 and then sleeps for 0.224 s, as an H100
would train a ResNet-50 (DLIO's workload resnet50_h100). Its utilization is the share of the time in which it need not
wait; MLPerf asks for 0.90. An epoch has 1,281,024 images at most, as in the workload. They are those of a set of
`--samples`, read as often as that takes, since few machines have memory for 193 GB. `--step-seconds 0.112` stands for
an accelerator that is twice as fast: DLIO has no such workload for a B200.

`--workload retinanet_b200` has the numbers of MLPerf Storage's workload of that name: 24 samples of 323 kB, here 328 x
328 x 3, in each 0.04755 s; it asks for 0.85. There a sample is a JPEG of its own file, which DLIO does not decode.

With `--cold` no sample is in the page cache when a run begins, and each is read once an epoch: `--samples` must be as
many as all accelerators take in `--steps`. With `--memory GB`, none is there either, and all processes and what they
keep in the page cache are in a cgroup of so much, for which it takes root. MLPerf asks for a set of five times that.

`--loader dlio` gives the same accelerators a reader of DLIO's own instead, `indexed_binary` under torch's DataLoader
with a worker process for each, from files of as many bytes that DLIO has written. It writes its table of all samples
into a line for its log, which is off, before it reads each one: with 16,000 that is what takes the time. `--loader
idle` hands out one batch again and again: the utilization that is missing then is the benchmark's own cost on this
machine.

DLIO is installed under build/peers/dlio, with its own torch. Two packages that it imports are stood in for by modules
that do nothing: TensorFlow, which this workload does not use under PyTorch, and dftracer, which traces.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from common import cgroup, describe_machine, generated_set, leave_the_page_cache, spread
from peers import BUILD, ROOT, Unavailable, environment


class Workload(NamedTuple):
    side: int
    batch_size: int
    step_seconds: float
    samples: int


# 1,024 files of 1,251 images in the first; here as many images in as many files as the set has shards.
WORKLOADS = {
    "resnet50_h100": Workload(224, 400, 0.224, 1024 * 1251),
    "retinanet_b200": Workload(328, 24, 0.04755, 1_170_301),
}
FOLDER = BUILD / "dlio"
STAND_INS = {
    "tensorflow.py": "",
    "dftracer/__init__.py": "",
    "dftracer/logger.py": '''"""Marks functions, loops and blocks, and does nothing."""

DFTRACER_ENABLE = False


class dft_fn:
    def __init__(self, *args, **kwargs):
        pass

    def log(self, function):
        return function

    log_init = log_static = log

    def iter(self, values, *args, **kwargs):
        return values

    def update(self, *args, **kwargs):
        pass

    flush = reset = __exit__ = update

    def __enter__(self):
        return self


class dftracer:
    @staticmethod
    def initialize_log(*args, **kwargs):
        return None
''',
}
CLASSES = {"shardio": "ShardDataLoader", "idle": "IdleDataLoader"}


def installed() -> Path:
    """Returns the folder of DLIO's programs."""
    programs, stand_ins = environment("dlio").parent, FOLDER / "stand-ins"
    for name, text in STAND_INS.items():
        (stand_ins / name).parent.mkdir(parents=True, exist_ok=True)
        (stand_ins / name).write_text(text)
    return programs


def data(loader: str, workload: Workload, samples: int) -> tuple[Path, int]:
    """Returns the folder that DLIO is given, and the number of its files."""
    folder = FOLDER / "data" / loader
    (folder / "valid").mkdir(parents=True, exist_ok=True)
    if loader != "dlio":
        made = generated_set(samples, workload.side, 512 << 20)
        (folder / "train").unlink(missing_ok=True)
        (folder / "train").symlink_to(made)
        return folder, len(list(made.glob("train-0*.npy")))
    files = samples // 1000
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        words = ["++workload.workflow.generate_data=True", "++workload.workflow.train=False"]
        subprocess.run(
            command(1, folder, files, 1000, loader, workload, 1, *words),
            env=variables(),
            check=True,
            capture_output=True,
        )
        (folder / "made").touch()
    return folder, files


def variables() -> dict[str, str]:
    paths = [FOLDER / "stand-ins", ROOT, ROOT / "benchmarks", next(FOLDER.glob("lib/python*/site-packages"))]
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "DFTRACER_ENABLE": "0"}


def command(
    accelerators: int,
    folder: Path,
    files: int,
    samples_per_file: int,
    loader: str,
    workload: Workload,
    epochs: int,
    *more: str,
) -> list[str]:
    programs = installed()
    words = {
        "framework": "pytorch",
        "reader.data_loader": "pytorch",
        "reader.read_threads": 1,
        "reader.prefetch_size": 2,
        "reader.batch_size": workload.batch_size,
        "dataset.data_folder": folder,
        "dataset.num_files_train": files,
        "dataset.num_samples_per_file": samples_per_file,
        "dataset.record_length": workload.side * workload.side * 3,
        "dataset.record_length_stdev": 0,
        "train.epochs": epochs,
        "output.folder": FOLDER / "out",
    }
    if loader == "dlio":
        words |= {"dataset.format": "indexed_binary", "reader.data_loader_sampler": "index"}
    else:
        words |= {"dataset.format": "npy", "reader.data_loader_sampler": "iterative"}
        words |= {"reader.data_loader_classname": f"dlio_plugin.{CLASSES[loader]}"}
    return [
        *(str(programs / "mpiexec"), "-n", str(accelerators), str(programs / "dlio_benchmark")),
        *("workload=resnet50_h100", f"hydra.run.dir={FOLDER / 'out'}"),
        *(f"++workload.{name}={value}" for name, value in words.items()),
        *more,
    ]


def utilizations(output: str) -> list[float]:
    """Returns the accelerators' utilization in each epoch, from 0 to 1, out of what DLIO prints."""
    found = re.findall(r"Epoch (\d+) - Block 1 \[Training\] Accelerator Utilization \[AU\] \(%\): ([\d.]+)", output)
    return [float(percent) / 100 for _, percent in sorted(found, key=lambda pair: int(pair[0]))]


def run(accelerators: int, options: argparse.Namespace) -> tuple[list[float], float]:
    """Returns the utilization in each epoch, and the share of the processor's time that was used."""
    loader, workload = options.loader, WORKLOADS[options.workload]
    folder, files = data(loader, workload, options.samples)
    count = min(workload.samples, accelerators * workload.batch_size * options.steps)
    if options.cold and count > options.samples:
        raise Unavailable(f"{accelerators} accelerators take {count:,} samples: give --samples {count}")
    if options.cold or options.memory:  # what is in the page cache already is not charged to a cgroup
        leave_the_page_cache(folder / "train")
    per_file = 1000 if loader == "dlio" else count // files
    words = [f"++workload.train.computation_time={options.step_seconds or workload.step_seconds}"]
    if loader == "dlio":
        steps = min(options.steps, options.samples // (accelerators * workload.batch_size))
        words.append(f"++workload.train.total_training_steps={steps}")
    with limited(options.memory) as into:
        before, start = os.times(), time.perf_counter()
        ended = subprocess.run(
            command(accelerators, folder, files, per_file, loader, workload, options.epochs, *words),
            env=variables(),
            capture_output=True,
            text=True,
            cwd=FOLDER,
            preexec_fn=None if into is None else lambda: into.write_text(str(os.getpid())) and None,
        )
    passed, after = time.perf_counter() - start, os.times()
    if ended.returncode:
        raise Unavailable((ended.stderr or ended.stdout).strip().splitlines()[-1])
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return utilizations(ended.stdout + ended.stderr), used / passed / (os.cpu_count() or 1)


@contextmanager
def limited(memory: float | None) -> Iterator[Path | None]:
    """Yields the file that takes processes into a cgroup of so many GB; None without a limit."""
    if memory is None:
        yield None
    else:
        with cgroup(int(memory * 1e9)) as procs:
            yield procs


def lines(options: argparse.Namespace) -> Iterator[str]:
    yield "| accelerators | images/s needed | utilization, first epoch | the others | cores busy |"
    yield "|---|---|---|---|---|"
    workload = WORKLOADS[options.workload]
    rate = workload.batch_size / (options.step_seconds or workload.step_seconds)
    for accelerators in options.accelerators:
        found, busy = run(accelerators, options)
        later = found[1:] or found
        yield (f"| {accelerators} | {accelerators * rate:,.0f} | {found[0]:.3f} | {spread(later, 3)} | {busy:.0%} |")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerators", type=numbers, default=[1, 8, 16, 20], metavar="N,N,...")
    parser.add_argument("--loader", choices=["shardio", "dlio", "idle"], default="shardio")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="resnet50_h100")
    parser.add_argument("--samples", type=int, default=16_000, help="of the set: 2.4 GB")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160, help="of an epoch at most")
    parser.add_argument("--step-seconds", type=float, help="of an accelerator; the workload's if not given")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--memory", type=float, metavar="GB")
    options = parser.parse_args()
    try:
        print(describe_machine())
        for line in lines(options):
            print(line, flush=True)
    except Unavailable as error:
        sys.exit(f"DLIO cannot be had, or does not work here: {error}")


if __name__ == "__main__":
    main()
