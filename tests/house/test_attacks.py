"""The long attacks: where they are listed, and the child processes that they share."""

from __future__ import annotations

from command import printed_by
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
