"""The real packages that people train with: the recipes of docs/integrations.md, and the page's claims about each.

A package that is not installed skips its tests.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import BATCH_SIZE, BLOCKS, RECORDER
from starts import Starts, needs

from shardio import ShardDataset, ShardLoader

SHAPE = (6, 5, 3)
NUM_TRAIN, NUM_VAL = 520, 65
FIVE_BATCHES = 100
EPOCHS = 2


def loader_of(**options: Any) -> ShardLoader:
    return ShardLoader("out/", **{"batch_size": BATCH_SIZE, "device": "cpu", "num_threads": 1, **options})


def labels_of(batches: Iterable[Any]) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def undisturbed(epochs: int = EPOCHS, **options: Any) -> list[list[int]]:
    """The batches that a plain loop over the epochs reads."""
    with loader_of(**options) as loader:
        return [labels for _ in range(epochs) for labels in labels_of(loader)]


def succeeds(starts: Starts, script: str, ranks: int = 0, **variables: str) -> bool:
    """Runs a script in the current folder, in processes that need not import anything."""
    Path("train.py").write_text(script, encoding="utf-8")
    return not any(starts.run(Path("train.py").absolute(), folder=Path.cwd(), ranks=ranks, **variables))


def trained(name: str) -> list[list[int]]:
    """The batches that were noted in this file since this was last asked: it is removed."""
    path = Path(name)
    lines = path.read_text(encoding="ascii").splitlines()
    path.unlink()
    return [json.loads(line) for line in lines]


def check_resumed(starts: Starts, script: str) -> None:
    """Kills the script on two ranks in its second epoch, and starts it again.

    The batches until its last checkpoint, which it saves every three steps, and those after, are two epochs.
    """
    per_epoch = NUM_TRAIN // (BATCH_SIZE * 2)
    assert per_epoch % 3, "the epoch's end would be a checkpoint, and not in its middle"
    stop = per_epoch + 6
    assert not succeeds(starts, script, 2, STOP_AFTER=str(stop))
    kept = [trained(f"steps-{rank}.jsonl") for rank in range(2)]
    assert [len(steps) for steps in kept] == [stop - 1] * 2
    assert succeeds(starts, script, 2), starts.said()
    rest = [trained(f"steps-{rank}.jsonl") for rank in range(2)]
    (saved,) = {per_epoch * EPOCHS - len(steps) for steps in rest}
    assert per_epoch < saved < stop, "the resumed run did not begin in mid-epoch"
    for rank in range(2):
        assert kept[rank][:saved] + rest[rank] == undisturbed(rank=rank, world_size=2)


def test_every_block_of_the_page_belongs_to_a_test() -> None:
    counts = {title: len(blocks) for title, blocks in BLOCKS.items()}
    expected = {"torch DDP": 1, "torchdata": 2, "Lightning": 2, "Accelerate": 1, "Hugging Face Trainer": 2}
    expected |= {"Trainers that count steps": 1, "timm's train.py": 1, "torchvision's references": 1, "SPDL": 1}
    assert counts == {**expected, "JAX and NumPy": 1}  # tests/recipes/test_jax.py


# torch


def test_a_trainer_that_counts_steps_goes_on_exactly_on_another_number_of_ranks(reader: Path, starts: Starts) -> None:
    script = RECORDER + BLOCKS["Trainers that count steps"][0]
    assert not succeeds(starts, script, 2, STOP_AFTER="19")
    kept = [trained(f"steps-{rank}.jsonl") for rank in range(2)]
    assert succeeds(starts, script, 4), starts.said()
    rest = [trained(f"steps-{rank}.jsonl") for rank in range(4)]
    before, after = ([sum(parts, []) for parts in zip(*each, strict=True)] for each in (kept, rest))  # noqa: RUF017
    assert len(after) == 30 - 16, "the resumed run did not begin at the last checkpoint"
    with ShardLoader("out/", 64, epoch_batches=10, device="cpu", rank=0, world_size=1) as loader:
        assert before[:16] + after == [labels.tolist() for _ in range(3) for _, labels in loader]


def test_ranks_with_seeds_of_their_own_end_with_an_error(reader: Path, starts: Starts) -> None:
    script = BLOCKS["torch DDP"][0].replace("batch_size=32)", "batch_size=32, seed=dist.get_rank())")
    assert not succeeds(starts, script, 2)
    assert "the same seed on all ranks" in starts.said()


# torchdata

# torchdata 0.11 calls torch.set_vital, which torch 2.13 has deprecated.
set_vital = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
# torch and numpy have threads of their own, and Python from 3.12 on warns of forking with any.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_the_torchdata_recipes_run(reader: Path, starts: Starts) -> None:
    needs("torchdata")
    assert succeeds(starts, "\n\n".join(BLOCKS["torchdata"])), starts.said()


@pytest.mark.parametrize("reading_ahead", [False, True])
@pytest.mark.parametrize("stop", [5, 17])
def test_nodes_over_a_loader_go_on_where_their_state_was_taken(stop: int, reading_ahead: bool, reader: Path) -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def build(loader: ShardLoader) -> Any:
        source = nodes.IterableWrapper(loader)
        return nodes.Loader(nodes.Prefetcher(source, 3) if reading_ahead else source)

    expected = undisturbed(epochs=3, tail="short")
    with loader_of(tail="short") as first, loader_of(tail="short") as second:
        root = build(first)
        batches = (batch for _ in range(3) for batch in root)
        seen = labels_of(next(batches) for _ in range(stop))
        state = json.dumps(root.state_dict())
        resumed = build(second)
        resumed.load_state_dict(json.loads(state))
        batches = (batch for _ in range(3) for batch in resumed)
        seen += labels_of(next(batches) for _ in range(len(expected) - stop))
        assert seen == expected
        del root, resumed, batches
        gc.collect()


@forks
@set_vital
def test_a_stateful_dataloader_over_a_shard_dataset_goes_on_in_mid_epoch(reader: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def build() -> Any:
        return stateful.StatefulDataLoader(ShardDataset("out/"), batch_size=BATCH_SIZE, shuffle=True, num_workers=2)

    first = build()
    batches = iter(first)
    seen = labels_of(next(batches) for _ in range(5))
    state = first.state_dict()
    expected = seen + labels_of(batches)
    second = build()
    second.load_state_dict(state)
    assert seen + labels_of(second) == expected
    assert sorted(label for labels in expected for label in labels) == list(range(NUM_TRAIN))
    del first, second, batches
    gc.collect()  # closes the pipes to workers that have ended


# Lightning

LIGHTNING = "\n".join(BLOCKS["Lightning"])
# Lightning 2.6 asks isinstance(treespec, LeafSpec), which torch 2.13 has deprecated.
leaf_spec = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
# A run that a test resumes need not save again.
saves_no_more = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning")


@pytest.fixture
def lightning(reader: Path) -> dict[str, Any]:
    """The names that the page's first block defines, with five batches in an epoch."""
    pytest.importorskip("lightning")
    names: dict[str, Any] = {}
    exec(BLOCKS["Lightning"][0], names)
    names["ShardLoader"] = partial(ShardLoader, device="cpu")
    return names


def fit(
    names: dict[str, Any],
    *,
    checkpoint: str | None = None,
    one_cycle: bool = False,
    tune: str = "",
    look: Callable[[ShardLoader], object] | None = None,
    **options: Any,
) -> list[list[int]]:
    """The labels of the batches that the page's model is trained on, after a call of the Tuner."""
    steps: list[list[int]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices as small as these, more are slower

    class Model(names["Model"]):
        def on_train_start(self) -> None:
            if look:
                look(self.trainer.datamodule.train)

        def on_train_batch_end(self, *_: Any) -> None:
            if look:
                look(self.trainer.datamodule.train)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            if not one_cycle:
                return optimizer
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    options = {"accelerator": "cpu", "devices": 1, "callbacks": [], "enable_checkpointing": False, **options}
    trainer = names["L"].Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, **options)
    data, model = names["Data"](FIVE_BATCHES), Model(int(np.prod(SHAPE)), max(NUM_TRAIN, NUM_VAL))
    try:
        if tune == "lr_find":
            names["Tuner"](trainer).lr_find(model, datamodule=data, num_training=20)
            assert model.lr != 0.01
        if tune == "scale_batch_size":
            names["Tuner"](trainer).scale_batch_size(model, datamodule=data, init_val=8, max_trials=3)
            assert len(steps[-1]) == data.batch_size == 32
        steps.clear()
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    finally:
        data.teardown("fit")  # which Lightning does not call after an error
        torch.set_num_threads(threads)
    return steps


def test_lightning_goes_on_exactly_after_being_killed_on_two_ranks(reader: Path, starts: Starts) -> None:
    needs("lightning")
    assert LIGHTNING.count('devices="auto"') == 1
    script = RECORDER + LIGHTNING.replace('devices="auto"', 'devices=2, accelerator="cpu"')
    counted = "print(trainer.callback_metrics['val_count'].item(), file=open(f'counted-{rank()}', 'w'))\n"
    check_resumed(starts, script + counted)
    assert [Path(f"counted-{rank}").read_text() for rank in range(2)] == [f"{NUM_VAL:.1f}\n"] * 2


SAVING = {
    "in mid-epoch": {"every_n_train_steps": 3},
    "at the last step": {"every_n_train_steps": 5},
    "after validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "at the end of the epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}
LOOKS = [ShardLoader.peek, lambda loader: next(iter(loader))]


@leaf_spec
@saves_no_more
@pytest.mark.parametrize(
    ("when", "options"),
    [
        *((when, {"limit_val_batches": 1}) for when in SAVING),
        ("at the end of the epoch", {}),
        ("in mid-epoch", {"max_steps": 13, "max_epochs": -1}),
        ("in mid-epoch", {"one_cycle": True}),
        # Hooks look at a batch before the loop and in it.
        *(
            pytest.param("in mid-epoch", {"look": look}, marks=pytest.mark.filterwarnings("ignore:one batch was taken"))
            for look in LOOKS
        ),
    ],
)
def test_lightning_goes_on_exactly_from_every_checkpoint(
    when: str, options: dict[str, Any], lightning: dict[str, Any]
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    options = {"max_epochs": 3, "limit_val_batches": 0, "num_sanity_val_steps": 0, **options}
    look, stop = options.pop("look", None), options.get("max_steps", 15)
    expected = undisturbed(epochs=3, batch_size=FIVE_BATCHES)[:stop]
    saving = ModelCheckpoint("saved", filename="{step}", save_top_k=-1, **SAVING[when])
    assert fit(lightning, look=look, callbacks=[saving], enable_checkpointing=True, **options) == expected
    every = SAVING[when].get("every_n_train_steps", 5)
    for step in range(every, stop, every):
        # A look at the last batch of an epoch is the end of the epoch.
        looks = look if 0 < step % 5 < 4 else None
        assert fit(lightning, look=looks, checkpoint=f"saved/step={step}.ckpt", **options) == expected[step:], step


@leaf_spec
@pytest.mark.parametrize(("tune", "batch_size"), [("lr_find", FIVE_BATCHES), ("scale_batch_size", 32)])
def test_lightning_trains_on_whole_epochs_after_tuning(
    tune: str, batch_size: int, lightning: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.tuner import Tuner

    steps = fit({**lightning, "Tuner": Tuner}, tune=tune, max_epochs=6, limit_val_batches=0)
    assert steps == undisturbed(epochs=6, batch_size=batch_size)


# Accelerate


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}])
def test_accelerate_prepares_a_loader_by_leaving_it_alone(
    options: dict[str, Any], reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = accelerate.Accelerator(dataloader_config=accelerate.DataLoaderConfiguration(**options))
    with loader_of() as loader:
        assert accelerator.prepare(loader) is loader
        assert labels_of(loader) == undisturbed(epochs=1)


# Hugging Face Trainer


def test_trainer_goes_on_exactly_after_being_killed_and_evaluates_each_sample_once(
    reader: Path, starts: Starts
) -> None:
    needs("transformers")
    needs("tokenizers")
    script = "\n".join(BLOCKS["Hugging Face Trainer"])
    # Three and three batches, and two at the end of the epoch.
    script = script.replace('"save_steps": 3', '"save_steps": 1')
    script = script.replace("**saving", "**saving, gradient_accumulation_steps=3")
    check = f"""
trainer.compute_metrics = lambda found: {{"labels": sorted(found.label_ids.tolist())}}
assert trainer.evaluate()["eval_labels"] == list(range({NUM_VAL}))
assert trainer.state.epoch == {EPOCHS}
"""
    check_resumed(starts, RECORDER + script + check)


# Scripts of others, which no package contains. These have the calls that theirs make, and none of their code.

OPTIONS = f"""
import json
from argparse import ArgumentParser

def get_args_parser():
    parser = ArgumentParser()
    parser.add_argument("data_path")
    parser.add_argument("--start-epoch", type=int)
    parser.set_defaults(batch_size={BATCH_SIZE}, distributed=True)
    parser.set_defaults(train_crop_size=4, val_resize_size=5, val_crop_size=4)
    return parser

def note(name, loader):
    with open(name, "a", encoding="ascii") as file:
        for images, labels in loader:
            assert images.shape[1:] == (3, 4, 4) and images.is_floating_point()
            file.write(json.dumps(labels.tolist()) + "\\n")
"""
LIKE_TIMM = (
    OPTIONS
    + f"""
from timm.data import create_dataset, create_loader

args = get_args_parser().parse_args()
dataset_train = create_dataset("", root=args.data_path, split="train", is_training=True, batch_size=args.batch_size)
dataset_eval = create_dataset("", root=args.data_path, split="val", is_training=False, class_map="")
common = dict(input_size=(3, 4, 4), batch_size=args.batch_size, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
common.update(distributed=False, use_prefetcher=False)
loader_train = create_loader(dataset_train, is_training=True, scale=[0.5, 1.0], ratio=[0.7, 1.4], hflip=0.5, **common)
loader_eval = create_loader(dataset_eval, is_training=False, crop_pct=0.875, **common)
for epoch in range(args.start_epoch, {EPOCHS}):
    if hasattr(dataset_train, "set_epoch"):
        dataset_train.set_epoch(epoch)
    note("train", loader_train)
    note("val", loader_eval)
"""
)
LIKE_TORCHVISION = (
    OPTIONS
    + f"""
import torch

def load_data(traindir, valdir, args):
    raise NotImplementedError

def main(args):
    folders = args.data_path + "train", args.data_path + "val"
    dataset, dataset_test, train_sampler, test_sampler = load_data(*folders, args)
    assert len(dataset.classes) == {NUM_TRAIN}
    make = torch.utils.data.DataLoader
    data_loader = make(dataset, batch_size=args.batch_size, sampler=train_sampler, num_workers=2, collate_fn=None)
    data_loader_test = make(dataset_test, batch_size=args.batch_size, sampler=test_sampler, pin_memory=True)
    assert len(data_loader_test.dataset) == {NUM_VAL}
    for epoch in range(args.start_epoch, {EPOCHS}):
        train_sampler.set_epoch(epoch)
        note("train", data_loader)
        note("val", data_loader_test)
"""
)


@pytest.mark.parametrize(
    ("title", "script"), [("timm's train.py", LIKE_TIMM), ("torchvision's references", LIKE_TORCHVISION)]
)
def test_scripts_of_others_train_on_the_order_of_the_epoch_with_which_they_begin(
    title: str, script: str, reader: Path, starts: Starts
) -> None:
    (block,) = BLOCKS[title]
    for path, text in {"timm/data.py": "", "train.py": script, "start.py": block}.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    assert starts.run(reader / "start.py", "out/", "--start-epoch", "1", folder=reader) == [0], starts.said()
    expected = undisturbed()
    assert trained("train") == expected[len(expected) // EPOCHS :]
    evaluated = [label for labels in trained("val") for label in labels]
    assert sorted(set(evaluated)) == list(range(NUM_VAL))


# SPDL


def test_the_spdl_recipe_runs(reader: Path, starts: Starts) -> None:
    needs("spdl")
    assert succeeds(starts, BLOCKS["SPDL"][0]), starts.said()


def test_a_place_that_travels_through_spdl_is_exact(reader: Path) -> None:
    pytest.importorskip("spdl.pipeline")
    names: dict[str, Any] = {}
    exec(BLOCKS["SPDL"][0].split("\n\n\nwith ")[0], names)
    expected = undisturbed(epochs=1)
    with loader_of() as loader:
        batches = names["pipeline"](loader)
        with batches.auto_stop():
            items = list(islice(batches, 5))
    seen = labels_of(items)
    with loader_of() as loader:
        loader.load_state_dict(items[-1][2])
        batches = names["pipeline"](loader)
        with batches.auto_stop():
            seen += [labels.tolist() for _, labels, _ in batches][: len(expected) - 5]
    assert seen == expected
