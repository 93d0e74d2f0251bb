"""docs/cluster.md: its job scripts run with stand-ins for shardio and Dask, which write down how they are called.

The command lines of `shardio` and `dask` themselves judge these calls.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import code_blocks
from places import ROOT

from shardio import convert
from shardio.cli import convert as convert_command
from shardio.cli import share as share_commands

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
PARTS = 16

RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


def scripts_with(word: str) -> list[str]:
    return [block for block in code_blocks(PAGE, "bash") if word in block]


def run_script(script: str, folder: Path, **variables: str) -> list[list[str]]:
    """The commands that the script ran, in any order."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("shardio", "dask", "mpiexec", "python", "torchrun"):
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)
    (programs / "srun").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    (programs / "srun").chmod(0o755)
    record = folder / "record"
    record.write_text("")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record), **variables}
    result = subprocess.run(
        ["bash", "-euc", script + "\nwait\n"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return [json.loads(line) for line in record.read_text().splitlines()]


def options_of(command: list[str]) -> dict[str, object]:
    """The options of the command, as shardio's command line reads them."""
    assert command[:2] == ["shardio", "convert"]
    return convert_command.convert.make_context("convert", command[2:]).params


def check_array_job(script: str, folder: Path, variable: str, first: int) -> None:
    """Checks the options of the first, the second and the last job."""
    runs = [run_script(script, folder, **{variable: str(first + number)}) for number in (0, 1, PARTS - 1)]
    jobs = [options_of(command) for (command,) in runs]
    assert [job.pop("part") for job in jobs] == [(1, PARTS), (2, PARTS), (PARTS, PARTS)]
    assert all(job == jobs[0] for job in jobs)


def job_of_kubernetes(name: str) -> dict[str, Any]:
    """The `spec` of the Job with this name."""
    import yaml

    (job,) = (job for job in map(yaml.safe_load, code_blocks(PAGE, "yaml")) if job["metadata"]["name"] == name)
    spec: dict[str, Any] = job["spec"]
    return spec


@pytest.mark.parametrize("variable", ["SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX"])
def test_array_jobs_run_each_part_once(variable: str, tmp_path: Path) -> None:
    (script,) = scripts_with(variable)
    assert f"-J 1-{PARTS}\n" in script or f"--array=1-{PARTS}\n" in script
    check_array_job(script, tmp_path, variable, 1)


@pytest.mark.parametrize("names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])
def test_each_rank_of_mpi_makes_one_part(names: tuple[str, str], tmp_path: Path) -> None:
    (script,) = scripts_with("PMI_RANK")
    ((*start, script),) = run_script(script, tmp_path)
    assert start == ["mpiexec", "-n", str(PARTS), "sh", "-c"]
    rank, size = names
    (command,) = run_script(script.replace("exec ", ""), tmp_path, **{rank: "0", size: str(PARTS)})
    assert options_of(command)["part"] == (1, PARTS)


def test_the_indexed_job_of_kubernetes_runs_each_part_once(tmp_path: Path) -> None:
    spec = job_of_kubernetes("shards")
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", PARTS)
    (container,) = spec["template"]["spec"]["containers"]
    shell, flag, script = container["command"]
    assert (shell, flag) == ("sh", "-c")
    check_array_job(script.replace("exec ", ""), tmp_path, "JOB_COMPLETION_INDEX", 0)


def test_the_dask_job_starts_a_scheduler_and_workers_and_converts_on_them(tmp_path: Path) -> None:
    (script,) = scripts_with("dask scheduler")
    commands = run_script(script, tmp_path, SLURM_CPUS_PER_TASK="4")
    (converting,) = (command for command in commands if command[0] == "shardio")
    address = options_of(converting)["scheduler"]
    assert re.fullmatch(r"tcp://[^:/]+:8786", str(address))
    asked = {command[1]: command[2:] for command in commands if command[0] == "dask"}
    assert set(asked) == {"scheduler", "worker"}
    assert asked["worker"][0] == address
    if importlib.util.find_spec("distributed") is not None:
        for program, words in asked.items():
            judge = f"import sys; from distributed.cli.dask_{program} import main; main.make_context('', sys.argv[1:])"
            subprocess.run([sys.executable, "-c", judge, *words], check=True, timeout=60)


def assert_stages(command: list[str]) -> None:
    """Checks that the command is `shardio stage` of a set, and that shardio's command line takes it."""
    assert command[:4] == ["shardio", "stage", "/data/sets/imagenet-256", "/nvme/shardio"]
    assert "--together" in command
    assert share_commands.stage.make_context("stage", command[2:]).params["cache"] == Path("/nvme/shardio")


def test_training_jobs_of_slurm_stage_the_set_and_then_train(tmp_path: Path) -> None:
    (script,) = scripts_with("srun python train.py")
    assert '--ntasks="$SLURM_NNODES" --ntasks-per-node=1 shardio stage' in script
    staging, training = run_script(script, tmp_path, SLURM_NNODES="4")
    assert_stages(staging)
    assert staging[-3:] == ["--digest", "3a7bd3e2360a", "--together"]
    assert training == ["python", "train.py"]


def test_training_jobs_of_pbs_stage_the_set_once_per_node_and_then_train(tmp_path: Path) -> None:
    (script,) = scripts_with("PBS_O_WORKDIR")
    staging, training = run_script(script, tmp_path, PBS_O_WORKDIR=str(tmp_path))
    assert staging[:3] == ["mpiexec", "--map-by", "ppr:1:node"]
    assert_stages(staging[staging.index("shardio") :])
    assert training[-2:] == ["python", "train.py"]


def test_training_jobs_of_kubernetes_stage_the_set_and_then_train(tmp_path: Path) -> None:
    spec = job_of_kubernetes("train")
    pod = spec["template"]["spec"]
    (staging,), (training,) = pod["initContainers"], pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in staging["env"]}
    assert training["env"] == staging["env"]
    assert training["volumeMounts"] == staging["volumeMounts"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in staging["volumeMounts"]}
    mounted = {mount["mountPath"] for mount in staging["volumeMounts"]}
    assert mounted == {"/data/sets", *variables.values()}
    ran = [
        run_script(container["command"][2].replace("exec ", ""), tmp_path, JOB_COMPLETION_INDEX="3", **variables)
        for container in (staging, training)
    ]
    assert_stages(ran[0][0])
    ((program, *words),) = ran[1]
    assert (program, words[-1]) == ("torchrun", "train.py")
    assert words[words.index("--nnodes") + 1] == str(spec["completions"])
    assert words[words.index("--node-rank") + 1] == "3"
    assert words[words.index("--master-addr") + 1] == f"train-0.{pod['subdomain']}"


def test_every_script_is_one_of_those_that_are_run() -> None:
    words = ["SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "dask scheduler", "PMI_RANK", "srun python", "PBS_O_WORKDIR"]
    assert [len(scripts_with(word)) for word in words] == [1] * len(code_blocks(PAGE, "bash"))
    assert len(code_blocks(PAGE, "yaml")) == 2


def test_python_calls_convert_with_arguments_that_it_has() -> None:
    (block,) = code_blocks(PAGE, "python")
    calls = (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call))
    (call,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "convert")
    inspect.signature(convert).bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})
