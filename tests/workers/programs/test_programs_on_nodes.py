"""Programs on several nodes, and real trainers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from layout_tuner.protocol.measurement import Measurement
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.program import ProgramTrainer, read_trainers
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.launchers.placement import core_share
from layout_tuner.workers.launchers.ray.launcher import ray_launcher
from tests.kit.local_ranks import SeveralLocalNodes, run_probe
from tests.workers.busy_cores import busy
from tests.workers.programs.programs import (
    MODEL,
    TWO_CORES,
    left_behind,
    make_request,
    python_trainer,
    run,
)

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[3] / "examples" / "trainers"
MEET_OVER_NODES = """
import socket
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if RANK == 0:
    listening = socket.create_server(where)
    peers = [listening.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    for peer in peers:
        peer.sendall(b"x")
else:
    for _ in range(1000):
        try:
            peer = socket.create_connection(where)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    peer.recv(1)
"""
ACROSS = replace(TWO_CORES, num_nodes=2, devices_per_node=2)


def example(name: str) -> ProgramTrainer:
    document = yaml.safe_load((EXAMPLES / "trainers.yaml").read_text())
    return read_trainers(document, str(EXAMPLES))[name]


def measured(outcome: Outcome) -> Measurement:
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    return outcome.measurement


RANK_OF_EACH_DEVICE = """
assert int(os.environ["NODE_RANK"]) == RANK // 2
assert os.environ["LOCAL_RANK"] == str(RANK % 2)
train(tokens=128)
"""
RANK_OF_EACH_NODE = """
assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "1")
assert len(os.sched_getaffinity(0)) >= min(2, os.cpu_count())
os.environ["RANK"] = str(2 * RANK + 1)  # as the second of the ranks that it has started
train(tokens=128)
"""


# The other node is silent: its reports alone would be a measurement.
RANK_OF_ANOTHER_NODE = """
if RANK == 1:
    time.sleep(600)
os.environ["RANK"] = "2"
train()
"""


def run_across(nodes: SeveralLocalNodes, code: str, **fields: Any) -> Outcome:
    layout = Layout(dp=4, num_nodes=2)
    return run(nodes, python_trainer(code, **fields), layout=layout, cluster=ACROSS)


def test_a_program_on_two_nodes_has_a_rank_for_each_device(two_nodes: SeveralLocalNodes) -> None:
    outcome = run_across(two_nodes, MEET_OVER_NODES + RANK_OF_EACH_DEVICE)
    assert measured(outcome).tokens_per_step == 128


def test_a_program_of_one_process_a_node_has_its_nodes_rank(two_nodes: SeveralLocalNodes) -> None:
    outcome = run_across(two_nodes, MEET_OVER_NODES + RANK_OF_EACH_NODE, processes_per="node")
    assert measured(outcome).tokens_per_step == 128
    liar = run_across(two_nodes, RANK_OF_ANOTHER_NODE, processes_per="node")
    assert "the program reported as rank 2, and its ranks are 0 to 1" in liar.message


@pytest.mark.slow
def test_a_program_runs_over_ray() -> None:
    trainer = python_trainer(MEET_OVER_NODES + "train(tokens=64)")
    with ray_launcher(TWO_CORES, trainers={"theirs": trainer}) as launcher:
        assert measured(run_probe(launcher, make_request())).tokens_per_step == 64


OF_GPT = (
    Layout(tp=2, num_microbatches=4),
    Layout(pp=2, num_microbatches=4, recompute="full"),
    Layout(dp=2, num_microbatches=2, zero_stage=1),
)
OF_LLAMA = (
    Layout(tp=2, num_microbatches=4, sequence_parallel=True),
    Layout(dp=2, micro_batch_size=2),
    Layout(pp=2, dp=2, num_microbatches=2),
    Layout(tp=2, dp=2, num_microbatches=2, zero_stage=1),
)


@pytest.mark.slow
@pytest.mark.timeout(400)  # several probes of real ranks, beside other tests
@pytest.mark.parametrize(
    ("model", "layouts"),
    [(MODEL, OF_GPT), (replace(MODEL, family="llama", num_kv_heads=2), OF_LLAMA)],
    ids=["gpt", "llama"],
)
def test_the_torch_native_example_has_the_losses_of_one_rank(
    nodes: LocalNodes, model: ModelShape, layouts: tuple[Layout, ...]
) -> None:
    def losses(layout: Layout) -> list[float]:
        trainer = example("torch-native")
        told = measured(run(nodes, trainer, layout=layout, model=model, deadline_s=60.0))
        assert (told.tokens, told.memory_kind) == ("counted", "sampled")
        assert told.tokens_per_step == layout.global_batch_size * MODEL.seq_length
        assert told.losses_comparable
        assert left_behind(nodes) == []
        return [each.loss for each in told.iterations][:5]

    reference = losses(Layout(num_microbatches=4))
    for layout in layouts:
        assert losses(layout) == pytest.approx(reference, rel=1e-4), layout


@pytest.mark.slow
def test_what_the_torch_native_example_cannot_do_it_says(nodes: LocalNodes) -> None:
    layout = Layout(recompute="selective")
    outcome = run(nodes, example("torch-native"), layout=layout)
    assert outcome.reason == "crashed"
    assert "recompute=selective is not written here; choose none or full" in outcome.message


def test_a_program_beside_busy_processes_is_disturbed(nodes: LocalNodes) -> None:
    # The program's child does the work, as that of a launcher does.
    steps = """
import time
from layout_tuner import report_step
for _ in range({steps}):
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    report_step(loss=1.0, peak_memory_bytes=1 << 20)
"""
    program = f"sys.exit(subprocess.run([sys.executable, '-c', {steps!r}]).returncode)"
    with busy(core_share(nodes.nodes[0], 0), 2):
        disturbed = run(nodes, python_trainer(program), layout=Layout(), deadline_s=60.0)
    assert disturbed.measurement is not None, disturbed.message
    # How much the two get beside the program is the scheduler's choice.
    assert disturbed.measurement.is_disturbed
