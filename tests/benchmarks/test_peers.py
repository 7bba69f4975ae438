"""The peers train the model that the trainer trains: else a benchmark compares nothing."""

import dataclasses
import warnings

import pytest

from benchmarks.side_by_side import LossesDifferError
from benchmarks.trainer import trainer_cells
from benchmarks.trainer.bare_model import BareLoop, MixedPrecision
from benchmarks.trainer.trainer_cells import Cell, measure_cell
from search_spaces.spec.layout import Layout, Precision
from tests.workers.trainer.cases import make_layout, make_shape, make_training
from workers.trainer.parallel.optimizer import OptimizerSettings

with warnings.catch_warnings():  # torch deprecates parts of itself as they are imported
    warnings.simplefilter("ignore")
    from benchmarks.trainer.torch_native import NativeLoop, TensorParallelPlan

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore"),  # and as they are used
]
SHAPE = make_shape(num_layers=4)
SETTINGS = OptimizerSettings(learning_rate=1e-4)
STEPS = 3


@pytest.mark.parametrize(
    ("precision", "mixed", "tolerance"),
    [("fp32", "masters", 1e-6), ("bf16", "masters", 2e-3), ("bf16", "autocast", 2e-3)],
)
def test_the_bare_loop_loses_what_the_trainer_loses(
    precision: Precision, mixed: MixedPrecision, tolerance: float
):
    training = make_training(SHAPE, make_layout(precision=precision), settings=SETTINGS)
    bare = BareLoop(SHAPE, precision=precision, seed=0, settings=SETTINGS, mixed=mixed)
    for index in range(STEPS):
        batch = training.batch(index)
        assert bare.step(batch) == pytest.approx(training.step(batch).loss, rel=tolerance)


def test_the_bare_model_is_a_llama_alone():
    with pytest.raises(ValueError, match="test-gpt is no Llama with an untied head"):
        BareLoop(make_shape("gpt"), precision="fp32", seed=0, settings=SETTINGS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("degrees", "plan"),
    [
        ({"tp": 2}, "plain"),
        ({"tp": 2}, "prepared"),
        ({"tp": 2}, "sequence"),
        ({"pp": 2}, "prepared"),
        ({"dp": 2, "zero_stage": 1}, "prepared"),
    ],
)
def test_torch_native_loses_what_the_trainer_loses(
    monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int], plan: TensorParallelPlan
):
    _compare(monkeypatch, make_layout(**degrees), plan, tolerance=1e-6)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 1}])
def test_torch_native_adds_bf16_gradients_up_in_fp32(
    monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]
):
    _compare(monkeypatch, make_layout(precision="bf16", **degrees), "prepared", tolerance=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "pp": 2},
        {"tp": 2, "dp": 2, "zero_stage": 1},
        # With two micro-batches DDP counts each gradient of the first stage twice, and says so.
        {"pp": 2, "dp": 2, "zero_stage": 1, "micro_batch_size": 1, "num_microbatches": 4},
    ],
)
def test_torch_native_composes_its_axes(monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]):
    _compare(monkeypatch, make_layout(**degrees), "prepared", tolerance=1e-6)


def _compare(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, plan: TensorParallelPlan, *, tolerance: float
) -> None:
    monkeypatch.setattr(trainer_cells, "MODEL", SHAPE)
    monkeypatch.setitem(trainer_cells.LOSS_TOLERANCE, layout.precision, tolerance)
    monkeypatch.setitem(
        trainer_cells.PEERS,
        "torch-native",
        lambda layout: NativeLoop(SHAPE, layout, seed=0, settings=SETTINGS, plan=plan).step,
    )
    result = measure_cell(Cell(layout=layout, asked={"torch-native": 1.0}), num_rounds=1)
    assert result.loss_differences["torch-native"] <= tolerance
    losses = result.series["ours"].losses
    assert len(set(losses)) == len(losses), "the weights do not move"


def test_a_peer_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_cells, "MODEL", SHAPE)
    other = dataclasses.replace(SETTINGS, learning_rate=1e-2)
    monkeypatch.setitem(
        trainer_cells.PEERS,
        "bare",
        lambda layout: BareLoop(SHAPE, precision="fp32", seed=0, settings=other).step,
    )
    cell = Cell(layout=make_layout(), asked={"bare": 1.0})
    with pytest.raises(LossesDifferError, match="do not train the same model"):
        measure_cell(cell, num_rounds=1)
