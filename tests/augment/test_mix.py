"""Mixup and CutMix as torchvision defines them, from the batch's own numbers."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from drawn import assert_share
from scipy.stats import beta, chisquare, ks_2samp, kstest

from shardio.augment import Compose, CutMix, Mixup, RandomChoice, ToDtype
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.mix import beta_quantiles

CLASSES = 10
AS_FLOATS = ToDtype(torch.float32)


def batch(count: int = 12, height: int = 20, width: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Every picture is of one gray level: its number."""
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, height, width)
    return images.contiguous(), torch.arange(count) % CLASSES


def mixed(transform: Any, *tensors: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return transform(*tensors, seed=seed, indices=range(len(tensors[0])))


def one_hot(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels, CLASSES).float()


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 8.0])
def test_shares_are_of_a_beta_distribution(alpha: float) -> None:
    numbers = np.random.default_rng(1).random(60_000)
    found = beta_quantiles(alpha, numbers)
    low = found[found < 0.5]  # next to 1, floats are too coarse
    assert kstest(low, lambda share: 2 * beta(alpha, alpha).cdf(share)).pvalue > 1e-7
    assert_share(found < 0.5, 0.5)
    np.testing.assert_allclose(beta_quantiles(alpha, 1 - numbers), 1 - found, atol=1e-6)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("partner", ["roll", "flip"])
def test_mixup_is_one_share_of_the_picture_and_the_rest_of_its_partner(per_sample: bool, partner: Any) -> None:
    images, labels = batch()
    transform = Compose([AS_FLOATS, Mixup(CLASSES, alpha=0.8, per_sample=per_sample, partner=partner)])
    found, targets = mixed(transform, images, labels, seed=4)
    others = np.roll(np.arange(12), 1) if partner == "roll" else np.arange(12)[::-1].copy()
    own, other = images[:, 0, 0, 0].float(), images[others, 0, 0, 0].float()
    shares = (found[:, 0, 0, 0] - other) / (own - other)
    assert ((shares >= 0) & (shares <= 1)).all()
    assert (len(shares.unique(dim=0)) > 6) == per_sample or torch.allclose(shares, shares[0])
    assert torch.allclose(found, found[:, :1, :1, :1].expand_as(found))
    expected = one_hot(labels) * shares[:, None] + one_hot(labels[others]) * (1 - shares[:, None])
    torch.testing.assert_close(targets, expected, atol=1e-5, rtol=0)
    assert targets.dtype == torch.float32


def replaced_by(mix: CutMix, count: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which pixels of each picture are of its neighbor, and the share of each label that is kept."""
    labels = torch.arange(count) % 2
    images = labels.byte()[:, None, None, None].expand(-1, 1, height, width)
    found, targets = mixed(mix, images, labels, seed=9)
    return (found != images)[:, 0], targets[torch.arange(count), labels]


@pytest.mark.parametrize("per_sample", [False, True])
def test_cutmix_is_a_window_of_the_partner_and_a_share_as_large(per_sample: bool) -> None:
    replaced, kept = replaced_by(CutMix(2, per_sample=per_sample), 200, 20, 30)
    assert per_sample or torch.equal(replaced, replaced[:1].expand_as(replaced))
    rows, columns = replaced.any(dim=2), replaced.any(dim=1)
    assert torch.equal(replaced, rows[:, :, None] & columns[:, None])
    for lines in (rows, columns):  # one rectangle without holes
        assert (torch.nn.functional.pad(lines.int(), (1, 1)).diff(dim=1).abs().sum(dim=1) <= 2).all()
    torch.testing.assert_close(kept, 1 - replaced.float().mean(dim=(1, 2)))


def test_cutmixs_windows_are_torchvisions() -> None:
    """Sides of the square root of what is not kept, around a center anywhere, cut off at the edges."""
    count, height, width = 20_000, 8, 12
    replaced, _ = replaced_by(CutMix(2, per_sample=True), count, height, width)
    rng = np.random.default_rng(3)
    lam = rng.beta(1.0, 1.0, count)
    half = 0.5 * np.sqrt(1 - lam)
    shares = np.ones(count)
    for size in (height, width):
        center, reach = rng.integers(0, size, count), (half * size).astype(int)
        shares *= (np.minimum(center + reach, size) - np.maximum(center - reach, 0)) / size
    assert ks_2samp(replaced.float().mean(dim=(1, 2)), shares.astype(np.float32)).pvalue > 1e-7


def test_sides_of_windows_may_be_drawn_between_two_shares_of_the_image() -> None:
    """timm's cutmix_minmax: both sides and the place are whole numbers, each as likely as the others."""
    replaced, _ = replaced_by(CutMix(2, minmax=(0.2, 0.8), per_sample=True), 20_000, 10, 20)
    for axis, side in ((2, 10), (1, 20)):
        lines = replaced.any(dim=axis)
        lengths, starts = lines.sum(dim=1).numpy(), lines.int().argmax(dim=1).numpy()
        allowed = np.arange(int(side * 0.2), int(side * 0.8))
        assert chisquare(np.bincount(lengths, minlength=side + 1)[allowed]).pvalue > 1e-4
        assert set(lengths.tolist()) == set(allowed.tolist())
        for length in allowed:
            some = starts[lengths == length]
            assert chisquare(np.bincount(some, minlength=side - length)).pvalue > 1e-6


def test_each_sample_is_mixed_in_its_own_way_if_both_draw_per_sample() -> None:
    """timm's mode "elem", which chooses Mixup or CutMix for each sample."""
    images, labels = batch(2000, 8, 8)
    # A window is never empty, and never the whole picture.
    mixes = Mixup(CLASSES, per_sample=True), CutMix(CLASSES, per_sample=True, minmax=(0.3, 0.8))
    results = mixed(Compose([AS_FLOATS, RandomChoice(mixes, (0.3, 0.7))]), images, labels)
    given = Batch(images.float(), Draws(0, 0, np.arange(2000)), np.full((2000, 2), 8), labels)
    one, other = (mix.apply(given, f"Compose/RandomChoice 0/{number}") for number, mix in enumerate(mixes))
    assert one.labels is not None
    assert other.labels is not None
    is_one = (results[0] == one.images).flatten(1).all(dim=1)
    assert_share(is_one, 0.3)
    assert torch.equal(results[0], torch.where(is_one[:, None, None, None], one.images, other.images))
    assert torch.equal(results[1], torch.where(is_one[:, None], one.labels, other.labels))


@pytest.mark.parametrize("make", [Mixup, partial(CutMix, minmax=(0.5, 0.6))])
def test_p_is_how_often_anything_is_mixed(make: Any) -> None:
    images, labels = batch(2000, 4, 4)
    for p in (0.0, 0.3):
        found, targets = mixed(Compose([AS_FLOATS, make(CLASSES, p=p, per_sample=True)]), images, labels)
        untouched = targets.max(dim=1).values > 1 - 1e-6
        assert_share(~untouched, p)
        assert torch.equal(targets[untouched], one_hot(labels)[untouched])
        assert torch.equal(found[untouched], images[untouched].float())


def test_label_smoothing_is_spread_over_all_classes() -> None:
    images, labels = batch()
    _, targets = mixed(CutMix(CLASSES, p=0.0, label_smoothing=0.1), images, labels)
    torch.testing.assert_close(targets, one_hot(labels) * 0.9 + 0.01)
    _, mixed_targets = mixed(CutMix(CLASSES, label_smoothing=0.1), images, labels)
    torch.testing.assert_close(mixed_targets.sum(dim=1), torch.ones(12))


def test_bfloat16_images_are_mixed_by_exact_shares() -> None:
    images, labels = batch(64)
    as_bfloat = ToDtype(torch.bfloat16)
    exact, targets = mixed(Compose([AS_FLOATS, Mixup(CLASSES)]), images, labels)
    rounded, same = mixed(Compose([as_bfloat, Mixup(CLASSES)]), images, labels)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(targets, same)
    torch.testing.assert_close(rounded.float(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize(("make", "copies"), [(Mixup, 1), (CutMix, 2)])
def test_what_is_drawn_goes_to_the_device_in_few_copies(
    make: type[Mixup] | type[CutMix], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_device = Mock(side_effect=lambda values, device: values)
    for module in ("mix", "erasing"):
        monkeypatch.setattr(f"shardio.augment.{module}.to_device", to_device)
    images = torch.zeros(4, 3, 6, 5, dtype=torch.uint8)
    mixed(Compose([AS_FLOATS, make(CLASSES, per_sample=True)]), images, torch.arange(4))
    assert to_device.call_count == copies
