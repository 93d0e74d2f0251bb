"""The examples of docs/guide/evaluate.md on several ranks, whose last batches may be empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from documents import code_blocks
from places import ROOT
from starts import Starts, needs

PLAIN, METRICS = code_blocks((ROOT / "docs/guide/evaluate.md").read_text(encoding="utf-8"), "python")[:2]

# Process r is rank r of groups of every size: of r + 1, ..., 5. In some, ranks have an empty last batch.
SCRIPT = """
import os, warnings
import torch, torchmetrics.classification
import torch.distributed as dist
from shardio import ShardLoader

warnings.filterwarnings("ignore", ".*empty on rank")
rank = int(os.environ["RANK"])
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
    del os.environ[name]
options = {{"split": "val", "shuffle": False, "tail": "short", "device": "cpu", "num_threads": 1}}
examples = [{{}}, {{}}]
for code, names in zip([{plain!r}, {metrics!r}], examples):
    exec(code, names)
with ShardLoader("out/", 97, **options) as loader:
    (images, labels), = loader
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(images[0].numel(), len(loader.shards.classes)))
with torch.inference_mode():
    scores = model(images.float() / 255)
    expected = torch.nn.functional.cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()
store = dist.FileStore("store")
for size in range(rank + 1, 6):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(size), store), rank=rank, world_size=size)
    for batch_size in (1, 3, 8, 9):
        with ShardLoader("out/", batch_size, **options) as val:
            for names in examples:
                found = names["evaluate"](model, val)
                torch.testing.assert_close(torch.tensor(found), torch.stack(expected), rtol=1e-4, atol=0)
    dist.destroy_process_group()
"""


def test_the_examples_of_the_page_are_right_on_any_number_of_ranks(
    labeled_set: Callable[[int, int], Path], starts: Starts, tmp_path: Path
) -> None:
    needs("torchmetrics")
    (tmp_path / "out").symlink_to(labeled_set(1, 97))
    script = tmp_path / "evaluate.py"
    # The blocks make a loader of their own, too, of the whole set.
    script.write_text(SCRIPT.format(plain=PLAIN, metrics=METRICS), encoding="utf-8")
    assert starts.run(script, folder=tmp_path, ranks=5) == [0] * 5, starts.said()
