"""The code and the commands of the documents run, and the bytes and figures that they show are right."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import pkgutil
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import run_forked
from command import shardio as run_command
from documents import code_blocks
from pictures import random_picture, write_jpeg
from places import DATA, ROOT
from storages import draw_imagenet, write_archives, write_kaggle, write_list, write_webdataset

import shardio.augment
import shardio.errors
from shardio.cli.main import cli
from shardio.conversion.images.headers import MAX_PIXELS, MAX_SOURCE_NBYTES
from shardio.errors import Reason
from shardio.reading.shardset import _PUBLIC

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
GUIDE = ROOT / "docs" / "guide"
GOLDEN = DATA / "golden"
MAKES_OUT = "shardio convert imagenet/ out/"

PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "docs/guide", "benchmarks", "examples")
    for path in (ROOT / folder).glob("*.md")
)


@pytest.fixture(scope="module")
def collections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with imagenet/, which has train and val, a small one in other storages, and some as parquet in
    imagenet-1k/, flat ones in photos/ and tiles/. out/ is the set of imagenet/."""
    folder = tmp_path_factory.mktemp("collections")
    rng = np.random.default_rng(0)
    for split, count in (("train", 260), ("val", 10)):
        for number in range(count):
            name = f"n0144076{number % 3}"
            write_jpeg(folder / "imagenet" / split / name / f"{number}.JPEG", random_picture(rng, 40, 60))
    shutil.copytree(folder / "imagenet/val/n01440760", folder / "photos")
    shutil.copytree(folder / "imagenet/val", folder / "tiles")
    lines = [f"{path.stem},breed {number % 2}" for number, path in enumerate(sorted((folder / "photos").iterdir()))]
    (folder / "breeds.csv").write_text("\n".join(["image_id,breed", *lines]))
    small = draw_imagenet(folder / "small", sound=True)
    write_archives(small, folder / "downloads")
    write_kaggle(small, folder / "kaggle")
    write_list(small, folder / "images.csv")
    write_webdataset(small, folder / "tars")
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted(folder.glob("imagenet/val/*/*"))]
    (folder / "imagenet-1k" / "data").mkdir(parents=True)
    table = pa.table({"image": images, "label": [number % 3 for number in range(len(images))]})
    pq.write_table(table, folder / "imagenet-1k" / "data" / "train-00000-of-00001.parquet")
    run_in(folder, shlex.split(MAKES_OUT))
    return folder


def test_the_guide_says_how_its_set_was_made() -> None:
    assert f"    {MAKES_OUT}\n" in (GUIDE / "README.md").read_text(encoding="utf-8")


# tests/conversion/test_collections.py runs the recipes of this page, each on a copy of its collection.
OF_COLLECTIONS = "docs/guide/collections.md"


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "llms.txt",
        *(page for page in PAGES if page.startswith("docs/guide/") and page != OF_COLLECTIONS),
    ],
)
def test_every_code_block_of_the_readme_and_the_guide_runs(page: str, collections: Path, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for collection in collections.iterdir():
        # A page that makes the set itself finds none.
        if collection.name != "out" or MAKES_OUT not in text:
            (tmp_path / collection.name).symlink_to(collection)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} <= {"bash", "python"}
    for language, block in blocks:
        if language == "python":
            script = tmp_path / "block.py"
            script.write_text(block, encoding="utf-8")
            run_in(tmp_path, ["block.py"])
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            if words[0] == "shardio":
                run_in(tmp_path, words)
            else:
                # These set up a machine. The continuous integration runs the last two in a fresh clone.
                assert line in ("pip install .", "make demo", "make test")


def run_in(folder: Path, command: list[str]) -> None:
    run = run_command if command[0] == "shardio" else partial(run_forked, command[0])
    result = run(*command[1:], cwd=folder)
    assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"


def test_the_page_for_assistants_is_short() -> None:
    assert len((ROOT / "llms.txt").read_text(encoding="utf-8").splitlines()) <= 60


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make test", "make demo"):
        assert f"\n{command}\n" in README
        assert f"\n{command}\n" in script


@pytest.mark.parametrize(("page", "least"), [("README.md", 4), ("docs/guide/questions.md", 5)])
def test_the_figures_of_a_page_are_those_of_the_results(page: str, least: int) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| `(python benchmarks/[^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) >= least
    for row, command in rows:
        (section,) = (section for section in sections_of_results().values() if command in quoted(section))
        for figure in re.findall(r"\d[\d,]*\.?\d*", row):
            if len(figure) > 1:
                assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d])", section), f"{command}: {figure}"


def sections_of_results() -> dict[str, str]:
    """The sections of RESULTS.md by heading."""
    sections = re.split(r"^## ", RESULTS, flags=re.MULTILINE)[1:]
    return {title: text for title, _, text in (section.partition("\n") for section in sections)}


def quoted(text: str) -> set[str]:
    """The quoted commands and names, also those that continue on the next line."""
    return {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)}


def test_the_results_begin_with_a_link_to_each_section() -> None:
    contents = RESULTS.partition("\n## ")[0]
    assert re.findall(r"\[([^\]]+)\]\(#", contents) == [*sections_of_results()]


def test_each_section_of_the_results_answers_a_question_with_a_command_and_a_date() -> None:
    for title, section in sections_of_results().items():
        assert title.endswith("?")
        assert any(re.match(r"(sudo )?python \w+/\S+\.py", code) for code in quoted(section)), title
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", section), title


def test_the_rates_in_the_text_of_the_readme_are_those_of_the_results() -> None:
    for figure in re.findall(r"(\S+) JPEGs a\s+second|reads (\S+) samples a second", README):
        assert f"| {''.join(figure)} |" in RESULTS


def test_the_worked_example_shows_the_bytes_of_the_golden_set() -> None:
    blocks = re.findall(r"^```hexdump (\S+)\n(.*?)^```", FORMAT, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == [
        *("train-00000.npy", "train-index.npy"),
        *("golden-arrays/train-order-0.npy", "golden-arrays/train-year.npy"),
    ]
    for name, block in blocks:
        data = (DATA / name if "/" in name else GOLDEN / name).read_bytes()
        for line in block.splitlines():
            if line == "*":
                continue
            offset, shown = int(line[:8], 16), bytes.fromhex(line[10:57])
            assert data[offset : offset + len(shown)] == shown, f"{name} at {offset:#x}"


GOLDEN_SETS = [GOLDEN, *(DATA / f"golden-{name}" for name in ("arrays", "latents"))]


@pytest.mark.parametrize("folder", GOLDEN_SETS, ids=lambda folder: folder.name)
def test_the_digest_of_a_golden_set_is_what_the_format_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads((folder / "manifest.json").read_bytes())["digest"] in FORMAT
    block, _ = code_blocks(FORMAT, "python")
    monkeypatch.chdir(folder)
    # The document's own code ends in an assertion. It leaves its file open.
    code = block.replace('json.load(open("manifest.json"))', 'json.loads(Path("manifest.json").read_text())')
    exec(code, {"Path": Path})


def test_every_reason_of_a_refusal_is_explained_and_no_other() -> None:
    section = FORMAT.partition("### rejects.jsonl")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z ]+)` \|", section, re.MULTILINE)) == set(get_args(Reason))


def test_the_sizes_that_are_stated_are_those_of_samples_and_rows() -> None:
    text = (GUIDE / "sizing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) bytes \| ([\d.]+) GB \|", text, re.MULTILINE)
    assert [int(side) for side, _, _ in rows] == [128, 160, 192, 224, 256, 336]
    for side, nbytes, total in rows:
        sample = int(side) ** 2 * 3
        assert (nbytes, total) == (f"{sample:,}", f"{(1_281_167 + 50_000) * (sample + 56) / 1e9:.1f}")


def test_every_message_that_is_explained_is_one_of_the_code() -> None:
    text = (GUIDE / "questions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(rows) >= 12
    sources = [ROOT / "setup.py", *(ROOT / "shardio").rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert [row for row in rows if row not in code] == []


def test_the_memory_that_is_stated_is_that_of_the_limits() -> None:
    text = " ".join((GUIDE / "convert.md").read_text(encoding="utf-8").split())
    pictures = f"{16 * MAX_PIXELS / 1e9:.1f} GB", f"({MAX_PIXELS / 1e6:.0f} megapixels)"
    files = f"{4 * MAX_SOURCE_NBYTES / 1e9:.1f} GB", f"({MAX_SOURCE_NBYTES / 1e6:.0f} MB)"
    assert re.search(".*?".join(map(re.escape, (*pictures, *files))), text)


def anchors(page: Path) -> set[str]:
    """The headings of the page as links name them behind "#"."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "llms.txt"])
def test_links_and_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, heading in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {name}"
        assert not heading or heading in anchors(target), f"{page}: {name}#{heading}"
    for name in re.findall(r"`((?:benchmarks|examples|tests|tools|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page}: {name}"
    for name in re.findall(r"`(?:sudo\s+)?python\s+(\S+\.py)", text):
        assert (ROOT / name).exists(), f"{page}: {name}"


TRANSFORMS = {name: value for name, value in vars(shardio.augment).items() if callable(value) and name[0] != "_"}
PUBLIC = {name: getattr(shardio, name) for name in {*shardio.__all__} - {*vars(shardio.errors)}} | TRANSFORMS
ATTRIBUTES = {*dir(shardio.ShardLoader), *dir(shardio.ShardSet), *dir(shardio.augment.Transform)}
ARGUMENTS = {name: set(inspect.signature(value).parameters) for name, value in PUBLIC.items()}
OPTIONS = {name: {option for part in command.params for option in part.opts} for name, command in cli.commands.items()}
FOLDERS = {path.name: path for path in (ROOT / "shardio").rglob("*") if (path / "__init__.py").exists()}
# Of NFS, SLURM, and other loaders.
FOREIGN = {"actimeo", "nconnect", "local_lock", "--mem", "ProcessPoolExecutor", "batching_method", "distributed"}
FOREIGN |= {"optimize", "RGBImageField", "Stream", "write_mode"}


def names_that_do_not_exist(code: str) -> Iterator[str]:
    """Yields what is wrong in a command, an option, an argument, a module or a call, as prose quotes them."""
    words = code.replace("\\|", "|").split()
    command = words[1] if words[0] == "shardio" and len(words) > 1 and words[1][0] != "-" else ""
    if command or words[0].startswith("--"):
        known = OPTIONS.get(command, set()) if command else set().union({"--version", "--help"}, *OPTIONS.values())
        yield from {command}.difference({""}, OPTIONS)
        yield from {word.partition("=")[0] for word in words if word[0] == "-"} - known - FOREIGN
    elif argument := re.fullmatch(r"([a-z_]+)=\S*", code):
        yield from {argument[1]}.difference(FOREIGN, *ARGUMENTS.values())
    elif re.fullmatch(r"(\w+\.)+(?!js|css)\w+", code) and (folder := FOLDERS.get(code.partition(".")[0])):
        try:
            pkgutil.resolve_name(".".join([*folder.relative_to(ROOT).parts, *code.split(".")[1:]]))
        except (ImportError, AttributeError):
            yield code
    elif re.fullmatch(r"\w[\w.]*\(.*\).*", code):
        for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
            yield from wrong_in(call)


def wrong_in(call: ast.Call) -> Iterator[str]:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        owner = call.func.value.id
        name = call.func.attr if owner == "shardio" else ""
        yield from {call.func.attr} - ATTRIBUTES if owner in ("loader", "shards") else ()
    if name in PUBLIC:
        told = {argument.arg for argument in call.keywords if argument.arg}
        told |= {argument.id for argument in call.args if isinstance(argument, ast.Name) and argument.id.islower()}
        yield from told - ARGUMENTS[name]
        values = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        if name in TRANSFORMS and values:
            try:
                PUBLIC[name](*values)
            except ValueError as error:
                yield f"{name}: {error}"
    elif name and name not in ATTRIBUTES | FOREIGN | set(dir(builtins)):
        yield name


@pytest.mark.parametrize(
    "page", ["llms.txt", *(page for page in PAGES if re.match(r"README|docs/(?!integrations)", page))]
)
def test_names_in_prose_exist(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert {code: wrong for code in quoted(prose) if (wrong := [*names_that_do_not_exist(code)])} == {}


@pytest.mark.parametrize(
    "code",
    [
        "shardio stag",
        "shardio info --augmented",
        "--augmente",
        "resdent=",
        "loading.rings",
        "augment.resample.Nothing",
        'recipe("timm")',
        "RandomCrop(size, margin)",
        "shardio.convrt(masks=1)",
        "ShardLoader(worker=3)",
        'loader.stat()["roi"]',
    ],
)
def test_a_name_that_does_not_exist_is_noticed(code: str) -> None:
    assert list(names_that_do_not_exist(code))


def test_every_page_has_its_place_on_the_site() -> None:
    navigation = runpy.run_path(str(ROOT / "docs" / "conf.py"))["NAVIGATION"]
    pages = sorted(f"{page}.md" for part in navigation.values() for _, page in part)
    assert ["README.md", *pages] == sorted(PAGES, key=lambda page: (page != "README.md", page))


def test_every_command_with_its_options_is_on_the_page_of_commands() -> None:
    source = [""]
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["add_commands"](None, "docs/commands", source)
    for name, options in OPTIONS.items():
        section = source[0].partition(f"\n### shardio {name}\n")[2].partition("\n###")[0]
        assert f"Usage: shardio {name} " in section
        assert all(option in section for option in options if option.startswith("-"))


def test_every_public_name_is_on_the_page_of_python() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\.\. auto\w+:: shardio\.(\w+)$", text, re.MULTILINE))
    assert {"augment", "errors"} <= listed
    assert listed >= set(shardio.__all__) - set(vars(shardio.errors))
    members = re.search(r"shardio\.ShardSet\n   :members: (.*)\n", text)
    assert members is not None
    assert members[1].split(", ") == sorted(_PUBLIC)


def test_every_page_is_linked_from_the_readme_or_the_index_of_the_guide() -> None:
    linked = {
        (folder / target).resolve()
        for folder, index in ((ROOT, README), (GUIDE, (GUIDE / "README.md").read_text(encoding="utf-8")))
        for target in re.findall(r"\]\((?!http)([^)#\s]+)\)", index)
    }
    assert {page for page in PAGES if (ROOT / page).resolve() not in linked} <= {"README.md"}
