"""The options: the recipe, which is what the weights depend on, and how to run it.

Here are the schedules and the augmentation, too: pure functions of the recipe and of the place in it.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import MISSING, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardio.augment import (
    CenterCrop,
    Compose,
    CutMix,
    HorizontalFlip,
    Mixup,
    Normalize,
    RandomChoice,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from shardio.augment.chain import Transform


def option(default: Any, text: str, **words: Any) -> Any:
    return field(default=default, metadata={"help": text, **words})


@dataclass(frozen=True)
class Recipe:
    """The options that the weights depend on. A checkpoint holds them, and no run with other ones goes on from it."""

    model: str = option("resnet50", "the network", choices=("resnet50", "small"))
    epochs: int = option(90, "passes over the training split")
    lr: float = option(0.1, "highest learning rate, for a global batch of 256; it grows with the batch")
    warmup_epochs: float = option(5.0, "epochs in which the learning rate grows from 0; then it falls as a cosine does")
    momentum: float = option(0.9, "Nesterov momentum")
    weight_decay: float = option(1e-4, "decay of all weights but biases and those of BatchNorm")
    label_smoothing: float = option(0.1, "share of a label that is spread over all classes")
    mixup: float = option(0.0, "alpha of Mixup; 0: none. With --cutmix, one of them is chosen for each batch")
    cutmix: float = option(0.0, "alpha of CutMix; 0: none")
    ema: float = option(0.0, "decay per step of an average of the weights, which is evaluated instead; 0: none")
    size: int = option(224, "pixels of the training crops")
    first_size: int = option(0, "pixels of the crops of the first epoch, from which they grow; 0: as --size")
    eval_size: int = option(0, "pixels of the crops that are evaluated; 0: as --size")
    min_area: float = option(0.08, "least share of a picture that a training crop shows")
    precision: str = option(
        "auto", "type of the network's arithmetic; auto: bf16 on CUDA", choices=("auto", "bf16", "float32")
    )
    seed: int = option(0, "seed of weights, order and augmentation")

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(f"expected 0 <= warmup epochs < epochs; found {self.warmup_epochs}, {self.epochs}")
        if self.first_size > self.size:
            raise ValueError(f"expected crops that grow; found sizes from {self.first_size} to {self.size}")

    def image_size(self, epoch: int) -> int:
        """Returns the size of the training crops. It grows over three quarters of the epochs, in steps of 32 pixels,
        which are one pixel of the network's last stage. Tan and Le, "EfficientNetV2", 2021, call it progressive
        learning."""
        growing = min(0.75 * self.epochs, self.epochs - 1)
        left = 1 - epoch / growing if epoch < growing else 0.0
        first = self.first_size or self.size
        return max(first, self.size - 32 * math.ceil(left * (self.size - first) / 32))

    def learning_rate(self, progress: float, global_batch: int) -> float:
        """Returns the learning rate after `progress` epochs. The warm-up is that of Goyal et al., "Accurate, large
        minibatch SGD", 2017; the cosine that of Loshchilov and Hutter, "SGDR", 2017."""
        highest = self.lr * global_batch / 256
        if progress < self.warmup_epochs:
            return highest * progress / self.warmup_epochs
        share = (progress - self.warmup_epochs) / (self.epochs - self.warmup_epochs)
        return highest * (1 + math.cos(math.pi * share)) / 2

    def dtype(self, device: torch.device) -> torch.dtype:
        """Returns the type of images, and of convolutions and matrix products. Weights are float32."""
        bf16 = self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")
        return torch.bfloat16 if bf16 else torch.float32

    def train_transform(self, epoch: int, num_classes: int, dtype: torch.dtype) -> Transform:
        steps: list[Transform] = [
            RandomResizedCrop(self.image_size(epoch), scale=(self.min_area, 1.0)),
            HorizontalFlip(),
            Normalize("imagenet"),
            ToDtype(dtype),
        ]
        mixes: list[Transform] = []
        if self.mixup:
            mixes.append(Mixup(num_classes, self.mixup))
        if self.cutmix:
            mixes.append(CutMix(num_classes, self.cutmix))
        return Compose([*steps, RandomChoice(mixes)] if mixes else steps)

    def eval_transform(self, dtype: torch.dtype) -> Transform:
        """Resizes and crops in the usual ratio of 256 to 224. The loader tells Resize how to undo the squashing of
        pictures."""
        size = self.eval_size or self.size
        return Compose([Resize(round(size * 256 / 224)), CenterCrop(size), Normalize("imagenet"), ToDtype(dtype)])


@dataclass(frozen=True)
class Run:
    """The options that may change from one start of a run to the next."""

    shards: str = field(metadata={"help": "folder of the set, or a URL with --cache"})
    out: Path = field(metadata={"help": "folder of the run, on a filesystem that all its nodes share"})
    batch_size: int = option(256, "images in a batch of one process")
    cache: str = option("", "folder on the node's own disk for a copy of the set")
    log_steps: int = option(20, "steps from one line of the log to the next; a signal, too, is seen then")
    checkpoint_steps: int = option(1000, "steps from one checkpoint to the next; there is one after each epoch, too")
    stop_after: int = option(0, "steps of this start, then a checkpoint; 0: no limit")
    tensorboard: bool = option(False, "write OUT/tensorboard, too")
    profile: int = option(0, "steps that torch.profiler records, after the first four, in OUT/trace.json")

    def __post_init__(self) -> None:
        if min(self.batch_size, self.log_steps, self.checkpoint_steps) < 1:
            raise ValueError("--batch-size, --log-steps and --checkpoint-steps must be at least 1")


def parse(description: str) -> tuple[Recipe, Run]:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in (*fields(Run), *fields(Recipe)):
        words: dict[str, Any] = dict(one.metadata)
        if one.default is MISSING:
            parser.add_argument(one.name, type=Path if one.name == "out" else str, **words)
        elif one.default is False:
            parser.add_argument(f"--{one.name}", action="store_true", **words)
        else:
            words["help"] += f" (default: {one.default or repr(one.default)})"
            parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(one.default), default=one.default, **words)
    found = vars(parser.parse_args())
    if found["tensorboard"] and find_spec("tensorboard") is None:
        parser.error("--tensorboard needs a package that is not installed: pip install tensorboard")
    try:
        return Recipe(**{one.name: found.pop(one.name) for one in fields(Recipe)}), Run(**found)
    except ValueError as error:
        parser.error(str(error))
