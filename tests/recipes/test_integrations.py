"""The real packages that people train with: the recipes of docs/integrations.md, and the page's claims about each.

A package that is not installed skips its tests.
"""

from __future__ import annotations

import gc
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import BATCH_SIZE, BLOCKS, RECORDER
from pictures import sample_pixels
from starts import Starts, starting

from shardio import Part, ShardDataset, ShardLoader

SHAPE = (6, 5, 3)
NUM_TRAIN, NUM_VAL = 520, 65
FIVE_BATCHES = 100
EPOCHS = 2


# Runs after a recipe of several ranks. A thread of gloo in torch 2.13 may still let go of a Python object when the
# interpreter is at its end, also after destroy_process_group, and torch then aborts the process.
LAST = "\nimport os\nos._exit(0)\n"


def loader_of(**options: Any) -> ShardLoader:
    return ShardLoader("out/", **{"batch_size": BATCH_SIZE, "device": "cpu", "num_threads": 1, **options})


def labels_of(batches: Iterable[Any]) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def undisturbed(epochs: int = EPOCHS, **options: Any) -> list[list[int]]:
    """The batches that a plain loop over the epochs reads."""
    with loader_of(**options) as loader:
        return [labels for _ in range(epochs) for labels in labels_of(loader)]


def run_by_torchrun(starts: Starts, script: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Runs a script in the current folder on `ranks` processes of torchrun."""
    Path("train.py").write_text(script, encoding="utf-8")
    code = starts.run_by_torchrun(Path("train.py"), folder=Path.cwd(), ranks=ranks)
    return subprocess.CompletedProcess(script, code, starts.said(), "")


def succeed(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def trained_on(rank: int) -> list[list[int]]:
    """The batches on which a rank has trained since this was last asked."""
    return trained(f"steps-{rank}.jsonl")


def trained(name: str) -> list[list[int]]:
    """The batches that were noted in this file, which is removed."""
    path = Path(name)
    lines = path.read_text(encoding="ascii").splitlines()
    path.unlink()
    return [json.loads(line) for line in lines]


def check_whole_epochs(per_rank: list[list[list[int]]]) -> None:
    """Checks that each rank had its part, and that together they had each epoch's samples once."""
    for rank, steps in enumerate(per_rank):
        assert steps == undisturbed(rank=rank, world_size=len(per_rank))
    global_batch = BATCH_SIZE * len(per_rank)
    per_epoch = NUM_TRAIN // global_batch
    for first in range(0, EPOCHS * per_epoch, per_epoch):
        samples = [i for steps in per_rank for labels in steps[first : first + per_epoch] for i in labels]
        assert len(samples) == len(set(samples)) == per_epoch * global_batch


def run_forked(starts: Starts, script: str, *, ranks: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in the current folder, in processes that need not import anything."""
    Path("train.py").write_text(script, encoding="utf-8")
    codes = starts.run(Path("train.py").absolute(), folder=Path.cwd(), ranks=ranks, **variables)
    return subprocess.CompletedProcess(script, int(any(codes)), starts.said(), "")


def check_resumed(
    script: str,
    ranks: int,
    saved_every: int,
    start: Callable[..., subprocess.CompletedProcess[str]],
    start_first: Callable[..., subprocess.CompletedProcess[str]] | None = None,
) -> None:
    """Kills the script in its second epoch. The batches until its last checkpoint, and those after, are two epochs."""
    per_epoch = NUM_TRAIN // (BATCH_SIZE * ranks)
    assert per_epoch % saved_every, "the epoch's end would be a checkpoint, and not in its middle"
    stop = per_epoch + saved_every + 3
    assert (start_first or start)(script + LAST, STOP_AFTER=str(stop)).returncode != 0
    kept = [trained_on(rank) for rank in range(ranks)]
    assert [len(steps) for steps in kept] == [stop - 1] * ranks
    succeed(start(script + LAST))
    rest = [trained_on(rank) for rank in range(ranks)]
    (saved,) = {per_epoch * EPOCHS - len(steps) for steps in rest}
    assert per_epoch < saved < stop, "the resumed run did not begin in mid-epoch"
    check_whole_epochs([before[:saved] + after for before, after in zip(kept, rest, strict=True)])


def run_on_other_ranks(
    starts: Starts, block: str, *, stop: int, ranks: int, num_steps: int
) -> tuple[int, list[list[int]]]:
    """Kills a recipe on two ranks and resumes it on others. Returns at which step, and the global batches."""
    assert run_forked(starts, RECORDER + block + LAST, ranks=2, STOP_AFTER=str(stop)).returncode != 0
    kept = [trained_on(rank) for rank in range(2)]
    succeed(run_by_torchrun(starts, RECORDER + block + LAST, ranks))
    rest = [trained_on(rank) for rank in range(ranks)]
    before, after = ([sum(parts, []) for parts in zip(*each, strict=True)] for each in (kept, rest))  # noqa: RUF017
    saved = num_steps - len(after)
    return saved, before[:saved] + after


def test_every_block_of_the_page_belongs_to_a_test() -> None:
    counts = {title: len(blocks) for title, blocks in BLOCKS.items()}
    expected = {"torch DDP": 1, "torchdata": 2, "Lightning": 2, "Accelerate": 1, "Hugging Face Trainer": 2}
    expected |= {"Trainers that count steps": 1, "timm's train.py": 1, "torchvision's references": 1, "SPDL": 1}
    assert counts == {**expected, "JAX and NumPy": 1}  # tests/recipes/test_jax.py


# torch


def test_under_torchrun_it_goes_on_exactly_after_being_killed_and_the_models_stay_equal(
    reader: Path, starts: Starts
) -> None:
    (block,) = BLOCKS["torch DDP"]
    keep = "\ntorch.save([parameter.detach() for parameter in model.parameters()], f'model-{loader.world.rank}.pt')\n"
    first = partial(run_forked, starts, ranks=2)
    check_resumed(RECORDER + block + keep, 2, 3, partial(run_by_torchrun, starts, ranks=2), first)
    first, second = (torch.load(f"model-{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_under_torchrun_a_mixture_goes_on_exactly_on_another_number_of_ranks(reader: Path, starts: Starts) -> None:
    (block,) = BLOCKS["torch DDP"]
    mixed = "[Part('out/', 3), Part('out/', 1, split='val')]"
    for old, new in {
        'ShardLoader("out/", batch_size=32)': f"ShardLoader({mixed}, 96 // dist.get_world_size(), epoch_batches=10)",
        "import ShardLoader": "import Part, ShardLoader",
        "loader.shards[0].image.size": "loader.shards.sets[0][0].image.size",
        "(images, labels)": "(images, labels, more)",
    }.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    saved, steps = run_on_other_ranks(starts, block, stop=16, ranks=3, num_steps=20)
    assert 10 < saved < 16, "the resumed run did not begin in mid-epoch"
    parts = [Part("out/", 3), Part("out/", 1, split="val")]
    with ShardLoader(parts, 96, epoch_batches=10, device="cpu") as loader:
        assert steps == [labels.tolist() for _ in range(EPOCHS) for _, labels, _ in loader]


def test_a_trainer_that_counts_steps_goes_on_exactly_on_another_number_of_ranks(reader: Path, starts: Starts) -> None:
    (block,) = BLOCKS["Trainers that count steps"]
    saved, steps = run_on_other_ranks(starts, block, stop=19, ranks=4, num_steps=30)
    assert saved == 16, "the resumed run did not begin at the last checkpoint"
    with ShardLoader("out/", 64, epoch_batches=10, device="cpu", rank=0, world_size=1) as loader:
        assert steps == [labels.tolist() for _ in range(3) for _, labels in loader]


def test_the_mean_loss_of_an_empty_batch_is_not_a_number(reader: Path) -> None:
    with loader_of(split="val", tail="short", shuffle=False, rank=0, world_size=2) as loader:
        images, labels = list(loader)[-1]
    assert len(images) == len(labels) == 0
    assert torch.nn.functional.cross_entropy(torch.zeros(0, 9), labels).isnan()


# torchdata

# torchdata 0.11 calls torch.set_vital, which torch 2.13 has deprecated.
set_vital = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
# torch and numpy have threads of their own, and Python from 3.12 on warns of forking with any.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@set_vital
def test_a_loader_is_stateful_as_torchdata_says_it(reader: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with loader_of() as loader:
        assert isinstance(loader, stateful.Stateful)


def test_the_torchdata_recipes_run(reader: Path, starts: Starts) -> None:
    pytest.importorskip("torchdata")
    succeed(run_forked(starts, "\n\n".join(BLOCKS["torchdata"])))


@pytest.mark.parametrize("reading_ahead", [False, True])
@pytest.mark.parametrize("stop", [0, 5, 16, 17, 20, 34])
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


def test_the_loader_counts_what_nodes_have_read_ahead(reader: Path) -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    with loader_of() as loader:
        root = nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(loader), 3))
        batches = iter(root)
        next(batches)
        deadline = time.monotonic() + 10
        while loader.state_dict()["consumed"] == BATCH_SIZE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loader.state_dict()["consumed"] > BATCH_SIZE
        del root, batches
        gc.collect()


@forks
@set_vital
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_dataloader_over_a_shard_dataset_goes_on_in_mid_epoch(num_workers: int, reader: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def build() -> Any:
        return stateful.StatefulDataLoader(
            ShardDataset("out/"), batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers
        )

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
    names["ShardLoader"] = larger(FIVE_BATCHES)
    return names


def larger(batch_size: int, **also: Any) -> Callable[..., ShardLoader]:
    """A ShardLoader, as the page makes it, but with these options."""
    return lambda path, **options: ShardLoader(path, **{**options, "batch_size": batch_size, "device": "cpu", **also})


def fit(names: dict[str, Any], *, checkpoint: str | None = None, **options: Any) -> list[list[int]]:
    """The labels of the batches that the page's model is trained on."""
    steps: list[list[int]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices as small as these, more are slower

    class Model(names["Model"]):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    options = {"accelerator": "cpu", "devices": 1, "callbacks": [], "enable_checkpointing": False, **options}
    trainer = names["L"].Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, **options)
    data = names["Data"]()
    try:
        trainer.fit(Model(int(np.prod(SHAPE)), max(NUM_TRAIN, NUM_VAL)), datamodule=data, ckpt_path=checkpoint)
    finally:
        data.teardown("fit")  # which Lightning does not call after an error
        torch.set_num_threads(threads)
    return steps


def test_lightning_goes_on_exactly_after_being_killed_on_two_ranks_of_its_own(reader: Path, starts: Starts) -> None:
    pytest.importorskip("lightning")
    assert LIGHTNING.count('devices="auto"') == 1
    script = RECORDER + LIGHTNING.replace('devices="auto"', 'devices=2, accelerator="cpu"')
    counted = "print(trainer.callback_metrics['val_count'].item(), file=open(f'counted-{rank()}', 'w'))\n"
    # The first start has a launcher of ours; in the second, Lightning starts the other rank.
    first, second = (partial(run_forked, starts, ranks=ranks) for ranks in (2, 0))
    check_resumed(script + counted, 2, 3, second, first)
    assert [Path(f"counted-{rank}").read_text() for rank in range(2)] == [f"{NUM_VAL:.1f}\n"] * 2


SAVING = {
    "in mid-epoch": {"every_n_train_steps": 3},
    "at the last step": {"every_n_train_steps": 5},
    "after validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "at the end of the epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


def check_every_checkpoint(names: dict[str, Any], when: str, stop: int, **options: Any) -> None:
    """Checks that it goes on from each checkpoint with the batches of an undisturbed run, which ends at `stop`."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    expected = undisturbed(epochs=3, batch_size=FIVE_BATCHES)[:stop]
    saving = ModelCheckpoint("saved", filename="{step}", save_top_k=-1, **SAVING[when])
    options["num_sanity_val_steps"] = 0
    assert fit(names, callbacks=[saving], enable_checkpointing=True, **options) == expected
    every = SAVING[when].get("every_n_train_steps", 5)
    for step in range(every, stop, every):
        assert fit(names, checkpoint=f"saved/step={step}.ckpt", **options) == expected[step:], step


@leaf_spec
@saves_no_more
@pytest.mark.parametrize(
    ("when", "validations"), [(when, n) for when in SAVING for n in (0, 1) if n or when != "after validation"]
)
def test_lightning_goes_on_exactly_from_every_checkpoint(
    when: str, validations: int, lightning: dict[str, Any]
) -> None:
    check_every_checkpoint(lightning, when, 15, max_epochs=3, limit_val_batches=validations)


@leaf_spec
@saves_no_more
@pytest.mark.parametrize("when", ["in mid-epoch", "at the last step"])
def test_lightning_goes_on_exactly_where_max_steps_ends_the_training(when: str, lightning: dict[str, Any]) -> None:
    check_every_checkpoint(lightning, when, 13, max_steps=13, max_epochs=-1, limit_val_batches=0)


@leaf_spec
@saves_no_more
def test_lightning_begins_an_epoch_twice_after_a_checkpoint_of_the_end_of_one_in_a_training_of_max_steps(
    lightning: dict[str, Any],
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    options = {"max_steps": 8, "max_epochs": -1, "limit_val_batches": 0}
    saving = ModelCheckpoint("saved", filename="{step}", save_top_k=-1, **SAVING["at the end of the epoch"])
    expected = fit(lightning, callbacks=[saving], enable_checkpointing=True, **options)
    resumed = fit(lightning, checkpoint="saved/step=5.ckpt", **options)
    assert resumed[0] == expected[5]
    assert resumed[1] != expected[6]


@leaf_spec
@saves_no_more
def test_lightning_ends_a_resumed_epoch_too_early_if_batches_have_grown(lightning: dict[str, Any]) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint("saved", filename="{step}", save_top_k=-1, every_n_train_steps=2)
    options = {"max_epochs": 1, "limit_val_batches": 0}
    fit(lightning, callbacks=[saving], enable_checkpointing=True, **options)
    lightning["ShardLoader"] = larger(160)
    (batch,) = fit(lightning, checkpoint="saved/step=2.ckpt", **options)
    assert 2 * len(batch) == 2 * 160 == NUM_TRAIN - 2 * FIVE_BATCHES


@leaf_spec
@saves_no_more
def test_lightning_repeats_the_same_batches_without_shuffling_and_refuses_to_overfit(lightning: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="You requested to overfit"), pytest.raises(ValueError, match="DataLoader"):
        fit(lightning, max_epochs=2, overfit_batches=2, limit_val_batches=0)
    lightning["ShardLoader"] = larger(FIVE_BATCHES, shuffle=False)
    first, second, third, fourth = fit(lightning, max_epochs=2, limit_train_batches=2, limit_val_batches=0)
    assert [first, second] == [third, fourth]


# Accelerate


@pytest.fixture
def accelerate(reader: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return accelerate


def test_accelerate_goes_on_exactly_after_being_killed_on_two_ranks_and_counts_each_sample_once(
    accelerate: Any, starts: Starts
) -> None:
    (block,) = BLOCKS["Accelerate"]
    check = f"""
assert sorted(right) == list(range({NUM_VAL})), sorted(right)
with ShardLoader("out/", **options, split="val", tail="pad") as padded:
    assert sum(len(accelerator.gather_for_metrics(labels)) for _, labels in padded) == 2 * 2 * {BATCH_SIZE}
with ShardLoader("out/", **options, split="val", tail="short") as short:
    assert accelerator.reduce(torch.tensor(sum(len(labels) for _, labels in short)), "sum") == {NUM_VAL}
"""
    check_resumed(RECORDER + block + check, 2, 3, partial(run_forked, starts, ranks=2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_batches": True, "even_batches": False},
        {"dispatch_batches": True},
        {"use_stateful_dataloader": True, "use_seedable_sampler": True},
    ],
)
@set_vital
def test_accelerate_prepares_a_loader_by_leaving_it_alone(options: dict[str, Any], accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(dataloader_config=accelerate.DataLoaderConfiguration(**options))
    with loader_of() as loader:
        assert accelerator.prepare(loader) is loader
        assert labels_of(loader) == undisturbed(epochs=1)


def test_what_accelerate_wants_a_dataloader_for_refuses_a_loader(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator()
    with loader_of() as loader:
        with pytest.raises(AttributeError, match="drop_last"):
            accelerator.prepare_data_loader(loader)
        with pytest.raises((TypeError, ValueError)):
            next(iter(accelerate.skip_first_batches(loader)))


@pytest.mark.parametrize("stop", [0, 1, 7, 16, 17, 31])
def test_accelerate_saves_and_loads_the_place_of_a_registered_loader(stop: int, accelerate: Any) -> None:
    expected = undisturbed(epochs=3)
    with loader_of() as first, loader_of() as second:
        accelerator = accelerate.Accelerator()
        accelerator.register_for_checkpointing(first)
        batches = (batch for _ in range(3) for batch in first)
        seen = labels_of(next(batches) for _ in range(stop))
        accelerator.save_state("checkpoint")
        accelerator = accelerate.Accelerator()
        accelerator.register_for_checkpointing(second)
        accelerator.load_state("checkpoint")
        while (batches := iter(second)).epoch < 3:
            seen += labels_of(batches)
        assert seen == expected


def test_a_rest_of_accumulated_gradients_is_completed_by_the_next_epoch(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=5)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    stepped = []
    with loader_of() as loader:
        for step, _ in enumerate(batch for _ in range(2) for batch in loader):
            with accelerator.accumulate(model):
                if accelerator.sync_gradients:
                    stepped.append(step + 1)
    assert stepped == [5, 10, 15, 20, 25, 30]


# Hugging Face Trainer


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    """Starts of scripts, from a process that has imported what takes seconds."""
    pytest.importorskip("tokenizers", reason="transformers is not installed")
    modules = ("torch._dynamo", "transformers.trainer", "transformers.models.resnet.modeling_resnet")
    with starting(tmp_path_factory.mktemp("trainers") / "said", *modules, "shardio.loading.loader") as starts:
        yield starts


@pytest.mark.parametrize(("ranks", "accumulated"), [(2, 3)])
def test_trainer_goes_on_exactly_after_being_killed_and_evaluates_each_sample_once(
    ranks: int, accumulated: int, reader: Path, trainers: Starts
) -> None:
    script = "\n".join(BLOCKS["Hugging Face Trainer"])
    # Three and three batches, and two at the end of the epoch.
    script = script.replace('"save_steps": 3', f'"save_steps": {3 // accumulated}')
    script = script.replace("**saving", f"**saving, gradient_accumulation_steps={accumulated}")
    check = f"""
trainer.compute_metrics = lambda found: {{"labels": sorted(found.label_ids.tolist())}}
assert trainer.evaluate()["eval_labels"] == list(range({NUM_VAL}))
assert trainer.state.epoch == {EPOCHS}
"""
    check_resumed(RECORDER + script + check, ranks, 3, partial(run_forked, trainers, ranks=ranks))


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
@pytest.mark.parametrize("begin", [0, 1])
def test_scripts_of_others_train_on_the_order_of_the_epoch_with_which_they_begin(
    title: str, script: str, begin: int, reader: Path, starts: Starts
) -> None:
    (block,) = BLOCKS[title]
    for path, text in {"timm/data.py": "", "train.py": script, "start.py": block}.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    assert starts.run(reader / "start.py", "out/", "--start-epoch", str(begin), folder=reader) == [0], starts.said()
    expected = undisturbed()
    assert trained("train") == expected[begin * len(expected) // EPOCHS :]
    evaluated = [label for labels in trained("val") for label in labels]
    assert sorted(set(evaluated)) == list(range(NUM_VAL))


# SPDL


def test_the_spdl_recipe_runs(reader: Path, starts: Starts) -> None:
    pytest.importorskip("spdl.pipeline")
    succeed(run_forked(starts, BLOCKS["SPDL"][0]))


def spdl_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "spdl" in thread.name]


def test_batches_stay_valid_in_an_spdl_pipeline_and_each_sample_comes_once(reader: Path) -> None:
    spdl = pytest.importorskip("spdl.pipeline")

    def slowly(batch: Any) -> Any:
        time.sleep(0.002)  # so that the source is ahead of the stage
        return batch

    with loader_of(batch_size=8, tail="short", prefetch=1) as loader:
        builder = spdl.PipelineBuilder().add_source(loader).pipe(slowly, concurrency=3).add_sink(2)
        pipeline = builder.build(num_threads=3)
        with pipeline.auto_stop():
            batches = list(pipeline)
        assert sorted(label for labels in labels_of(batches) for label in labels) == list(range(NUM_TRAIN))
        for images, labels in batches:
            for image, label in zip(images, labels.tolist(), strict=True):
                assert np.array_equal(image.permute(1, 2, 0).numpy(), sample_pixels(label, SHAPE))


@pytest.mark.parametrize("stop", [1, 5, 16])
def test_a_place_that_travels_through_spdl_is_exact(stop: int, reader: Path) -> None:
    pytest.importorskip("spdl.pipeline")
    names: dict[str, Any] = {}
    exec(BLOCKS["SPDL"][0].split("\n\n\nwith ")[0], names)
    expected = undisturbed(epochs=1)
    with loader_of() as loader:
        batches = names["pipeline"](loader)
        with batches.auto_stop():
            items = list(islice(batches, stop))
    seen = labels_of(items)
    with loader_of() as loader:
        loader.load_state_dict(items[-1][2])
        batches = names["pipeline"](loader)
        with batches.auto_stop():
            seen += [labels.tolist() for _, labels, _ in batches][: len(expected) - stop]
    assert seen == expected


def test_an_spdl_pipeline_that_is_stopped_early_leaves_nothing_running(reader: Path) -> None:
    spdl = pytest.importorskip("spdl.pipeline")
    with loader_of(batch_size=8) as loader:
        pipeline = spdl.PipelineBuilder().add_source(loader).add_sink(2).build(num_threads=1)
        with pipeline.auto_stop():
            next(iter(pipeline))
        deadline = time.monotonic() + 10
        while spdl_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not spdl_threads()
        assert loader.state_dict()["consumed"] < NUM_TRAIN
