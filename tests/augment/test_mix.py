"""Mixup and CutMix as torchvision defines them, from the batch's own numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from drawn import assert_share
from scipy.stats import beta, chisquare, ks_2samp, kstest

from shardio.augment import Compose, CutMix, Mixup, RandomChoice, ToDtype
from shardio.augment.chain import Transform
from shardio.augment.mix import beta_quantiles

CLASSES = 10
AS_FLOATS = ToDtype(torch.float32)


def batch(count: int = 12, height: int = 20, width: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Every picture is of one gray level: its number."""
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, height, width)
    return images.contiguous(), torch.arange(count) % CLASSES


def mixed(transform: Transform, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = transform(*tensors, **{"seed": 0, "indices": range(len(tensors[0])), **options})
    assert isinstance(images, torch.Tensor)
    assert isinstance(labels, torch.Tensor)
    return images, labels


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


@pytest.mark.parametrize("per_sample", [False, True])
def test_cutmix_is_a_window_of_the_partner_and_a_share_as_large(per_sample: bool) -> None:
    for seed in range(20):
        images, labels = batch()
        found, targets = mixed(CutMix(CLASSES, per_sample=per_sample), images, labels, seed=seed)
        assert found.dtype == torch.uint8
        shares = []
        for i in range(12):
            is_other = found[i, 0] == (i - 1) % 12
            assert (is_other | (found[i, 0] == i)).all()
            rows, columns = is_other.any(dim=1), is_other.any(dim=0)
            # One rectangle without holes.
            assert torch.equal(is_other, rows[:, None] & columns[None, :])
            for lines in (rows, columns):
                assert (lines.int().diff().abs().sum() + lines[0].int() + lines[-1].int()) <= 2
            shares.append(1 - is_other.float().mean())
        share = torch.stack(shares)
        assert per_sample or (share == share[0]).all()
        expected = one_hot(labels) * share[:, None] + one_hot(labels.roll(1)) * (1 - share[:, None])
        torch.testing.assert_close(targets, expected, atol=1e-5, rtol=0)


def test_cutmixs_windows_are_torchvisions() -> None:
    """Sides of the square root of what is not kept, around a center anywhere, cut off at the edges: of 40,000 windows
    the mean share that is covered, against the same formula with random numbers of numpy."""
    count, height, width = 20_000, 8, 12
    images, labels = torch.zeros(count, 1, height, width, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64)
    images[1::2] = 1
    found, _ = mixed(CutMix(2, per_sample=True), images, labels, seed=9)
    covered = (found != images).float().mean(dim=(1, 2, 3)).numpy()
    rng = np.random.default_rng(3)
    lam = rng.beta(1.0, 1.0, count)
    half = 0.5 * np.sqrt(1 - lam)
    shares = np.ones(count)
    for size in (height, width):
        center, reach = rng.integers(0, size, count), (half * size).astype(int)
        shares *= (np.minimum(center + reach, size) - np.maximum(center - reach, 0)) / size
    assert ks_2samp(covered, shares.astype(np.float32)).pvalue > 1e-7


def test_sides_of_windows_may_be_drawn_between_two_shares_of_the_image() -> None:
    """timm's cutmix_minmax: both sides and the place are whole numbers, each as likely as the others."""
    count, height, width = 20_000, 10, 20
    images, labels = torch.zeros(count, 1, height, width, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64)
    images[1::2] = 1
    labels[1::2] = 1
    found, targets = mixed(CutMix(2, minmax=(0.2, 0.8), per_sample=True), images, labels, seed=9)
    replaced = (found != images)[:, 0]
    for axis, side in ((2, height), (1, width)):
        lines = replaced.any(dim=axis)
        lengths, starts = lines.sum(dim=1).numpy(), lines.int().argmax(dim=1).numpy()
        allowed = np.arange(int(side * 0.2), int(side * 0.8))
        assert chisquare(np.bincount(lengths, minlength=side + 1)[allowed]).pvalue > 1e-4
        assert set(lengths.tolist()) == set(allowed.tolist())
        for length in allowed:
            some = starts[lengths == length]
            assert chisquare(np.bincount(some, minlength=side - length)).pvalue > 1e-6
    covered = replaced.float().mean(dim=(1, 2))
    torch.testing.assert_close(targets[torch.arange(count), labels], 1 - covered)


def test_each_sample_is_mixed_in_its_own_way_if_both_draw_per_sample() -> None:
    """timm's mode "elem", which chooses Mixup or CutMix for each sample."""
    count = 2000
    images = torch.arange(count, dtype=torch.float32)[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    labels = torch.arange(count) % CLASSES
    mix = RandomChoice([Mixup(CLASSES, per_sample=True), CutMix(CLASSES, per_sample=True)], (0.3, 0.7))
    found, targets = mixed(Compose([AS_FLOATS, mix]), images.byte(), labels, seed=2)
    images = images.byte().float()
    others, other_labels = images.roll(1, 0), labels.roll(1)
    own = (found - others).mean(dim=(1, 2, 3)) / (images - others).mean(dim=(1, 2, 3))
    is_even = (found == found[:, :1, :1, :1]).flatten(1).all(dim=1)
    pure = is_even & ((found == images) | (found == others)).flatten(1).all(dim=1)
    share = is_even[~pure].float().mean().item()
    # A window as small as nothing, or as large as the image, is even, too: those are left out.
    kept = CutMix(CLASSES, per_sample=True)(images.byte(), labels, seed=3)[0] == images
    windows = 1 - (kept.flatten(1).all(dim=1) | ~kept.flatten(1).any(dim=1)).float().mean().item()
    expected = 0.3 / (0.3 + 0.7 * windows)
    assert abs(share - expected) < 5 * math.sqrt(0.21 / count)
    wanted = one_hot(labels) * own[:, None] + one_hot(other_labels) * (1 - own[:, None])
    torch.testing.assert_close(targets, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [Mixup, CutMix])
def test_p_is_how_often_anything_is_mixed(make: type[Mixup] | type[CutMix]) -> None:
    images, labels = batch(2000, 4, 4)
    found, targets = mixed(Compose([AS_FLOATS, make(CLASSES, p=0.3, per_sample=True)]), images, labels, seed=1)
    is_hard = targets.max(dim=1).values > 1 - 1e-6
    if make is Mixup:
        share = 1 - is_hard.float().mean().item()
        assert abs(share - 0.3) < 5 * math.sqrt(0.21 / 2000)
    untouched = (found == images).flatten(1).all(dim=1)
    assert torch.equal(targets[untouched & is_hard], one_hot(labels)[untouched & is_hard])
    none, hard = mixed(Compose([AS_FLOATS, make(CLASSES, p=0.0)]), images, labels)
    assert torch.equal(none, images.float())
    assert torch.equal(hard, one_hot(labels))


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
    sent = []

    def note(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(values)
        return values

    for module in ("mix", "erasing"):
        monkeypatch.setattr(f"shardio.augment.{module}.to_device", note)
    images = torch.zeros(4, 3, 6, 5, dtype=torch.uint8)
    mixed(Compose([AS_FLOATS, make(CLASSES, per_sample=True)]), images, torch.arange(4))
    assert len(sent) == copies
