from __future__ import annotations

from typing import Any

import click
import pytest

from search_spaces.errors import LayoutInvalidError
from search_spaces.spec.layout import KNOBS, Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS, resolve_cluster
from workers.command_line.options import layout_of, layout_options

FRONTIER = CLUSTER_PRESETS["frontier"]
GIVEN: dict[str, Any] = {
    "dp": 4,
    "micro_batch_size": 2,
    "num_microbatches": None,
    "global_batch_size": None,
    "precision": None,
}


def layout(**given: Any) -> Layout:
    return layout_of({**GIVEN, **given}, FRONTIER)


def test_the_global_batch_decides_the_micro_batches() -> None:
    assert layout(global_batch_size=64).num_microbatches == 8
    assert layout(num_microbatches=8).global_batch_size == 64
    assert layout(num_microbatches=8, global_batch_size=64) == layout(num_microbatches=8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give --num-microbatches or --global-batch-size"),
        (
            {"global_batch_size": 20},
            "--global-batch-size=20 is not divisible by dp*micro_batch_size=4*2=8; the nearest that "
            "is: 16 or 24",
        ),
        ({"global_batch_size": 3}, "the nearest that is: 8"),
        (
            {"global_batch_size": 64, "num_microbatches": 3},
            "--num-microbatches=3 makes a global batch of 24 (dp*micro_batch_size=4*2=8 times 3), not "
            "of --global-batch-size=64; leave one of the two out",
        ),
        ({"global_batch_size": 0}, "--global-batch-size=0 is not a whole number of at least 1"),
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
    assert layout_of({**GIVEN, "num_microbatches": 1}, local).precision == "fp32"


def test_every_knob_but_the_nodes_has_an_option() -> None:
    @click.command()
    @layout_options
    def command(**given: Any) -> None:
        del given

    names = [parameter.name for parameter in command.params]
    knobs = [name for name in KNOBS if name != "num_nodes"]
    assert [name for name in names if name != "global_batch_size"] == knobs
    assert names.index("global_batch_size") == names.index("num_microbatches") + 1
