"""Expert parallelism: layouts that divide experts train as those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.trainer.cases import ADAMW, assert_same_training, make_layout, make_shape, train
from tests.workers.trainer.test_parity import reference

pytestmark = pytest.mark.ranks

EP, ETP = {"dp": 2, "ep": 2}, {"dp": 2, "etp": 2}
OVER_TP = {"tp": 2, "sequence_parallel": True}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "axes",
    [
        EP,
        ETP,
        OVER_TP,
        OVER_TP | {"ep": 2},
        OVER_TP | {"etp": 2},
        {"dp": 4, "ep": 4, "micro_batch_size": 1, "num_microbatches": 2},
        {"dp": 4, "ep": 2, "micro_batch_size": 1, "num_microbatches": 2},
    ],
    ids=str,
)
def test_divided_experts_follow_the_reference(axes: dict[str, Any]) -> None:
    shape = make_shape("moe")
    assert_same_training(train(shape, make_layout(**axes)), reference(shape, ADAMW))
