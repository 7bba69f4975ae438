import subprocess
import sys

import pytest
import torch

from benchmarks import bench_gpu

pytestmark = pytest.mark.ranks


def refused(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench-gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main()
    assert ended.value.code == 2


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.bench_gpu", "--device=cpu", "--models=tiny"]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_machine_without_a_gpu_is_told_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(monkeypatch)
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert "sees no GPU here" in said
    assert "--device cpu --models tiny" in said


def test_an_unknown_model_is_refused_with_those_that_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    refused(monkeypatch, "--models", "125m,70b")
    assert "'70b' is not one of 125m, 1b, 7b-layers, tiny" in capsys.readouterr().err


def test_the_models_have_the_sizes_that_they_are_called_by():
    millions = {name: work.shape.num_parameters / 1e6 for name, work in bench_gpu.WORKLOADS.items()}
    assert 115 < millions["125m"] < 140
    assert 1000 < millions["1b"] < 1200
    layer = bench_gpu.WORKLOADS["7b-layers"].shape.num_layer_parameters
    assert 6.2e9 < 32 * layer < 6.8e9


@pytest.mark.slow
def test_it_runs_on_a_cpu_beside_the_eager_loop():
    *_, header, _, ours, eager = run("--peers=eager", "--rounds=2").strip().splitlines()
    assert header.startswith("| model | side | tokens/s |")
    assert ours.startswith("| tiny | ours | ")
    assert eager.startswith("| tiny | eager | ")


@pytest.mark.nightly  # compiling the loop takes a minute
def test_it_runs_on_a_cpu_beside_the_compiled_loop():
    assert "| tiny | compiled | " in run("--peers=compiled", "--rounds=2")
