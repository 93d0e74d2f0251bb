"""Loaders beside what a user would pick instead: each library in an environment of its own.

`--part readers`: all read the same samples of 256 x 256 x 3 uint8, warm, shuffled, in batches, with the same number of
workers (threads or processes, as the library has them). Each library writes its own form of them once. An untimed epoch
then shows whether its samples are those that shardio gives.

`--part device`: the same on the GPU, beside torch's DataLoader with pinned memory and batches that are copied on a
stream of their own. It needs CUDA, and torch alone besides shardio.

`--part images`: from JPEGs (`--images`, a folder of classes) to float32 batches of 224 x 224, normalized, with random
crops and flips or as for an evaluation. ImageFolder and SPDL decode in each epoch; FFCV and shardio have decoded once,
which is timed, too. The libraries have decoders and filters of their own, so the pictures of an evaluation are compared
with torchvision's, as PSNR.

`--part decoders`: the same for 1, 2 and 4 workers, without random crops: pictures decoded and resized one by one, in
batches, and in normalized batches.

`--part tutorial`: loaders as tutorials write them, a loop over the pictures, and threads that fill a queue, beside
ShardLoader; alone, and in a training of a small ResNet by two ranks of torch's DistributedDataParallel on the CPU. The
samples that an epoch repeats or loses are counted.

`--part writers`: from JPEGs to 256 x 256 x 3 uint8, as each library writes them. Those that resize nothing are given
what Pillow resizes, with the same filter. shardio also writes checksums and syncs its files, which no other does.

Batches from images count once they are copied to the GPU, if the library's torch sees one.

All ways run in turn, A B C A B C, each in a fresh process. An epoch that is measured reads each sample 100 times, in an
order that each library draws anew, and is so long that the start of another one is not measured.

Results go to build/peers/results.json, from which the tables and the plots are drawn: `--draw` does this alone.
`--only` measures rows again whose names contain one of the given texts, and keeps the others. The memory is that of the
whole tree of processes: `private` is what one of them has written and no other shares. The processor's time counts all
of the tree, too.

The environments are made with pip under build/peers. All but torchcodec's share one torch for the CPU. A library that
cannot be had is a row which says why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "peers"
RESULTS = BUILD / "results.json"
PICTURES = ROOT / "docs" / "images"
RUN = Path(__file__).with_name("peers") / "run.py"

# What pip is told for each environment. Those outside OWN_TORCH see torch and torchvision of the environment "torch":
# torchvision's wheel is one for CUDA, whose operators cannot be loaded beside a torch for the CPU. Its transforms can.
ENVIRONMENTS: dict[str, Sequence[list[str]]] = {
    "torch": (["torch", "numpy", "pillow"], ["--no-deps", "torchvision==0.28.0"]),
    "tensordict": (["tensordict==0.15.3"],),
    "webdataset": (["webdataset==1.0.2"],),
    "grain": (["grain==0.2.18", "array_record==0.8.6"],),
    "litdata": (["litdata==0.2.76"],),
    "streaming": (["mosaicml-streaming==0.13.0"],),
    "dlio": (
        ["--no-deps", "dlio_benchmark==2.0.0"],
        ["mpi4py==4.1.2", "mpich==5.0.2", "h5py", "hydra-core", "pandas", "psutil"],
    ),
    # Its wheel for Linux needs a torch for CUDA, 5.5 GB in all. It decodes images on the CPU, without FFmpeg.
    "torchcodec": (["torch==2.14.1", "torchvision==0.29.1", "torchcodec==0.17.0", "numpy", "pillow"],),
    # Needs FFmpeg's libraries.
    "spdl": (["spdl==0.8.0"],),
    "datago": (["datago==2026.10.1"],),
    # Builds: needs pkg-config, and OpenCV's and TurboJPEG's headers.
    "ffcv": (["numba", "opencv-python-headless", "tqdm"], ["--no-deps", "ffcv==1.0.2"]),
}

OWN_TORCH = ("torch", "torchcodec")


class Part(NamedTuple):
    """Ways that are compared with each other: `libraries` are modules under peers/, each with its environment."""

    title: str
    libraries: Mapping[str, str]
    not_run: Mapping[str, str]
    reference: str = ""
    """The library with which the samples of the others are compared; "" for the parts that write and do not load."""
    compared: Literal["pixels", "numbers", "PSNR", ""] = ""
    tasks: tuple[str, ...] = ("",)
    """The ends of the names of its ways: of those that the libraries have."""
    workers: Sequence[int] = ()
    """Each way has so many workers, one number after the other, instead of --workers."""


PARTS = {
    "readers": Part(
        "Ready pixels",
        {
            "with_shardio": "",
            "with_dataloader": "torch",
            "with_tensordict": "tensordict",
            "with_webdataset": "webdataset",
            "with_grain": "grain",
            "with_litdata": "litdata",
            "with_streaming": "streaming",
            "with_ffcv": "ffcv",
        },
        {"side-stream prefetcher": "it needs CUDA: see --part device"},
        "with_shardio",
        "pixels",
    ),
    "device": Part(
        "Ready pixels, on the GPU",
        {"device_with_shardio": "", "device_with_prefetcher": ""},
        {},
        "device_with_shardio",
        "pixels",
    ),
    "images": Part(
        "Images to batches (crop, flip, normalize)",
        {
            "images_with_torchvision": "torch",
            "images_with_shardio": "",
            "images_with_spdl": "spdl",
            "images_with_ffcv": "ffcv",
        },
        {},
        "images_with_torchvision",
        "PSNR",
        tasks=("crop, flip, normalize",),
    ),
    "decoders": Part(
        "Decoding in each epoch",
        {
            "images_with_torchvision": "torch",
            "images_with_torchcodec": "torchcodec",
            "images_with_shardio": "",
            "images_with_spdl": "spdl",
            "images_with_datago": "datago",
        },
        {"ImageFolder + DataLoader, threads": "torch's DataLoader has processes alone"},
        "images_with_torchvision",
        "PSNR",
        tasks=("alone", "evaluation, not normalized", "evaluation"),
        workers=(1, 2, 4),
    ),
    "tutorial": Part(
        "Loaders of tutorials",
        {"tutorial_with_shardio": "", "tutorial_with_threads": "torch"},
        {},
        "tutorial_with_shardio",
        "numbers",
    ),
    "writers": Part(
        "Converters",
        {
            "writes_with_shardio": "",
            "writes_with_numpy": "torch",
            "writes_with_webdataset": "webdataset",
            "writes_with_litdata": "litdata",
            "writes_with_streaming": "streaming",
            "writes_with_ffcv": "ffcv",
        },
        {},
    ),
}


class Figure(NamedTuple):
    heading: str
    scale: float
    digits: int


FIGURES = {
    "images_per_second": Figure("images/s", 1, 0),
    "cpu_us_per_image": Figure("CPU us an image", 1, 1),
    "first_batch_seconds": Figure("first batch, s", 1, 2),
    "private": Figure("private memory, MB", 1e6, 0),
    "nbytes": Figure("written, MB", 1e6, 0),
}
# So many pictures of an evaluation are compared.
COMPARED = 64


class Unavailable(Exception):
    """A library that cannot be had, or does not work."""


def environment(name: str) -> Path:
    """Returns the Python of an environment, and makes that if it is not there; "" is this one, which has shardio."""
    if not name:
        return Path(sys.executable)
    folder = BUILD / name
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        common = None if name in OWN_TORCH else environment("torch")
        call([sys.executable, "-m", "venv", folder], 300)
        packages = next(folder.glob("lib/python*/site-packages"))
        if common is not None:
            common_packages = next(common.parents[1].glob("lib/python*/site-packages"))
            (packages / "torch.pth").write_text(f"{common_packages}\n")
        # The others see this torch and are content with it. What else is pinned they may want in another version.
        pins = ["-c", ROOT / "constraints.txt"] if name == "torch" else []
        for words in ENVIRONMENTS[name]:
            call([python, "-m", "pip", "install", "--quiet", *pins, *words], 1200)
        done.touch()
    return python


def call(command: Sequence[object], timeout: float) -> str:
    """Returns the standard output. Raises Unavailable with the last line of the error's text."""
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Unavailable(f"it took longer than {timeout:g} seconds") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        raise Unavailable(lines[-1] if lines else f"it ended with {process.returncode}")
    return output


def ask(library: str, timeout: float, *words: object) -> dict[str, Any]:
    name = next(part.libraries[library] for part in PARTS.values() if library in part.libraries)
    answer: dict[str, Any] = json.loads(call([environment(name), RUN, library, *words], timeout).splitlines()[-1])
    return answer


def form_of(library: str, source: Path) -> Path:
    """Returns the folder for the library's form of the pixels or images. Two folders of images may have one name."""
    name = f"{source.name}-{zlib.crc32(os.fsencode(source)):08x}" if source.is_dir() else source.stem
    return BUILD / "data" / name / library


def prepared(library: str, source: Path) -> Path:
    """Returns the folder with the library's form of the pixels or images, written if it is not there."""
    out = form_of(library, source)
    done = out / ".prepared"
    if not done.exists():
        subprocess.run(["rm", "-rf", out], check=True)
        out.mkdir(parents=True)
        done.write_text(json.dumps(ask(library, 1200, "prepare", source, out)))
    return out


def psnr(library: str, out: Path, reference: Path) -> float:
    """Returns how near its pictures of an evaluation are to those of the reference, in dB."""
    import numpy as np

    found, expected = (folder / "evaluated.npy" for folder in (out, reference))
    ask(library, 300, "evaluate", out, COMPARED, found)
    error = float(np.mean((np.load(found).astype(np.float64) - np.load(expected)) ** 2))
    return -10 * math.log10(error) if error else math.inf


def generated(count: int, size: int) -> Path:
    """Returns a file of random pixels."""
    import numpy as np

    path = BUILD / "data" / f"{count}-{size}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        unfinished = path.with_suffix(".unfinished")
        pixels = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (count, size, size, 3))
        for sample in pixels:
            sample[:] = rng.integers(0, 256, sample.shape, dtype=np.uint8)
        unfinished.rename(path)
    return path


def check(library: str, name: str, out: Path, options: argparse.Namespace, expected: Mapping[str, Any]) -> str:
    """Returns a note on the samples of a way. Raises Unavailable if they are others than those that were written."""
    found = ask(library, 600, "check", out, options.batch_size, options.workers, name)
    if (found["samples"], found["distinct"]) != (expected["samples"], expected["samples"]):
        return f"an epoch has {found['samples']:,} samples, {found['distinct']:,} of them distinct"
    if found["digest"] != expected["digest"]:
        raise Unavailable("its samples are not those that were written")
    return ""


def run_once(
    part: Part, library: str, way: str, out: Path, workers: int, options: argparse.Namespace
) -> dict[str, Any]:
    if part.compared:
        # The system may have evicted pages while the other ways ran: all read from the page cache.
        for file in out.rglob("*"):
            if file.is_file():
                file.read_bytes()
        words = (out, options.batch_size, workers, way, options.seconds)
        return ask(library, 120 + 10 * options.seconds, "measure", *words)
    with TemporaryDirectory(dir=BUILD) as folder:
        found = ask(library, 1200, "write", options.images, folder, workers, way)
        found["nbytes"] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        return found


def measure(part: Part, options: argparse.Namespace, rows: dict[str, Any], origin: Mapping[str, str]) -> None:
    """Makes a row of each way that was asked for: its figures, once per round, or the reason why there are none."""
    files = options.images or generated(options.samples, options.size)
    if options.images and not options.only:
        # Conversions are compared with epochs, so both are timed in the same run.
        for library in part.libraries:
            (form_of(library, files) / ".prepared").unlink(missing_ok=True)
    reference = prepared(part.reference, files) if part.compared else Path()
    expected: dict[str, Any] = {}
    if part.compared == "PSNR":
        ask(part.reference, 300, "evaluate", reference, COMPARED, reference / "evaluated.npy")
    elif part.compared:
        first = ask(part.reference, 300, "ways")["ways"][0]
        expected = ask(part.reference, 600, "check", reference, options.batch_size, options.workers, first)
        count = options.samples if part.compared == "pixels" else number_of(files)
        if (expected["samples"], expected["distinct"]) != (count, count):
            raise SystemExit(f"{first} has other samples than the {count:,} that were written")
    rows.update({name: {"not_run": reason} for name, reason in part.not_run.items()})
    places: dict[str, tuple[str, Path, str, int]] = {}
    for library in part.libraries:
        short = library.rpartition("with_")[2]
        try:
            known = ask(library, 300, "ways")
            rows.pop(short, None)  # it could not be had before
            ways = {
                name: (way, workers)
                for workers in part.workers or (options.workers,)
                for way in known["ways"]
                for name in [way + f", {workers} worker{'s' * (workers > 1)}" * bool(part.workers)]
                if any(some in name for some in options.only or [""]) and way.endswith(part.tasks)
            }
            out = prepared(library, files) if ways and part.compared else Path()
            near = psnr(library, out, reference) if ways and part.compared == "PSNR" else math.inf
        except Unavailable as error:
            rows[short] = {"not_run": str(error)}
            print(f"{library}: {error}", file=sys.stderr)
            continue
        for name, (way, workers) in ways.items():
            try:
                note = check(library, way, out, options, expected) if expected else ""
            except Unavailable as error:
                rows[name] = {"not_run": str(error)}
                print(f"{name}: {error}", file=sys.stderr)
                continue
            places[name] = library, out, way, workers
            more = {"psnr": near} if near < math.inf else {}
            if part.compared:
                more["made"] = json.loads((out / ".prepared").read_text())
            rows[name] = {"versions": known["versions"], "note": note, "rounds": [], **more, **origin}
    if options.only and not places:
        raise SystemExit(f"no way that can be measured has {' or '.join(options.only)} in its name")
    for turn in range(options.rounds):
        for name, (library, out, way, workers) in places.items():
            try:
                found = run_once(part, library, way, out, workers, options)
            except Unavailable as error:
                rows[name].setdefault("failed", []).append(f"round {turn}: {error}")
                continue
            rows[name]["rounds"].append(found)
            print(f"round {turn}: {name}: {found['images_per_second']:,.0f} images/s", file=sys.stderr)


def number_of(images: Path) -> int:
    return sum(file.is_file() for file in images.rglob("*"))


def spread(values: Sequence[float], scale: float = 1, digits: int = 0) -> str:
    """Returns the median, with the least and the greatest."""
    middle, least, most = (f"{x / scale:,.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"


def median(row: Mapping[str, Any], figure: str) -> float:
    return statistics.median(found[figure] for found in row["rounds"])


def measured(rows: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the rows with figures, the cheapest for the processor first."""
    found = [(name, row) for name, row in rows.items() if row.get("rounds")]
    return sorted(found, key=lambda pair: median(pair[1], "cpu_us_per_image"))


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a part's results in Markdown."""
    yield results["machine"]
    for when, command in sorted({(row["date"], row["command"]) for row in results["rows"].values() if "date" in row}):
        yield f"{when}: `{command}`"
    yield ""
    rows = measured(results["rows"])
    shown = [figure for figure in FIGURES if any(figure in found for _, row in rows for found in row["rounds"])]
    devices = any("device" in found for _, row in rows for found in row["rounds"])
    headings = [FIGURES[figure].heading for figure in shown] + ["device"] * devices
    yield f"| way | {' | '.join(headings)} | versions |"
    yield "|---" * (len(headings) + 2) + "|"
    for name, row in rows:
        cells = [name + "".join(f" ({note})" for note in notes(row))]
        for figure in shown:
            _, scale, digits = FIGURES[figure]
            cells.append(spread([found[figure] for found in row["rounds"]], scale, digits))
        cells += [row["rounds"][0].get("device", "")] * devices
        yield f"| {' | '.join([*cells, ', '.join(row['versions'])])} |"
    yield ""
    yield from savings(results)
    for name, row in results["rows"].items():
        if "not_run" in row:
            yield f"- {name}: not measured: {row['not_run']}"
        elif not row["rounds"]:
            yield f"- {name}: not measured: {'; '.join(row.get('failed', ['no round']))}"
        for failure in row.get("failed", []) if row.get("rounds") else ():
            yield f"- {name}: {failure}"


def savings(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields after how many epochs shardio's conversion has saved the time that it took, beside ways that had less to
    prepare."""
    rows, count = dict(measured(results["rows"])), results["num_images"]
    for name, row in rows.items():
        if "made" not in row:  # a converter's
            continue
        # A decoder's pictures one by one stand beside samples in batches: ShardLoader has no others.
        task = name.partition(": ")[2].replace("decode and resize alone", "samples alone")
        ours = rows.get(f"ShardLoader: {task}", row)
        faster = 1 / median(row, "images_per_second") - 1 / median(ours, "images_per_second")
        seconds = ours["made"]["seconds"] - row["made"]["seconds"]
        if seconds > 0 and faster > 0:
            yield (
                f"- shardio's conversion of {count:,} images took {ours['made']['seconds']:.1f} s, which it has saved "
                f"after {seconds / count / faster:.1f} epochs in place of {name}"
            )


def notes(row: Mapping[str, Any]) -> Iterator[str]:
    if row["note"]:
        yield row["note"]
    if "psnr" in row:
        yield f"{row['psnr']:.1f} dB"


def picture(results: Mapping[str, Any], task: str = "") -> str:
    """Returns bars of images per second, with the range over rounds. Its colors can be read on light and on dark.

    Of ways with several tasks, only those that end in `task`, whatever the number of workers.
    """
    rows = sorted(measured(results["rows"]), key=lambda pair: -median(pair[1], "images_per_second"))
    rows = [
        (name, row) for name, row in rows if re.sub(", [0-9]+ workers?$", "", name).endswith(f": {task}" * bool(task))
    ]
    numbers = sorted({found[1] for name, _ in rows if (found := re.search(", ([0-9]+) workers?$", name))})
    workers = ", ".join(numbers) or results["workers"]
    tasks = {name.partition(": ")[2] for name, _ in rows}
    if len(tasks) == 1:  # the title says it
        rows = [(name.partition(": ")[0], row) for name, row in rows]
    most = max((found["images_per_second"] for _, row in rows for found in row["rounds"]), default=1)
    # Names lie above their bars: all can be read on a telephone. A letter takes seven pixels at most.
    left, width, step, top = 8, 300, 40, 46
    right = max(400, 16 + 7 * max((len(name) for name, _ in rows), default=0))
    bottom = top + step * len(rows) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" width="500" '
        'font-family="sans-serif" font-size="13">',
        "<style>.b{fill:#fff}text{fill:#24292f}.o{fill:#2da44e}.p{fill:#6e96c8}line{stroke:#57606a}"
        "@media(prefers-color-scheme:dark){.b{fill:#0d1117}text{fill:#e6edf3}line{stroke:#b1bac4}}</style>",
        f'<path class="b" d="M0 0h{right}v{bottom}h-{right}z"/>',
        f'<text x="{left}" y="20" font-weight="bold">{escape(results["title"])}</text>',
        f'<text x="{left}" y="38">images a second, {workers} workers; lines: min to max</text>',
    ]
    for number, (name, row) in enumerate(rows):
        rates = [found["images_per_second"] for found in row["rounds"]]
        middle, least, greatest = (width * x / most for x in (statistics.median(rates), min(rates), max(rates)))
        y = top + step * number
        kind = "o" if name.startswith(("ShardLoader", "shardio")) else "p"
        lines += [
            f'<text x="{left}" y="{y + 15}">{escape(name)}</text>',
            f'<rect class="{kind}" x="{left}" y="{y + 20}" width="{middle:.1f}" height="16"/>',
            f'<line x1="{left + least:.1f}" x2="{left + greatest:.1f}" y1="{y + 28}" y2="{y + 28}"/>',
            f'<text x="{left + greatest + 6:.1f}" y="{y + 33}">{statistics.median(rates):,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def draw(results: Mapping[str, Any]) -> None:
    for part, found in results.items():
        print(f"## {found['title']}", "", *table(found), "", sep="\n")
        if measured(found["rows"]):
            PICTURES.mkdir(parents=True, exist_ok=True)
            (PICTURES / f"{part}.svg").write_text(picture(found, PARTS[part].tasks[-1]))
            print(f"wrote {(PICTURES / f'{part}.svg').relative_to(ROOT)}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="readers")
    parser.add_argument("--images", type=Path, help="of every part but readers and device: a folder of classes")
    parser.add_argument(
        "--samples", type=int, default=7936, help="of readers and device, in each form (default: 1.6 GB)"
    )
    parser.add_argument("--size", type=int, default=256, help="of readers and device")
    parser.add_argument("--batch-size", type=int, help="(default: 256 of pixels, 64 of images)")
    parser.add_argument("--workers", type=int, default=2, help="(default: 2; of the part decoders 1, 2 and 4)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3, help="of each way in each round")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only the ways whose names contain NAME; can be repeated"
    )
    parser.add_argument("--draw", action="store_true", help="draw the results of the last run, and measure nothing")
    options = parser.parse_args()
    part, of_images = PARTS[options.part], PARTS[options.part].compared != "pixels"
    options.batch_size = options.batch_size or (64 if of_images else 256)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.draw:
        if not results:
            parser.error(f"{RESULTS} does not exist yet: run without --draw")
        draw(results)
        return
    if of_images and not (options.images and options.images.is_dir()):
        parser.error(f"--part {options.part} needs --images, a folder of classes with images")
    if options.images:
        options.images = options.images.resolve() if of_images else None
    from common import describe_machine

    own = ("images",) if of_images else ("samples", "size")
    conditions = {name: str(getattr(options, name)) for name in (*own, "batch_size", "workers")}
    before = results.get(options.part, {})
    rows = before["rows"] if options.only and before.get("conditions") == conditions else {}
    command = shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    try:
        measure(part, options, rows, {"date": date.today().isoformat(), "command": command})
    except Unavailable as error:
        parser.exit(1, f"{part.reference}, with which the others are compared: {error}\n")
    results[options.part] = {
        "title": part.title,
        "machine": describe_machine(),
        "conditions": conditions,
        "workers": ", ".join(map(str, part.workers or (options.workers,))),
        "num_images": number_of(options.images) if of_images else 0,
        "rows": rows,
    }
    BUILD.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw({options.part: results[options.part]})


if __name__ == "__main__":
    main()
