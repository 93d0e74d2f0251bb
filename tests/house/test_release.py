"""What is published says one version, has all of its files, and is allowed with the lowest versions that it names."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_wheel
import pytest
from places import ROOT

from shardio import __version__

MODULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "shardio").rglob("*.py"))
KERNELS = [f"shardio/kernels/{name}.cpython-311-x86_64-linux-gnu.so" for name in sorted(check_wheel.KERNELS)]
WHOLE = [*MODULES, *KERNELS, *check_wheel.DATA, "shardio-0.1.0.dist-info/METADATA"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_every_file_says_the_same_version() -> None:
    assert re.search(r"^version: (.*)$", text_of("CITATION.cff"), re.MULTILINE)[1] == __version__  # type: ignore[index]
    assert re.search(r"^## (\S+),", text_of("CHANGELOG.md"), re.MULTILINE)[1] == __version__  # type: ignore[index]
    assert re.search(r'^  version: "(.*)"$', text_of("conda/recipe.yaml"), re.MULTILINE)[1] == __version__  # type: ignore[index]


def test_every_entry_of_the_newest_version_begins_with_the_promise_that_it_touches() -> None:
    promises = re.findall(r"^\| \[(\w+)\]\(#", text_of("docs/promises.md"), re.MULTILINE)
    assert promises == ["Format", "Order", "Pixels", "API", "JSON"]
    newest = text_of("CHANGELOG.md").partition("\n## ")[2].partition("\n## ")[0]
    one = "|".join(promises)
    prefix = re.compile(rf"\*\*(None|({one})(, ({one}))*)\*\*: ")
    entries = re.findall(r"^- (.*)$", newest, re.MULTILINE)
    assert entries
    assert [entry for entry in entries if not prefix.match(entry)] == []


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    own = re.search(r"^dependencies = \[(.*?)^\]", text_of("pyproject.toml"), re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]
    needed = set(re.findall(r'"([\w-]+)>=([\d.]+)["; ]', own))
    recipe = re.search(r"^  run:\n(.*?)\n\n", text_of("conda/recipe.yaml"), re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]
    names = {"pytorch": "torch", "python-zlib-ng": "zlib-ng"}
    assert {(names.get(name, name), least) for name, least in re.findall(r"- ([\w-]+) >=([\d.]+)", recipe)} == needed


def test_the_lowest_versions_are_those_that_the_package_allows() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", text_of("constraints-lowest.txt"), re.MULTILINE))
    least = dict(re.findall(r'"([\w-]+)>=([\d.]+)["; ]', text_of("pyproject.toml")))
    needed = {"torch", "numpy", "pillow", "simplejpeg", "tqdm", "click", "jinja2", "zlib-ng", "pytest", "pytest-xdist"}
    needed |= {"jsonschema"}
    assert needed | {"pyarrow", "scipy", "distributed", "fsspec", "aiohttp"} == set(pins)
    for name, version in pins.items():
        numbers, lowest = (tuple(map(int, text.split("."))) for text in (version, least[name]))
        assert numbers[: len(lowest)] == lowest, name
        assert not any(numbers[len(lowest) :]), name


def test_workflows_pin_each_action_to_a_commit_and_name_its_version() -> None:
    workflows = [text_of(str(path)) for path in sorted((ROOT / ".github" / "workflows").iterdir())]
    used = re.findall(r"uses: (.*)$", "\n".join(workflows), re.MULTILINE)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    pins = dict(line.split("@") for line in used)
    assert sorted(set(used)) == sorted(f"{action}@{pin}" for action, pin in pins.items())


def test_workflows_run_files_that_exist() -> None:
    workflows = [text_of(str(path)) for path in (ROOT / ".github" / "workflows").iterdir()]
    paths = re.findall(r"(?<![\w/.])(?:tests|tools)/[\w/.]*\w", "\n".join(workflows))
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (WHOLE, ""),
        ([name for name in WHOLE if "_pixels" not in name or name in MODULES], "lacks the kernel _pixels"),
        ([name for name in WHOLE if name != "shardio/loading/cuda.py"], "lacks shardio/loading/cuda.py"),
        ([name for name in WHOLE if name != "shardio/viewing/report.html"], "lacks shardio/viewing/report.html"),
        ([*WHOLE, "shardio/kernels/_rowcopy.c"], "has shardio/kernels/_rowcopy.c, which no user needs"),
        ([*WHOLE, "tests/conftest.py"], "has tests/conftest.py, which no user needs"),
    ],
    ids=["whole", "no kernel", "no module", "no template", "a source", "a test"],
)
def test_a_wheel_is_looked_into(names: list[str], fault: str) -> None:
    faults = check_wheel.faults_of_wheel(names)
    assert len(faults) == bool(fault)
    assert all(found.startswith(fault) for found in faults)


@pytest.mark.parametrize("address", ["", "https://example.org/shardio"])
def test_links_on_a_package_index_lead_into_the_repository_or_are_text(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("setup.py", "README.md", "pyproject.toml", "shardio/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write(f'\nRepository = "{address}"\n' if address else "")
    told: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: told.update(options))
    runpy.run_path(str(tmp_path / "setup.py"))
    links = re.findall(r"\]\(([^)]*)\)", told["long_description"])
    assert [link for link in links if not link.startswith(f"{address}/")] == []
    assert bool(links) == bool(address)
    assert "memory-mapped shards" in told["long_description"]


def test_an_sdist_is_what_a_clone_is(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    clone = subprocess.run(["git", "checkout-index", "--all", f"--prefix={tmp_path}/"], cwd=ROOT, check=False)
    if clone.returncode:
        pytest.skip("this is no clone")
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tmp_path, check=True)
    names = [f"shardio/{name}" for name in (tmp_path / "shardio.egg-info/SOURCES.txt").read_text("utf-8").splitlines()]
    assert check_wheel.faults_of_sdist(names) == []
    without = [name for name in names if not name.endswith("/Makefile")]
    assert check_wheel.faults_of_sdist(without) == ["lacks Makefile"]
    assert check_wheel.faults_of_sdist([*names, "shardio/shardio/a.so"]) == ["has shardio/a.so, which was built"]


def test_a_build_without_a_compiler_ends_in_one_sentence_that_names_what_to_install(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path]
    environ = {**os.environ, "CC": "false"}
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("shardio: error: the C compiler, false, did not build shardio.kernels._pixels: install gcc")
    assert "apt install gcc python3-dev" in line
