"""The cost of feeding a ResNet-50 in training: steps on batches of the loader beside the same steps on one batch.

The model is trained in bfloat16 and channels_last with SGD; images are normalized on the device, with --transform by
the loader's transform, which also makes the crops. Both ways take turns.
The first steps of each turn do not count, nor does the first round, which compiles and tries algorithms. A step's time
is by the device's clock, from the end of the step before it to its own. The loss is that of the mean, which shows a
batch that comes late now and then; a median would hide it. The aim is a loss below 1%.

On a CPU (--device cpu, and small sizes), in float32, this shows only that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

import torch
from common import describe_gpu, describe_machine, generated_set

from shardio.augment import Compose, HorizontalFlip, Normalize, RandomCrop, RandomResizedCrop, ToDtype, Transform
from shardio.loading.loader import ShardLoader

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "imagenet"))
from resnet import resnet50

Batch = tuple[torch.Tensor, ...]
WAYS = ("one batch", "loader")
# Statistics of ImageNet, in units of a pixel.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


def make_step(device: torch.device, compiled: bool) -> Callable[[Batch], None]:
    model = resnet50().to(device, memory_format=torch.channels_last)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))

    def step(batch: Batch) -> None:
        images, labels = batch
        if images.dtype == torch.uint8:
            images = (images.float() - mean) / std
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def step_seconds(
    step: Callable[[Batch], None], batches: Iterator[Batch], uncounted: int, count: int, device: torch.device
) -> list[float]:
    """Returns the time of each of `count` steps, after some that do not count."""
    for batch in islice(batches, uncounted):
        step(batch)
    if device.type == "cpu":
        times = [time.perf_counter()]
        for batch in islice(batches, count):
            step(batch)
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for batch, event in zip(islice(batches, count), events[1:], strict=True):
        step(batch)
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]


def endless(loader: ShardLoader) -> Iterator[Batch]:
    while True:
        yield from loader


def trace(step: Callable[[Batch], None], batches: Iterator[Batch], count: int, path: Path) -> None:
    """Writes a trace for chrome://tracing or ui.perfetto.dev, which show gaps between steps."""
    with torch.profiler.profile() as profile:
        for batch in islice(batches, count):
            step(batch)
    profile.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shards", type=Path, nargs="?", help="a set of at most 1000 classes; generated if none is given"
    )
    parser.add_argument("--samples", type=int, default=20_000, help="samples of the generated set, 256 x 256 x 3")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument(
        "--transform",
        action="store_true",
        help="RandomResizedCrop, flip and Normalize to bfloat16, not RandomCrop",
    )
    parser.add_argument("--threads", type=int, help="gather threads")
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="steps per way and round")
    parser.add_argument("--uncounted", type=int, default=10, help="steps before them that do not count")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace of some steps on batches of the loader"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "no CUDA device is here; --device cpu shows that this runs\n")
    machine = describe_machine() + (f"; {describe_gpu(device)}" if device.type == "cuda" else "")
    path = options.shards or generated_set(options.samples, 256)
    torch.backends.cudnn.benchmark = True
    step = make_step(device, options.compile)
    seconds: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    transform: Transform = RandomCrop(options.crop)
    if options.transform:
        crop = [RandomResizedCrop(options.crop), HorizontalFlip(), Normalize("imagenet")]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        transform = Compose([*crop, ToDtype(dtype)])
    with ShardLoader(
        path,
        options.batch_size,
        transform=transform,
        num_threads=options.threads,
        prefetch=options.prefetch,
        device=device,
        rank=0,
        world_size=1,
    ) as loader:
        fed = endless(loader)
        batches: dict[str, Iterator[Batch]] = {"one batch": repeat(next(fed)), "loader": fed}
        for number in range(options.rounds + 1):
            for name in WAYS:
                times = step_seconds(step, batches[name], options.uncounted, options.steps, device)
                if number:
                    seconds[name].append(times)
        if options.trace:
            trace(step, fed, min(10, options.steps), options.trace)
        stats = loader.stats()
    means = {name: [statistics.mean(times) for times in seconds[name]] for name in WAYS}
    losses = [fed / one - 1 for one, fed in zip(*means.values(), strict=True)]
    report = {
        "machine": machine,
        "batch_size": options.batch_size,
        "crop": options.crop,
        "transform": options.transform,
        "compile": options.compile,
        "mean_step_seconds": {name: statistics.median(values) for name, values in means.items()},
        "median_step_seconds": {name: statistics.median(chain.from_iterable(seconds[name])) for name in WAYS},
        "loss": statistics.median(losses),
        "losses": losses,
        "stats": stats,
    }
    if options.json:
        print(json.dumps(report))
        return
    print(machine)
    for name in WAYS:
        mean = report["mean_step_seconds"][name]
        median = report["median_step_seconds"][name]
        print(
            f"{name:<10} {1e3 * mean:>10.3f} ms a step (median step {1e3 * median:.3f}), "
            f"{options.batch_size / mean:>10,.0f} images/s"
        )
    print(
        f"loss       {statistics.median(losses):>10.2%} ({min(losses):.2%} to {max(losses):.2%}), the aim is below 1%"
    )


if __name__ == "__main__":
    main()
