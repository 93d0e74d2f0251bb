"""A user who trains without the kernels in C is told once what it costs, and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardio.kernels.built
from shardio import ShardLoader
from shardio.augment import CenterCrop
from shardio.kernels.built import missing_kernels

COSTS = {
    "_resample": "transforms do not work",
    "_pixels": "transforms of color and geometry",
    "_rowcopy": "kills the process by SIGBUS",
    "_rowread": "waits for the GIL",
}
HIDE = """
import sys
names = ('rowcopy', 'rowread', 'resample', 'pixels')
sys.modules.update(dict.fromkeys(f'shardio.kernels._{n}' for n in names))
"""


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """without(names): a state as in a process that has just begun, where these modules were not built."""

    def hide(*names: str, forced: str = "") -> None:
        costs = [(None if name in names else object(), cost) for name, cost in COSTS.items()]
        monkeypatch.setattr(shardio.kernels.built, "_COSTS", costs)
        monkeypatch.setattr(shardio.kernels.built, "_FORCED", forced)
        monkeypatch.setattr(shardio.kernels.built, "_warned", False)

    return hide


def warned_by(work: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return found


def crop() -> None:
    CenterCrop(2)(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))


@pytest.mark.parametrize("names", [("_resample",), ("_rowcopy", "_rowread"), tuple(COSTS)])
def test_a_missing_kernel_is_told_once_with_its_cost_and_the_cure(
    names: tuple[str, ...], without: Callable[..., None], make_set: Callable[..., Path]
) -> None:
    path = make_set(20)

    def load() -> None:
        ShardLoader(path, 4, device="cpu").close()

    for first, second in ((load, crop), (crop, load)):
        without(*names)
        (warning,) = warned_by(first)
        assert warning.category is RuntimeWarning
        assert warning.filename == __file__
        text = str(warning.message)
        assert [name for name, cost in COSTS.items() if cost in text] == [name for name in COSTS if name in names]
        assert "Install a C compiler" in text
        assert "pip install --force-reinstall" in text
        assert "SHARDIO_KERNEL=numpy" in text
        assert warned_by(first) == warned_by(second) == []


def test_nothing_is_told_where_all_are_there_or_the_user_has_chosen(without: Callable[..., None]) -> None:
    without()
    assert missing_kernels() == ""
    assert warned_by(crop) == []
    without(*COSTS, forced="numpy")
    assert warned_by(crop) == []


def test_the_costs_are_of_the_modules_that_are_built() -> None:
    kernels = shardio.kernels.built
    assert [kernel for kernel, _ in kernels._COSTS] == [getattr(kernels, name) for name in COSTS]
    assert all(theirs in ours for (_, ours), theirs in zip(kernels._COSTS, COSTS.values(), strict=True))


def python(code: str, **environ: str) -> list[str]:
    command = [sys.executable, "-c", code]
    environ = {**os.environ, "SHARDIO_KERNEL": "", **environ}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_kernel_that_is_not_here_is_one_line_on_the_command_line() -> None:
    command = [sys.executable, "-m", "shardio", "--version"]
    environ = {**os.environ, "SHARDIO_KERNEL": "sse9"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("shardio: error: environment variable SHARDIO_KERNEL: expected one of numpy")
    assert result.stderr.count("\n") == 1


def test_a_program_without_kernels_loads_with_one_warning_and_transforms_are_refused(
    make_set: Callable[..., Path],
) -> None:
    script = f"""{HIDE}
import warnings
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    from shardio import ShardLoader
    from shardio.augment import RandomGrayscale, RandomResizedCrop
    print(len(found))
    for transform in (None, RandomResizedCrop(4), RandomGrayscale(1.0)):
        with ShardLoader({str(make_set(20))!r}, 4, device="cpu", transform=transform) as loader:
            try:
                print(len(list(loader)))
            except ImportError as error:
                print("C compiler" in str(error))
    print(*[warning.category.__name__ for warning in found])
    print(loader.stats()["kernels"])
"""
    expected = "{'copy': 'numpy', 'read': 'Python', 'resample': 'torch', 'pixels': 'none'}"
    assert python(script) == ["0", "5", "True", "True", "RuntimeWarning", expected]
    assert python(script, SHARDIO_KERNEL="numpy") == ["0", "5", "True", "True", "", expected]


def test_the_version_tells_which_kernels_run_and_imports_neither_torch_nor_numpy() -> None:
    show = """
import sys
from shardio.cli.main import cli
try:
    cli(["--version"], prog_name="shardio")
finally:
    print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    first, second, imported = python(show)
    assert first == f"shardio, version {shardio.__version__}"
    assert second.startswith("kernels: copy by ")
    assert imported == "[]"
    first, second, third, _ = python(HIDE + show)
    assert first == f"shardio, version {shardio.__version__}"
    assert second == "kernels: copy by numpy, read by Python, resample by torch, pixels by none"
    assert "Install a C compiler" in third


def test_every_kernel_is_built_with_flags_that_give_the_same_pixels_on_all_processors() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    modules = re.findall(r'\{ name = "shardio\.kernels\.(_\w+)".*extra-compile-args = \[(.*?)\]', text)
    assert {name for name, _ in modules} == set(COSTS)
    assert all('"-O3"' in flags and '"-ffp-contract=off"' in flags for _, flags in modules)
    sources = (Path(shardio.kernels.built.__file__).parent / f"{name}.c" for name in COSTS)
    assert not any("pragma GCC optimize" in source.read_text("utf-8") for source in sources)
