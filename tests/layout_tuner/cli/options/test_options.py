"""Options of the workers' commands: of layouts, of a cluster by its name, of simulated workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from layout_tuner.cli.options.command_input import described_cluster
from layout_tuner.cli.predictions.estimate import estimate
from layout_tuner.cli.processes.worker import probe
from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.stated_layout import stated_layout
from tests.kit.fake_service import TOKEN
from tests.kit.services import run_here
from tests.kit.worker_loop import WorkedService

FRONTIER = CLUSTER_PRESETS["frontier"]
NOT_GIVEN = dict.fromkeys(("num_microbatches", "global_batch_size", "precision"))
GIVEN: dict[str, Any] = {"dp": 4, "micro_batch_size": 2, **NOT_GIVEN}


def layout(**given: Any) -> Layout:
    return stated_layout({**GIVEN, **given}, precision=FRONTIER.default_precision)


def test_the_global_batch_decides_the_micro_batches() -> None:
    assert layout(global_batch_size=64).num_microbatches == 8
    assert layout(num_microbatches=8).global_batch_size == 64
    assert layout(num_microbatches=8, global_batch_size=64) == layout(num_microbatches=8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give num_microbatches or global_batch_size"),
        (
            {"global_batch_size": 20},
            "global_batch_size=20 is not divisible by dp*micro_batch_size=4*2=8; the nearest that "
            "is: 16 or 24",
        ),
        ({"global_batch_size": 3}, "the nearest that is: 8"),
        (
            {"global_batch_size": 64, "num_microbatches": 3},
            "num_microbatches=3 makes a global batch of 24 (dp*micro_batch_size=4*2=8 times 3), not "
            "of global_batch_size=64; leave one of the two out",
        ),
        ({"global_batch_size": 0}, "global_batch_size=0 is not a whole number of at least 1"),
        ({"global_batch_size": 8, "dp": 0}, "dp=0 is not a whole number of at least 1"),
        ({"num_microbatches": 0}, "num_microbatches=0 is not a whole number of at least 1"),
    ],
)
def test_a_missing_or_contradictory_batch_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutInvalidError) as caught:
        layout(**given)
    assert says in str(caught.value)


def test_the_precision_is_the_clusters_where_none_is_given() -> None:
    assert layout(num_microbatches=1).precision == "bf16"
    assert layout(num_microbatches=1, precision="fp32").precision == "fp32"
    local, _ = resolve_cluster("local-cpu")
    stated = {**GIVEN, "num_microbatches": 1}
    assert stated_layout(stated, precision=local.default_precision).precision == "fp32"


MISSING = {"v1/clusters/mine": (404, {})}


def answer_with(service: WorkedService, answers: dict[str, tuple[int, Any]]) -> None:
    service.answer = lambda _method, path, _body: answers["/".join(path)]


def sentence_of(url: str, token_file: Path, command: click.Command = probe) -> str:
    where = {"LAYOUT_TUNER_URL": url, "LAYOUT_TUNER_TOKEN_FILE": str(token_file)}
    refused = CliRunner().invoke(command, ["--model=tiny", "--cluster=mine"], env=where)
    assert refused.exit_code == 2, refused.exception
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith("Error: unknown cluster 'mine'")
    return sentence


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (file := tmp_path / "token").write_text(TOKEN)
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("command", [probe, estimate])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe", "holds no token (one word of ASCII)"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_token_file_without_a_token_is_one_sentence(
    command: click.Command, content: bytes | None, why: str, token_file: Path
) -> None:
    if content is None:
        token_file.unlink()
    else:
        token_file.write_bytes(content)
    said = sentence_of("http://127.0.0.1:9", token_file, command)
    assert f"no service was asked (the token file {token_file} {why}" in said


@pytest.mark.parametrize("listed", [(503, {}), (200, {}), (200, {"clusters": [7]})], ids=str)
def test_a_service_that_cannot_list_its_clusters_has_none_of_that_name_all_the_same(
    listed: tuple[int, Any], service: WorkedService, token_file: Path
) -> None:
    answer_with(service, {**MISSING, "v1/clusters": listed})
    said = sentence_of(service.url, token_file)
    assert f"the service at {service.url} has no cluster of that name either" in said


def test_no_line_of_shell_comes_from_a_service(
    service: WorkedService, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {**resolve_cluster("frontier")[0].to_mapping(), "name": "mine"}
    told = {"description": {**described, "site": {"setup": ["x"]}}}
    answer_with(service, {"v1/clusters/mine": (200, told)})
    monkeypatch.setenv("LAYOUT_TUNER_URL", service.url)
    monkeypatch.setenv("LAYOUT_TUNER_TOKEN_FILE", str(token_file))
    assert described_cluster("mine") == described


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("worker --simulate frontire", "unknown cluster 'frontire'"),
        ("worker --simulate local-cpu", "no peak_flops_per_s, and simulated nodes cannot"),
        ("worker --simulate frontier --time-scale -1", "--time-scale=-1 is not"),
        ("worker --simulate frontier --time-scale nan", "'nan' is not a valid float"),
        ("worker --simulate frontier --workers 0", "--workers=0 is not a number"),
        ("worker --simulate frontier --seed -3", "--seed=-3 is under 0"),
        ("worker --simulate frontier --cluster frontier", "--cluster and --simulate"),
        ("worker --simulate frontier --launcher ray", "simulated nodes run no program"),
        ("worker --workers 2", "--workers is for simulated workers; add --simulate"),
        ("up --nodes 4", "--nodes and --simulate go together"),
        ("up --simulate frontier --cluster tiny", "--cluster and --simulate exclude"),
        ("up --time-scale 2", "--time-scale is for simulated workers"),
    ],
)
def test_options_of_simulated_workers_that_make_no_sense_are_refused(
    token_file: Path, words: str, sentence: str
) -> None:
    where = ["--url", "http://127.0.0.1:9", "--token-file", str(token_file)]
    if words.startswith("up"):
        where = ["--data-dir", str(token_file.with_name("data"))]
    refused = run_here(*words.split(), *where)
    assert refused.exit_code != 0
    assert sentence in " ".join(refused.output.split())
