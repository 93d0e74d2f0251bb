"""Reading ready pixels, beside what a user would pick instead: each library in an environment of its own.

All read the same samples of 256 x 256 x 3 uint8, warm, shuffled, in batches, with the same number of workers (threads
or processes, as the library has them). Each library writes its own form of them once. An untimed epoch then shows
whether its samples are those that shardio gives. Then all ways run in turn, A B C A B C, each in a fresh process.

An epoch that is measured reads each sample 100 times, in an order that each library draws anew, and is so long that the
start of another one is not measured.

Results go to build/peers/results.json, from which the table and the plot are drawn: `--draw` does this alone. `--only`
measures rows again whose names contain the given text, and keeps the others. The memory is that of the whole tree of
processes: `private` is what one of them has written and no other shares. The processor's time counts all of the tree,
too.

The environments are made with pip under build/peers, and share one torch for the CPU. A library that cannot be had is
a row which says why.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "peers"
RESULTS = BUILD / "results.json"
PICTURE = ROOT / "docs" / "images" / "readers.svg"
RUN = Path(__file__).with_name("peers") / "run.py"
OURS = "with_shardio"

# What pip is told for each environment. The libraries see torch and torchvision of the common one. torchvision's wheel
# is one for CUDA: its operators cannot be loaded beside a torch for the CPU, its transforms can.
TORCH = (["torch", "numpy", "pillow"], ["--no-deps", "torchvision==0.28.0"])
LIBRARIES: dict[str, Sequence[list[str]]] = {
    "with_shardio": (),
    "with_dataloader": TORCH,
    "with_tensordict": (["tensordict==0.15.3"],),
    "with_webdataset": (["webdataset==1.0.2"],),
    "with_grain": (["grain==0.2.18", "array_record==0.8.6"],),
    "with_litdata": (["litdata==0.2.76"],),
    "with_streaming": (["mosaicml-streaming==0.10.0"],),
    # Builds: needs pkg-config, and OpenCV's and TurboJPEG's headers.
    "with_ffcv": (["numba", "opencv-python-headless", "tqdm"], ["--no-deps", "ffcv==1.0.2"]),
}
NOT_RUN = {"side-stream prefetcher (apex)": "it needs CUDA"}


class Unavailable(Exception):
    """A library that cannot be had, or does not work."""


def environment(library: str) -> Path:
    """Returns the Python that has the library, and makes its environment if it is not there."""
    if library == OURS:
        return Path(sys.executable)
    folder = BUILD / ("torch" if library == "with_dataloader" else library.removeprefix("with_"))
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        if library != "with_dataloader":
            common = environment("with_dataloader")
        call([sys.executable, "-m", "venv", folder], 300)
        packages = next(folder.glob("lib/python*/site-packages"))
        if library != "with_dataloader":
            common_packages = next(common.parents[1].glob("lib/python*/site-packages"))
            (packages / "torch.pth").write_text(f"{common_packages}\n")
        for words in LIBRARIES[library]:
            call([python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *words], 1200)
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
    answer: dict[str, Any] = json.loads(call([environment(library), RUN, library, *words], timeout).splitlines()[-1])
    return answer


def prepared(library: str, pixels: Path) -> Path:
    """Returns the folder with the library's form of the pixels, written if it is not there."""
    out = pixels.with_suffix("") / library
    done = out / ".bytes"
    if not done.exists():
        subprocess.run(["rm", "-rf", out], check=True)
        out.mkdir(parents=True)
        done.write_text(str(ask(library, 1200, "prepare", pixels, out)["nbytes"]))
    return out


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


def measure(options: argparse.Namespace, rows: dict[str, Any], source: Mapping[str, str]) -> None:
    """Makes a row of each way that was asked for: its figures, once per round, or the reason why there are none."""
    pixels = generated(options.samples, options.size)
    expected = ask(OURS, 600, "check", prepared(OURS, pixels), options.batch_size, options.workers, "ShardLoader")
    rows.update({name: {"not_run": reason} for name, reason in NOT_RUN.items()})
    places: dict[str, tuple[str, Path]] = {}
    for library in LIBRARIES:
        try:
            known = ask(library, 300, "ways")
            rows.pop(library.removeprefix("with_"), None)  # it could not be had before
            ways = [name for name in known["ways"] if options.only in name]
            out = prepared(library, pixels) if ways else Path()
        except Unavailable as error:
            rows[library.removeprefix("with_")] = {"not_run": str(error)}
            print(f"{library}: {error}", file=sys.stderr)
            continue
        for name in ways:
            try:
                found = ask(library, 600, "check", out, options.batch_size, options.workers, name)
                if (found["samples"], found["distinct"]) != (options.samples, options.samples):
                    note = f"an epoch has {found['samples']:,} samples, {found['distinct']:,} of them distinct"
                    print(f"{name}: {note}", file=sys.stderr)
                elif found["digest"] != expected["digest"]:
                    raise Unavailable("its samples are not those that were written")
                else:
                    note = ""
            except Unavailable as error:
                rows[name] = {"not_run": str(error)}
                print(f"{name}: {error}", file=sys.stderr)
                continue
            places[name] = library, out
            rows[name] = {"versions": known["versions"], "note": note, "rounds": [], **source}
    for turn in range(options.rounds):
        for name, (library, out) in places.items():
            words = (out, options.batch_size, options.workers, name, options.seconds)
            try:
                found = ask(library, 120 + 10 * options.seconds, "measure", *words)
            except Unavailable as error:
                rows[name].setdefault("failed", []).append(f"round {turn}: {error}")
                continue
            rows[name]["rounds"].append(found)
            print(f"round {turn}: {name}: {found['images_per_second']:,.0f} images/s", file=sys.stderr)


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
    """Yields the lines of the results in Markdown."""
    yield results["machine"]
    for when, command in sorted({(row["date"], row["command"]) for row in results["rows"].values() if "date" in row}):
        yield f"{when}: `{command}`"
    yield ""
    yield "| way | images/s | CPU us an image | first batch, s | private memory, MB | versions |"
    yield "|---|---|---|---|---|---|"
    for name, row in measured(results["rows"]):
        figures = {figure: [found[figure] for found in row["rounds"]] for figure in row["rounds"][0]}
        cells = (
            name + (f" ({row['note']})" if row["note"] else ""),
            spread(figures["images_per_second"]),
            spread(figures["cpu_us_per_image"], digits=1),
            spread(figures["first_batch_seconds"], digits=2),
            spread(figures["private"], 1e6),
            ", ".join(row["versions"]),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    for name, row in results["rows"].items():
        if "not_run" in row:
            yield f"- {name}: not measured: {row['not_run']}"
        elif not row["rounds"]:
            yield f"- {name}: not measured: {'; '.join(row.get('failed', ['no round']))}"
        for failure in row.get("failed", []) if row.get("rounds") else ():
            yield f"- {name}: {failure}"


def picture(results: Mapping[str, Any]) -> str:
    """Returns bars of images per second, with the range over rounds. Its colours can be read on light and on dark."""
    rows = sorted(measured(results["rows"]), key=lambda pair: -median(pair[1], "images_per_second"))
    most = max((found["images_per_second"] for _, row in rows for found in row["rounds"]), default=1)
    left, width, step, top = 270, 420, 26, 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {top + step * len(rows) + 8}" '
        'font-family="sans-serif" font-size="13">',
        "<style>text{fill:#24292f}.o{fill:#2da44e}.p{fill:#6e96c8}line{stroke:#57606a}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}line{stroke:#b1bac4}}</style>",
        f'<text x="8" y="20" font-weight="bold">Images a second, {results["workers"]} workers, warm, '
        f"{results['size']} x {results['size']} x 3 (line: least to greatest round)</text>",
    ]
    for number, (name, row) in enumerate(rows):
        rates = [found["images_per_second"] for found in row["rounds"]]
        middle, least, greatest = (width * x / most for x in (statistics.median(rates), min(rates), max(rates)))
        y = top + step * number
        kind = "o" if name == "ShardLoader" else "p"
        lines += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{left}" y="{y + 2}" width="{middle:.1f}" height="18"/>',
            f'<line x1="{left + least:.1f}" x2="{left + greatest:.1f}" y1="{y + 11}" y2="{y + 11}"/>',
            f'<text x="{left + greatest + 6:.1f}" y="{y + 15}">{statistics.median(rates):,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def draw(results: Mapping[str, Any]) -> None:
    print(*table(results), sep="\n")
    if measured(results["rows"]):
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(picture(results))
        print(f"wrote {PICTURE.relative_to(ROOT)}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=7936, help="of each form: 1.6 GB (default: 31 batches)")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each way in each round")
    parser.add_argument("--only", default="", metavar="NAME", help="only the ways whose names contain NAME")
    parser.add_argument("--draw", action="store_true", help="draw the results of the last run, and measure nothing")
    options = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.draw:
        from common import describe_machine

        conditions = {name: getattr(options, name) for name in ("samples", "size", "batch_size", "workers")}
        rows = before["rows"] if options.only and all(before.get(x) == y for x, y in conditions.items()) else {}
        command = shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])
        measure(options, rows, {"date": date.today().isoformat(), "command": command})
        before = {"machine": describe_machine(), **conditions, "rows": rows}
        BUILD.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(before, indent=1) + "\n")
    elif not before:
        parser.error(f"{RESULTS} does not exist yet: run without --draw")
    draw(before)


if __name__ == "__main__":
    main()
