"""The table and the plot of the peers, drawn from made-up results; and what the runner of a way measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from command import run_python
from places import BENCHMARKS

PEERS = BENCHMARKS / "peers.py"


def round_of(rate: float) -> dict[str, float]:
    return {
        "images_per_second": rate,
        "cpu_us_per_image": 1e6 / rate,
        "first_batch_seconds": 0.5,
        "pss": 2e6,
        "private": 1e6,
    }


def row(*rates: float, note: str = "") -> dict[str, Any]:
    rounds = [round_of(rate) for rate in rates]
    return {"versions": ["x 1.0"], "note": note, "rounds": rounds, "date": "2000-01-01", "command": "python it"}


def drawn(rows: dict[str, Any], monkeypatch_path: Path) -> tuple[list[str], ElementTree.Element]:
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "import importlib.util as u; spec = u.spec_from_file_location('runner', sys.argv[1] + '/peers.py')\n"
        "runner = u.module_from_spec(spec); spec.loader.exec_module(runner)\n"
        "results = json.loads(sys.argv[2]); print(json.dumps([list(runner.table(results)), runner.picture(results)]))\n"
    )
    script = monkeypatch_path / "draws.py"
    script.write_text(code)
    results = {"machine": "a machine", "title": "Ways", "workers": 2, "num_images": 500, "rows": rows}
    ended = run_python(script, BENCHMARKS, json.dumps(results))
    assert (ended.returncode, ended.stderr) == (0, "")
    table, picture = json.loads(ended.stdout)
    return table, ElementTree.fromstring(picture)


def test_rows_have_medians_and_ranges_and_those_not_run_their_reason(tmp_path: Path) -> None:
    rows = {"slow <&>": row(10, 30, 20, note="lost one"), "ShardLoader": row(1000), "none": {"not_run": "no CUDA"}}
    table, picture = drawn(rows, tmp_path)
    assert table[:2] == ["a machine", "2000-01-01: `python it`"]
    assert table[5].startswith("| ShardLoader | 1,000 (1,000 to 1,000) | 1,000.0 ")
    assert table[6].startswith("| slow <&> (lost one) | 20 (10 to 30) | 50,000.0 (33,333.3 to 100,000.0) | 0.50 ")
    assert table[-1] == "- none: not measured: no CUDA"
    bars = picture.findall("{*}rect")
    assert [(bar.get("class"), bar.get("width")) for bar in bars] == [("o", "420.0"), ("p", "8.4")]
    assert "slow <&>" in [text.text for text in picture.findall("{*}text")]


def test_what_a_conversion_saves_is_told(tmp_path: Path) -> None:
    chain = ": crop, flip, normalise"
    rows = {f"ShardLoader{chain}": row(1000), f"ImageFolder + DataLoader{chain}": row(200)}
    rows[f"ShardLoader{chain}"]["made"] = {"seconds": 2.0}
    table, _ = drawn(rows, tmp_path)
    (told,) = (line for line in table if "conversion" in line)
    assert "500 images took 2.0 s, which it has saved after 1.0 epochs" in told


def test_lost_and_repeated_samples_are_counted(tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS / "peers"))
    try:
        import run
    finally:
        sys.path.pop(0)
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 1, 4)
    whole = run.check(lambda epoch: iter([(pixels, [0, 1, 2])]))
    turned = run.check(lambda epoch: iter([(pixels[[2, 0]], [2, 0]), (pixels[[1]], [1])]))
    lost = run.check(lambda epoch: iter([(pixels[[0, 0]], [0, 0])]))
    assert whole == turned
    assert (lost["samples"], lost["distinct"]) == (2, 1)
    assert lost["digest"] != whole["digest"]
