"""The long attacks: where they are listed, the child processes that they share, and a short form of off_path.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import assert_notices, printed_by
from places import CHAOS, ROOT

ATTACKS = {path.stem for path in CHAOS.glob("*.py") if "__main__" in path.read_text()}


def test_every_attack_is_part_of_make_torture_and_of_the_list_for_contributors() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    (listed,) = (line.removeprefix("ATTACKS := ").split() for line in lines if line.startswith("ATTACKS := "))
    assert set(listed) == ATTACKS
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for name in ATTACKS:
        assert f"`python tools/chaos/{name}.py`" in page


SCRIPT = """
import os, signal, sys, time
from attack import Child, Lane, listen

def work(numbers, tell):
    for number in numbers:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        tell([number])

done, ends = [], []
for lane, messages, code in listen([Lane(work, first, 2, 20, batch=3) for first in range(2)]):
    done += [number for number, in messages]
    ends.append(code)
    if code:
        lane.next += lane.step
print(sorted(done) == [*range(5), *range(6, 20)], ends.count(-signal.SIGKILL), ends.count(0))
print(Child(lambda tell: [tell("x" * 200_000), 3][1]).finish() == (["x" * 200_000], 3))
print(Child(lambda tell: time.sleep(60), patience_seconds=1).finish() == ([], -signal.SIGALRM))
sys.stderr = open(os.devnull, "w")
print(Child(lambda tell: 1 / 0).finish())
"""


def test_a_lane_goes_on_behind_a_death_and_a_child_tells_how_it_ended() -> None:
    assert printed_by("-c", SCRIPT).splitlines() == ["True 1 7", "True", "True", "([], 1)"]


def test_random_combinations_deliver_what_the_reference_has_or_are_refused_for_a_known_reason(tmp_path: Path) -> None:
    printed = printed_by(CHAOS / "off_path.py", "--combinations", "25", "--seed", "5", TMPDIR=str(tmp_path))
    assert "violations=[]" in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("careless", "told", "seed"),
    [
        ("shardset.ShardSet.source_sizes = lambda shards, some: np.tile((24, 32), (len(some), 1))", "other images", 1),
        ("draft.StoredRows.take = lambda self, samples: take(self, np.sort(samples))", "other", 1),
        ("transform.TransformStep._masks = lambda self, more: None", "other arrays", 5),
        ("merge._check_same_images = lambda *some: None", "not refused", 27),
        ("kernel.to_yuv420 = lambda images, out: halve(images[..., ::-1].copy(), out)", "other images", 1),
        ("mixed.MixedSet.sources_of = lambda self, some: np.zeros(len(some), np.int64)", "IndexError", 1),
    ],
)
def test_a_careless_step_is_noticed(careless: str, told: str, seed: int, tmp_path: Path) -> None:
    """The seed is one that comes to it soon."""
    assert_notices(f"off_path.off_path(Path(sys.argv[1]), 200, {seed}, say)", careless, told, tmp_path)


def test_the_guide_announces_each_reason_for_a_refusal() -> None:
    from off_path import REASONS

    for name, reason in REASONS.items():
        assert reason.announced in (ROOT / "docs" / reason.page).read_text(), name
