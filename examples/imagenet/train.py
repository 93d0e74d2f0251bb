"""ResNet-50 on ImageNet from a shard set, in one process or in as many as torchrun starts. To be copied and changed.

    shardio convert imagenet/ imagenet-256/ --fit squash
    torchrun --nproc-per-node 8 train.py imagenet-256/ runs/first

The one idea: the loader's place in the order of samples is the only clock. Learning rate, image size and the random
numbers of the augmentation follow from it, so that a checkpoint is that place, the weights and the momenta. The same
command goes on from OUT/checkpoint.pt, in mid-epoch too, as if it had never stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recipe import Recipe, Run, parse
from report import Log, profiler
from resnet import MODELS
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardio import ShardLoader


@dataclass
class Training:
    """The state that a step changes and a checkpoint holds."""

    recipe: Recipe
    model: nn.Module
    average: AveragedModel | None
    optimizer: torch.optim.SGD
    loader: ShardLoader
    steps: int = 0
    """Steps since this start."""

    @classmethod
    def begin(cls, recipe: Recipe, loader: ShardLoader) -> Training:
        # Nothing draws from torch's generators after this: they have no state that is worth keeping.
        torch.manual_seed(recipe.seed)
        model = MODELS[recipe.model](len(loader.shards.classes)).to(loader.device)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        average = None
        if recipe.ema:
            decay = get_ema_multi_avg_fn(recipe.ema)  # type: ignore[no-untyped-call]
            average = AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
        groups: list[dict[str, Any]] = [
            {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [one for one in model.parameters() if one.ndim <= 1]},
        ]
        optimizer = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=True)
        return cls(recipe, model, average, optimizer, loader)

    @property
    def autocast(self) -> torch.autocast:
        device = self.loader.device
        return torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.dtype(device) is torch.bfloat16)

    @property
    def epoch(self) -> int:
        return int(self.loader.state_dict()["epoch"])

    @property
    def images_seen(self) -> int:
        """Counts the images of all processes and all epochs. Those that an epoch leaves out at its end count, too."""
        state = self.loader.state_dict()
        return int(state["epoch"] * len(self.loader.shards) + state["consumed"])

    def step(self, forward: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Does one step and returns its loss. `forward` is the model, or what averages its gradients over ranks."""
        progress = self.images_seen / len(self.loader.shards)
        rate = self.recipe.learning_rate(progress, len(images) * self.loader.world.world_size)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast:
            loss = cross_entropy(forward(images), labels, label_smoothing=self.recipe.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.average:
            self.average.update_parameters(self.model)
        return loss.detach()

    def save(self, path: Path) -> None:
        """Saves on rank 0, whole or not at all: a process that is killed meanwhile leaves the previous checkpoint."""
        if self.loader.world.rank != 0:
            return
        state = {
            "recipe": asdict(self.recipe),
            "loader": self.loader.state_dict(),
            "model": self.model.state_dict(),
            "average": self.average and self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        recipe = asdict(self.recipe)
        if changed := [f"{name} {was!r}" for name, was in state["recipe"].items() if recipe.get(name) != was]:
            raise SystemExit(f"{path} was made with {', '.join(changed)}: go on with that, or choose another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        if self.average:
            self.average.load_state_dict(state["average"])


def sum_of_ranks(values: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class Meter:
    """Measures the steps since it was last read: mean loss, rate, and the share of the time spent on waiting."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader
        self._begin()

    def _begin(self) -> None:
        self._losses, self._steps, self._images = torch.zeros((), device=self._loader.device), 0, 0
        self._waited, self._start = self._loader.stats()["wait_seconds"], time.perf_counter()

    def add(self, loss: torch.Tensor, count: int) -> None:
        self._losses += loss
        self._steps += 1
        self._images += count

    def read(self) -> dict[str, float]:
        world_size = self._loader.world.world_size
        loss = sum_of_ranks(self._losses / self._steps).item() / world_size
        seconds = time.perf_counter() - self._start
        values = {
            "loss": loss,
            "images_per_second": self._images * world_size / seconds,
            "waiting": (self._loader.stats()["wait_seconds"] - self._waited) / seconds,
        }
        self._begin()
        return values


def train_epoch(
    training: Training,
    forward: nn.Module,
    run: Run,
    log: Log,
    stop: threading.Event,
    profile: torch.profiler.profile | None,
) -> bool:
    """Trains on the rest of the epoch. Returns False if a signal or --stop-after has ended it, after a checkpoint."""
    loader = training.loader
    forward.train()
    meter = Meter(loader)
    batches = iter(loader)
    for images, labels in batches:
        meter.add(training.step(forward, images, labels), len(images))
        training.steps += 1
        if profile:
            profile.step()
        last, leave = not len(batches), training.steps == run.stop_after
        if last or leave or training.steps % run.log_steps == 0:
            rate = training.optimizer.param_groups[0]["lr"]
            log.write(training.images_seen, **meter.read(), lr=rate, size=images.shape[-1])
            # Signals reach the ranks at different moments, but all leave after the same step.
            if sum_of_ranks(torch.tensor(int(stop.is_set()), device=loader.device)).item():
                stop.set()
                leave = True
        # After the last step, the epoch's evaluation is still to come: a start from there begins with it.
        if last or leave or training.steps % run.checkpoint_steps == 0:
            training.save(run.out / "checkpoint.pt")
        if leave:
            return False
    return True


@torch.inference_mode()
def evaluate(model: nn.Module, loader: ShardLoader, autocast: torch.autocast) -> dict[str, float]:
    """Evaluates each sample of the split exactly once, whatever the number of ranks."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=loader.device)
    for images, labels in loader:
        if not len(labels):  # the rest was not enough for all ranks
            continue
        with autocast:
            scores = model(images).float()
        right = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]
        loss = cross_entropy(scores, labels, reduction="sum")
        sums += torch.stack([right[:, 0].sum(), right.sum(), loss, torch.tensor(len(labels), device=loss.device)])
    top1, top5, loss, count = sum_of_ranks(sums).tolist()
    return {"top1": top1 / count, "top5": top5 / count, "eval_loss": loss / count, "eval_images": count}


def take_buffers_of_rank_0(model: nn.Module) -> None:
    """Copies the BatchNorm statistics of rank 0 to all ranks: they are in the checkpoint, and are evaluated."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def join_ranks() -> torch.device:
    """Returns this process's device. Under torchrun, the process joins the others."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not torch.cuda.is_available():
        if several:
            dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    if several:
        dist.init_process_group("nccl", device_id=device)
    return device


def train(recipe: Recipe, run: Run, device: torch.device, stop: threading.Event) -> bool:
    """Trains and evaluates. Returns False if it was stopped before its end."""
    dtype = recipe.dtype(device)
    run.out.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"batch_size": run.batch_size, "device": device, "cache": run.cache or None}
    with (
        ShardLoader(run.shards, **options, seed=recipe.seed) as loader,
        ShardLoader(
            run.shards, **options, split="val", shuffle=False, tail="short", transform=recipe.eval_transform(dtype)
        ) as val,
    ):
        world = loader.world
        if world.world_size > 1 and not dist.is_initialized():
            raise SystemExit(f"use torchrun; this is one of {world.world_size} processes of {world.source}")
        training = Training.begin(recipe, loader)
        if (run.out / "checkpoint.pt").exists():
            training.load(run.out / "checkpoint.pt")
        forward = training.model
        if dist.is_initialized():
            # Waits for all ranks: none trains, and saves, before all have loaded.
            forward = DistributedDataParallel(forward, broadcast_buffers=False, gradient_as_bucket_view=True)
        log = Log(run, loader, training.images_seen)
        with profiler(run, world.rank) as profile:
            for epoch in range(training.epoch, recipe.epochs):
                loader.set_epoch(epoch)
                loader.transform = recipe.train_transform(epoch, len(loader.shards.classes), dtype)
                if not train_epoch(training, forward, run, log, stop, profile):
                    return False
                model = training.average or training.model
                take_buffers_of_rank_0(model)
                log.write(training.images_seen, **evaluate(model, val, training.autocast))
    return True


def main() -> int:
    recipe, run = parse(__doc__ or "")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # SLURM sends it before the time is up
        signal.signal(number, lambda *_: stop.set())
    device = join_ranks()
    finished = train(recipe, run, device, stop)
    if dist.is_initialized():
        dist.barrier()  # torchrun ends all processes when one of them fails, and rank 0 may still be saving
        dist.destroy_process_group()
    if finished or not stop.is_set():
        return 0
    print("stopped by a signal: the same command goes on", file=sys.stderr)
    return os.EX_TEMPFAIL


if __name__ == "__main__":
    sys.exit(main())
