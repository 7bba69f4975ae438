"""One file describes a cluster to every command: `cluster put`, `estimate`, `allocation submit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.kit.api import CAMPAIGN, Command
from tests.kit.services import ServeProcess
from tuner.estimate.commands import estimate

EXAMPLE = Path(__file__).parents[3] / "examples" / "our-cluster.yaml"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("lt_worker")
    file.chmod(0o600)
    return file


def put(run: Command, file: Path) -> Result:
    return run("cluster", "put", "our-cluster", file)


def estimated(run: Command, file: Path) -> Result:
    flags = ("--model=llama-8b", "--tp=4", "--dp=2", "--global-batch-size=64", "--zero-stage=1")
    return run("estimate", f"--cluster={file}", *flags, "--json")


def allocated(run: Command, file: Path, token_file: Path) -> Result:
    words = ("submit", "--nodes=2", "--time=1h", "--account=A", "--dry-run")
    place = ("--url=http://service.example.org:8080", f"--token-file={token_file}")
    place = (*place, f"--worker-token-file={token_file}")
    return run("allocation", *words, *place, f"--cluster={file}")


def test_the_example_of_a_cluster_file_works_with_every_command(
    run: Command, token_file: Path, tmp_path: Path
) -> None:
    made = put(run, EXAMPLE)
    assert made.exit_code == 0, made.output
    assert "the section site" in made.stderr
    assert "warning" not in made.stderr
    shown = json.loads(run("cluster", "show", "our-cluster", "--json").stdout)["description"]
    assert (shown["num_nodes"], shown["devices_per_node"]) == (32, 4)
    assert "site" not in shown

    found = estimated(run, EXAMPLE)
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert (report["cluster"], report["num_nodes"]) == ("our-cluster", 2)
    assert report["precision"] == "bf16"

    rendered = allocated(run, EXAMPLE, token_file)
    assert rendered.exit_code == 0, rendered.output
    assert "module load cuda/12.8" in rendered.stdout
    assert "#SBATCH --gres=gpu:4" in rendered.stdout

    file = tmp_path / "campaign.yaml"
    space = {"global_batch_size": 64, "num_nodes": [2, 4], "tp": [2, 4], "zero_stage": 1}
    document = {**CAMPAIGN, "model": "llama-1b", "cluster": "our-cluster", "space": space}
    file.write_text(yaml.safe_dump(document))
    submitted = run("campaign", "submit", file, "--json")
    assert submitted.exit_code == 0, submitted.output
    assert json.loads(submitted.stdout)["spec"]["cluster"] == shown


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": 4}, "unknown cluster field 'gpus'"),
        ({"site": {"preset": "fronteer"}}, "site: unknown site 'fronteer'"),
        ({"site": {"drain_s": 0}}, "site.drain_s: 0 is not a number over 0"),
    ],
    ids=str,
)
def test_every_command_refuses_the_same_mistakes_of_a_cluster_file(
    run: Command, token_file: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(EXAMPLE.read_text()), **changes}))
    for refused in (put(run, file), estimated(run, file), allocated(run, file, token_file)):
        assert refused.exit_code in (1, 2)
        assert says in " ".join(refused.stderr.split()), refused.output
        assert refused.stdout == ""


def test_a_cluster_file_without_a_site_works_with_every_command(
    run: Command, token_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plain.json"
    document = yaml.safe_load(EXAMPLE.read_text())
    del document["site"]
    file.write_text(json.dumps(document))
    assert put(run, file).stderr == ""
    assert estimated(run, file).exit_code == 0
    assert "nothing is known of our-cluster's site" in allocated(run, file, token_file).stderr


def test_a_cluster_of_the_service_is_known_by_its_name(
    run: Command, service: ServeProcess, token_file: Path, tmp_path: Path
) -> None:
    assert put(run, EXAMPLE).exit_code == 0
    flags = ("--model=llama-8b", "--tp=4", "--dp=2", "--num-microbatches=4", "--zero-stage=1")
    by_name = run("estimate", "--cluster=our-cluster", *flags, "--json")
    assert by_name.exit_code == 0, by_name.output
    by_file = json.loads(run("estimate", f"--cluster={EXAMPLE}", *flags, "--json").stdout)
    assert json.loads(by_name.stdout) == by_file

    smaller = tmp_path / "smaller.yaml"
    smaller.write_text("{preset: our-cluster, num_nodes: 1, device_memory_gb: 40}")
    shrunk = json.loads(
        run("estimate", f"--cluster={smaller}", *flags[:2], flags[3], "--json").stdout
    )
    assert shrunk["device_memory_bytes"] == 40 << 30

    probed = run("probe", "--cluster=our-cluster", "--model=tiny", "--tp=8", "--num-microbatches=1")
    assert (probed.exit_code, probed.stdout) == (2, "")
    assert "tp=8" in probed.stderr
    assert "unknown cluster" not in probed.stderr

    token_file.write_text((service.data_dir / "token").read_text())
    place = (f"--url={service.service['url']}", f"--token-file={token_file}")
    words = ("submit", "--nodes=2", "--time=1h", "--dry-run", "--cluster=our-cluster")
    rendered = run(
        "allocation", *words, *place, "--worker-token-file", service.data_dir / "worker-token"
    )
    assert rendered.exit_code == 0, rendered.output
    assert '"num_nodes": 32' in rendered.stdout, "the job does not have to ask again"


def test_an_unknown_name_says_where_it_was_looked_for(
    run: Command, service: ServeProcess, tmp_path: Path
) -> None:
    assert put(run, EXAMPLE).exit_code == 0
    flags = ("--model=tiny", "--num-microbatches=1", "--cluster=our-clutser")
    refused = run("estimate", *flags)
    assert refused.exit_code == 2
    assert "did you mean 'our-cluster'" in refused.stderr
    assert f"the service at {service.service['url']} has no cluster of that name" in refused.stderr
    alone = CliRunner().invoke(
        estimate, [*flags], env={"LAYOUT_TUNER_DATA_DIR": str(tmp_path / "none")}
    )
    assert alone.exit_code == 2
    assert "no service was asked (no service runs on the data directory" in alone.stderr
