"""Probes with the examples of trainers that need packages: accelerate and DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.program import read_trainers
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY
from tests.exports.trainer_environments import installed
from tests.kit.local_ranks import local_nodes
from tests.workers.programs.programs import MODEL, left_behind, run

pytestmark = [
    pytest.mark.exports,
    pytest.mark.ranks,
    pytest.mark.timeout(900),  # the first run installs them
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
CASES = {
    "accelerate-ddp": ("accelerate", Layout(dp=2, num_microbatches=2)),
    "deepspeed-zero": ("deepspeed", Layout(dp=2, num_microbatches=2, zero_stage=1)),
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with local_nodes(rank_entry=RANK_ENTRY) as nodes:
        yield nodes


@pytest.mark.parametrize("name", CASES)
def test_a_probe_with_a_real_trainer_counts_its_tokens(nodes: LocalNodes, name: str) -> None:
    packages, layout = CASES[name]
    trainer = read_trainers(
        yaml.safe_load((EXAMPLES / "trainers.yaml").read_text()), str(EXAMPLES)
    )[name]
    environment = {**trainer.environment, "PYTHONPATH": str(installed(packages))}
    trainer = replace(trainer, environment=environment)
    outcome = run(nodes, trainer, layout=layout, deadline_s=300.0)
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    assert outcome.measurement.tokens == "counted"
    assert outcome.measurement.tokens_per_step == layout.global_batch_size * MODEL.seq_length
    first, *_, last = outcome.measurement.iterations
    assert first.loss == pytest.approx(last.loss, rel=0.2)
    assert first.loss != last.loss
    assert left_behind(nodes) == []
    refused = run(nodes, trainer, layout=Layout(tp=2), deadline_s=300.0)
    assert "this script has data parallelism only, not tp=2 and pp=1" in refused.message
