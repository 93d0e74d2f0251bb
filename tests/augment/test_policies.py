"""Policies draw manipulations and magnitudes as their papers and torchvision or timm do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from drawn import assert_distributed, assert_independent, assert_share, assert_shares, noted
from numpy.typing import NDArray

from shardio.augment import AutoAugment, RandAugment, TimmRandAugment, TrivialAugmentWide
from shardio.augment.policies import _LEARNED
from shardio.augment.steps import FILL_AT, SAMPLING_AT, Op, Sampling, Step

COUNT = 50_000
SHAPE = (1, 331, 662)  # 150 and 300 pixels are the most of a translation
SPACE = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
         "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize")  # fmt: skip
BY_OP = {Op.NOTHING: "Identity", Op.BRIGHTNESS: "Brightness", Op.SATURATION: "Color", Op.CONTRAST: "Contrast",
         Op.SHARPNESS: "Sharpness", Op.POSTERIZE: "Posterize", Op.SOLARIZE: "Solarize", Op.INVERT: "Invert",
         Op.AUTOCONTRAST: "AutoContrast", Op.EQUALIZE: "Equalize", Op.SOLARIZE_ADD: "SolarizeAdd"}  # fmt: skip
FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")


def told(step: Step) -> tuple[NDArray[np.str_], NDArray[np.float64]]:
    """Returns the name of what is done to each sample, and its magnitude; maps that move nothing are "still"."""
    names = np.array([BY_OP.get(Op(code), "still") for code in range(len(Op))])[step.codes].astype("<U12")
    a, b, c, d, _, f = step.values[:, :6].T
    magnitudes = a.copy()
    for factor in FACTORS:
        magnitudes[names == factor] -= 1
    is_map = step.codes == Op.AFFINE
    for name, chosen, values in (
        ("ShearX", (b != 0) & (d == 0), b),
        ("ShearY", (d != 0) & (b == 0), d),
        ("TranslateX", (c != 0) & (b == 0) & (d == 0), -c),
        ("TranslateY", (f != 0) & (b == 0) & (d == 0), -f),
        ("Rotate", (b != 0) & (d != 0), np.degrees(np.arctan2(d, a))),
    ):
        names[is_map & chosen] = name
        magnitudes[is_map & chosen] = values[is_map & chosen]
    return names, magnitudes


def assert_equally_probable(names: NDArray[np.str_], space: Sequence[str]) -> None:
    number_of = {name: number for number, name in enumerate(space)}
    assert_shares([number_of[name] for name in names.tolist()], [1 / len(space)] * len(space))


AT_9_OF_31 = {
    "ShearX": 0.09, "ShearY": 0.09, "TranslateX": 90.0, "TranslateY": 45.0, "Rotate": 9.0,
    "Brightness": 0.27, "Color": 0.27, "Contrast": 0.27, "Sharpness": 0.27, "Posterize": 7.0, "Solarize": 178.5,
}  # fmt: skip
UNSIGNED = {"Posterize", "Solarize"}


def test_randaugment_draws_each_manipulation_and_sign_alike_and_one_magnitude() -> None:
    drawn = [told(step) for step in noted(RandAugment(3), COUNT, SHAPE).steps]
    assert len(drawn) == 3
    for names, magnitudes in drawn:
        assert_equally_probable(names, SPACE)
        for name, magnitude in AT_9_OF_31.items():
            values = magnitudes[names == name]
            assert np.allclose(np.abs(values), magnitude)
            assert_share(values < 0, 0.0 if name in UNSIGNED else 0.5)
    assert_independent(*(np.unique(names, return_inverse=True)[1] for names, _ in drawn))


@pytest.mark.parametrize(
    ("magnitude", "bins", "expected"),
    [
        (30, 31, {"ShearX": 0.3, "TranslateX": 300, "TranslateY": 150, "Rotate": 30, "Color": 0.9, "Posterize": 4,
                  "Solarize": 0}),
        (4, 11, {"ShearX": 0.12, "Brightness": 0.36, "Posterize": 6, "Solarize": 153}),
        (0, 31, {"still": 1, "Brightness": 0, "Posterize": 8, "Solarize": 255}),
    ],
)  # fmt: skip
def test_magnitudes_of_other_bins_are_torchvisions(magnitude: int, bins: int, expected: dict[str, float]) -> None:
    names, magnitudes = told(noted(RandAugment(1, magnitude, bins), 20_000, SHAPE).steps[0])
    for name, value in expected.items():
        assert np.allclose(np.abs(magnitudes[names == name]), value), name


@pytest.mark.parametrize("bins", [4, 6, 16, 31, 52])
def test_thresholds_that_are_whole_gray_levels_are_exact(bins: int) -> None:
    for number in range(bins):
        if number * 255 % (bins - 1) == 0:
            names, magnitudes = told(noted(RandAugment(1, number, bins), 200, SHAPE).steps[0])
            assert (magnitudes[names == "Solarize"] == 255 - number * 255 // (bins - 1)).all()


def test_trivialaugment_draws_each_manipulation_bin_and_sign_alike() -> None:
    (step,) = noted(TrivialAugmentWide(), 100_000, SHAPE).steps
    names, magnitudes = told(step)
    for name, most in {"ShearX": 0.99, "ShearY": 0.99, "Rotate": 135.0, **dict.fromkeys(FACTORS, 0.99)}.items():
        bins = magnitudes[names == name] / most * 30
        assert np.allclose(bins, np.rint(bins), atol=1e-9)
        nothing = 2 / 62 if name in FACTORS else 0.0  # a map of bin 0 is still
        others = (1 - nothing) / 60
        assert_shares(np.rint(bins).astype(int) + 30, [*[others] * 30, nothing, *[others] * 30])
        assert_share(names == name, (1 if name in FACTORS else 30 / 31) / 14)
    for name in ("TranslateX", "TranslateY"):
        values = magnitudes[names == name]
        # int() of 32 k / 30
        assert set(np.abs(values)) == {math.trunc(32 * k / 30) for k in range(1, 31)}
        assert_share(values < 0, 0.5)
    bits = magnitudes[names == "Posterize"]
    assert_shares(bits.astype(int), [0, 0, *(np.bincount([8 - round(k / 5) for k in range(31)])[2:] / 31)])
    thresholds = magnitudes[names == "Solarize"] / 255 * 30
    assert_shares(np.rint(thresholds).astype(int), [1 / 31] * 31)
    for name in ("Identity", "AutoContrast", "Equalize", "Posterize", "Solarize"):
        assert_share(names == name, 1 / 14)


@pytest.mark.parametrize("policy", _LEARNED)
def test_autoaugment_draws_pairs_alike_and_each_part_with_its_probability(policy: Any) -> None:
    pairs = [[part.split() for part in pair.split(",")] for pair in _LEARNED[policy].split(";")]
    assert len(pairs) == 25
    steps = noted(AutoAugment(policy), 100_000, SHAPE).steps
    assert len(steps) == 2
    for place, step in enumerate(steps):
        names, magnitudes = told(step)
        for name in {pair[place][0] for pair in pairs}:
            mine = [pair[place] for pair in pairs if pair[place][0] == name]
            assert_share(names == name, sum(int(tenths) for _, tenths, _ in mine) / 250)
            if name in FACTORS:
                found = magnitudes[names == name]
                most = max(int(number) for _, tenths, number in mine if tenths != "0")
                assert np.isclose(np.abs(found).max(), 0.9 * most / 9)
                assert_share(found[found != 0] < 0, 0.5)
    # The parts of a pair: those that rotate by 30 degrees are equalized next in 6 of 10 cases.
    if policy == "imagenet":
        (first, magnitudes), (second, _) = map(told, steps)
        strong = (first == "Rotate") & np.isclose(np.abs(magnitudes), 30)
        assert_share(second[strong] == "Equalize", 0.6)
        assert_share(strong, 0.4 / 25)


TIMM = ("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast",
        "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY")  # fmt: skip
TIMM_SHAPE = (1, 100, 200)


def drawn_by(config: str) -> list[tuple[NDArray[np.str_], NDArray[np.float64]]]:
    return [told(step) for step in noted(TimmRandAugment(config, fill=0), COUNT, TIMM_SHAPE).steps]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("rand-m9-p1-inc1", {"Posterize": 1, "Solarize": 26, "Color": 0.81}),
        ("rand-m9-p1", {"Posterize": 3, "Solarize": 230, "Color": 0.72}),
        ("rand-m9-p1-inc0", {"Posterize": 3, "Solarize": 230, "Brightness": 0.72}),
    ],
)
def test_magnitudes_of_timm_at_level_9(config: str, expected: dict[str, float]) -> None:
    expected = {"Rotate": 27, "SolarizeAdd": 99, "ShearX": 0.27, "ShearY": 0.27, "TranslateX": 81, "TranslateY": 40.5,
                **expected}  # fmt: skip
    drawn = drawn_by(config)
    assert len(drawn) == 2
    for names, magnitudes in drawn:
        assert_equally_probable(names, TIMM)
        for name, value in expected.items():
            assert np.allclose(np.abs(magnitudes[names == name]), value), name
        for name in ("Rotate", "ShearX", "TranslateY", *(FACTORS if "inc1" in config else ())):
            assert_share(magnitudes[names == name] < 0, 0.5)


def test_levels_of_timm_are_normal_and_cut_off() -> None:
    from scipy import stats

    def levels_of(parts: str) -> NDArray[np.float64]:
        ((names, magnitudes),) = drawn_by(f"rand-{parts}-p1-n1")
        return np.abs(magnitudes[names == "ShearX"]) / 0.03

    levels = levels_of("m7-mstd1.5-inc1")
    inside = levels < 10
    assert_share(~inside, stats.norm(7, 1.5).sf(10))
    assert_distributed(levels[inside], stats.truncnorm(-np.inf, 2, 7, 1.5).cdf)
    assert_distributed(levels_of("m6-mstd101"), stats.uniform(0, 6).cdf)
    assert_distributed(levels_of("m9-mstdinf"), stats.uniform(0, 9).cdf)
    assert np.allclose(levels_of("m9-mmax4"), 4)


def test_timm_applies_each_manipulation_with_its_probability() -> None:
    for config, p, count in (("rand-m9", 0.5, 2), ("rand-m9-p0.2-n3", 0.2, 3), ("rand-m9-p0.7-n1", 0.7, 1)):
        applied = [names != "Identity" for names, _ in drawn_by(config)]
        assert len(applied) == count
        for one in applied:
            assert_share(one, p)
        assert_independent(*applied)
    assert drawn_by("rand-n0") == []


def test_timm_reads_pictures_bilinear_or_bicubic_by_chance() -> None:
    interpolation: Any
    for interpolation, bilinear, bicubic in (("random", 0.5, 0.5), ("bilinear", 1, 0), ("bicubic", 0, 1)):
        transform = TimmRandAugment("rand-m9-p1-n1", fill=(1, 2, 3), interpolation=interpolation)
        (step,) = noted(transform, COUNT, (3, 8, 8)).steps
        maps = step.codes == Op.AFFINE
        assert (step.values[maps, FILL_AT:] == (1, 2, 3)).all()
        assert_share(step.values[maps, SAMPLING_AT] == Sampling.PILLOW_BILINEAR, bilinear)
        assert_share(step.values[maps, SAMPLING_AT] == Sampling.PILLOW_BICUBIC, bicubic)
