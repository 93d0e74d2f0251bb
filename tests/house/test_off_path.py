"""A small step off the documented path gives the right samples or an error: a short form of off_path.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import assert_notices, printed_by
from places import CHAOS, ROOT


def test_random_combinations_deliver_what_the_reference_has_or_are_refused_for_a_known_reason(tmp_path: Path) -> None:
    printed = printed_by(CHAOS / "off_path.py", "--combinations", "50", "--seed", "5", TMPDIR=str(tmp_path))
    assert "violations=[]" in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("careless", "told", "seed"),
    [
        ("shardset.ShardSet.source_sizes = lambda shards, some: np.tile((24, 32), (len(some), 1))", "other images", 1),
        ("draft.StoredRows.take = lambda self, samples: take(self, np.sort(samples))", "other", 1),
        ("transform.TransformStep._masks = lambda self, more: None", "other arrays", 5),
        ("merge._check_same_images = lambda *some: None", "not refused", 3),
    ],
)
def test_a_careless_step_is_noticed(careless: str, told: str, seed: int, tmp_path: Path) -> None:
    """The seed is one that comes to it soon."""
    assert_notices(f"off_path.off_path(Path(sys.argv[1]), 200, {seed}, say)", careless, told, tmp_path)


def test_the_guide_announces_each_reason_for_a_refusal() -> None:
    from off_path import REASONS

    for name, reason in REASONS.items():
        assert reason.announced in (ROOT / "docs" / reason.page).read_text(), name
