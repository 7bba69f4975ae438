from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.spec import rules
from search_spaces.spec.batch import GlobalBatch
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.rules import ALL_SCOPES, PROBE_SCOPES, RULES, RuleContext, violations
from search_spaces.units import GIB

NODES = Cluster(name="box", device="card", num_nodes=4, devices_per_node=8, device_memory_bytes=GIB)

WITHOUT_TRAINER = ALL_SCOPES - {"trainer"}


def make_model(**changes: Any) -> ModelShape:
    shape = {
        "name": "twelve",
        "family": "llama",
        "num_layers": 12,
        "hidden_size": 768,
        "ffn_hidden_size": 3072,
        "num_heads": 24,
        "num_kv_heads": 24,
        "seq_length": 96,
        "vocab_size": 960,
        "tied_embeddings": False,
    }
    return ModelShape(**{**shape, **changes})


def make_layout(**changes: Any) -> Layout:
    return Layout(**changes)


# A layout that breaks one rule alone: rule, its changes, the model's, what else, the sentence.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (
        "heads_over_tp",
        {"tp": 8},
        {"num_heads": 12, "num_kv_heads": 4},
        {},
        "num_heads=12 is not divisible by tp=8",
    ),
    (
        "kv_heads_over_tp",
        {"tp": 8},
        {"num_kv_heads": 4},
        {},
        "num_kv_heads=4 is not divisible by tp=8, and key/value heads are not replicated over "
        "tensor-parallel ranks",
    ),
    (
        "ffn_over_tp",
        {"tp": 8},
        {"ffn_hidden_size": 3076},
        {},
        "ffn_hidden_size=3076 is not divisible by tp=8",
    ),
    (
        "vocab_over_tp",
        {"tp": 8},
        {"vocab_size": 1001},
        {},
        "vocab_size=1001 is not divisible by tp=8",
    ),
    (
        "layers_over_stages",
        {"pp": 4, "vpp": 2, "num_microbatches": 4},
        {},
        {},
        "num_layers=12 is not divisible by pp*vpp=4*2=8",
    ),
    (
        "interleaving_needs_pipeline",
        {"vpp": 2},
        {},
        {},
        "vpp=2 has no pipeline to interleave: pp=1",
    ),
    (
        "interleaved_microbatches",
        {"pp": 2, "vpp": 2, "num_microbatches": 5},
        {},
        {},
        "num_microbatches=5 is not divisible by pp=2, which the interleaved schedule of vpp=2 needs",
    ),
    (
        "sequence_over_tp",
        {"tp": 8, "sequence_parallel": True},
        {"seq_length": 100},
        {},
        "seq_length=100 is not divisible by tp=8, which sequence_parallel needs",
    ),
    (
        "nodes_exist",
        {"num_nodes": 5, "dp": 40},
        {},
        {},
        "num_nodes=5 is more than the 4 of box",
    ),
    (
        "tp_within_node",
        {"num_nodes": 3, "tp": 24},
        {},
        {},
        "tp=24 is more than devices_per_node=8, so that tensor parallelism leaves the node "
        "(allow_tp_across_nodes is false)",
    ),
    (
        "tp_within_node",
        {"num_nodes": 3, "tp": 6, "dp": 4},
        {},
        {},
        "devices_per_node=8 is not divisible by tp=6 on num_nodes=3, so that tensor parallelism "
        "leaves the node (allow_tp_across_nodes is false)",
    ),
    (
        "world_size",
        {"tp": 2, "pp": 3, "dp": 2},
        {},
        {},
        "tp*pp*dp=2*3*2=12 is more than num_nodes*devices_per_node=1*8=8",
    ),
    (
        "world_size",
        {"num_nodes": 2, "tp": 2, "pp": 3, "dp": 2},
        {},
        {},
        "tp*pp*dp=2*3*2=12 does not fill num_nodes*devices_per_node=2*8=16",
    ),
    (
        "precision_of_device",
        {"precision": "fp16"},
        {},
        {"cluster": replace(NODES, peak_flops_per_s={"fp32": 1e12, "bf16": 2e12})},
        "precision=fp16 is not one that box states a peak for (fp32, bf16)",
    ),
    (
        "global_batch",
        {"dp": 2, "micro_batch_size": 3, "num_microbatches": 2},
        {},
        {"global_batch": 16},
        "global_batch_size=16 is not divisible by dp*micro_batch_size=2*3=6",
    ),
    (
        "global_batch",
        {"dp": 2, "micro_batch_size": 4, "num_microbatches": 3},
        {},
        {"global_batch": 16},
        "dp*micro_batch_size*num_microbatches=2*4*3=24 is not global_batch_size=16",
    ),
    (
        "global_batch",
        {"dp": 2, "micro_batch_size": 4, "num_microbatches": 3},
        {},
        {"global_batch": GlobalBatch(minimum=1, maximum=23)},
        "dp*micro_batch_size*num_microbatches=2*4*3=24 lies outside global_batch_size from 1 to 23",
    ),
    (
        "zero_groups_over_dp",
        {"dp": 4, "zero_stage": 1, "zero_replicas": 3},
        {},
        {},
        "dp=4 is not divisible by zero_replicas=3",
    ),
    (
        "zero_groups_need_zero",
        {"dp": 4, "zero_replicas": 2},
        {},
        {},
        "zero_replicas=2 has no sharded optimizer states to copy: zero_stage=0",
    ),
    (
        "zero_needs_groups",
        {"dp": 4, "zero_stage": 1, "zero_replicas": 4},
        {},
        {},
        "zero_stage=1 with zero_replicas=4 of dp=4 is the same job as zero_stage=0: every rank "
        "would hold all optimizer states",
    ),
    (
        "zero_needs_replicas",
        {"zero_stage": 1},
        {},
        {},
        "zero_stage=1 with dp=1 is the same job as zero_stage=0",
    ),
    (
        "sequence_parallel_needs_tp",
        {"sequence_parallel": True},
        {},
        {},
        "sequence_parallel=true with tp=1 is the same job as sequence_parallel=false",
    ),
]

TRAINER_CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"precision": "fp16"},
        "precision=fp16 is not supported by the embedded trainer (fp32, bf16)",
    ),
]


def judge(layout: Layout, model: ModelShape, options: dict[str, Any]) -> list[str]:
    options = {"scopes": WITHOUT_TRAINER, **options}
    return violations(layout, model, options.pop("cluster", NODES), **options)


@pytest.mark.parametrize(("rule", "layout", "model", "options", "sentence"), CASES)
def test_a_broken_rule_names_the_offending_numbers(
    rule: str, layout: dict[str, Any], model: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    assert judge(make_layout(**layout), make_model(**model), options) == [sentence]


def test_every_rule_outside_the_trainer_has_a_case() -> None:
    assert {case[0] for case in CASES} == {r.name for r in RULES if r.scope != "trainer"}


@pytest.fixture
def lesser_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that lacks everything that a rule asks about."""
    monkeypatch.setattr(rules, "PRECISIONS_SUPPORTED", ("fp32", "bf16"))


@pytest.mark.usefixtures("lesser_trainer")
@pytest.mark.parametrize(("layout", "sentence"), TRAINER_CASES)
def test_what_the_embedded_trainer_lacks_is_refused_unless_that_scope_is_left_out(
    layout: dict[str, Any], sentence: str
) -> None:
    assert violations(make_layout(**layout), make_model(), NODES) == [sentence]
    assert violations(make_layout(**layout), make_model(), NODES, scopes=WITHOUT_TRAINER) == []


@pytest.mark.usefixtures("lesser_trainer")
def test_the_trainers_rules_are_each_broken_by_one_case() -> None:
    context = RuleContext(model=make_model(), cluster=NODES)
    rules = [rule for rule in RULES if rule.scope == "trainer"]
    broken = [
        [rule.name for rule in rules if rule.illegal(LayoutColumns.of(Layout(**layout)), context)]
        for layout, _ in TRAINER_CASES
    ]
    assert [[rule.name] for rule in rules] == broken


def test_several_broken_rules_give_a_sentence_each() -> None:
    sentences = violations(make_layout(tp=7, pp=5), make_model(), NODES)
    assert [sentence.split(" ")[0] for sentence in sentences] == [
        "num_heads=24",
        "ffn_hidden_size=3072",
        "vocab_size=960",
        "num_layers=12",
        "tp*pp*dp=7*5*1=35",
    ]


@pytest.mark.parametrize(
    "layout",
    [
        make_layout(),
        make_layout(tp=3, dp=2),
        make_layout(tp=8, num_nodes=4, pp=4),
        make_layout(tp=2, pp=2, dp=2, zero_stage=1, recompute="full", precision="bf16"),
    ],
    ids=lambda layout: layout.key,
)
def test_a_legal_layout_breaks_nothing(layout: Layout) -> None:
    batch = GlobalBatch.exactly(layout.global_batch_size)
    assert violations(layout, make_model(), NODES, global_batch=batch) == []


def test_a_single_node_need_not_be_filled_and_its_tp_need_not_divide_it() -> None:
    assert violations(make_layout(tp=3, dp=2), make_model(), NODES) == []


def test_tp_across_nodes_is_legal_where_it_is_allowed() -> None:
    layout = make_layout(num_nodes=3, tp=24)
    assert violations(layout, make_model(), NODES, allow_tp_across_nodes=True) == []


def test_a_probe_by_hand_may_have_more_ranks_than_devices_and_be_redundant() -> None:
    layout = make_layout(tp=4, pp=4, dp=1, zero_stage=1)
    assert len(violations(layout, make_model(), NODES)) == 2
    assert violations(layout, make_model(), NODES, scopes=PROBE_SCOPES) == []


@pytest.mark.usefixtures("lesser_trainer")
def test_a_probe_by_hand_is_held_to_the_model_and_the_trainer() -> None:
    layout = make_layout(tp=5, precision="fp16")
    sentences = violations(layout, make_model(), NODES, scopes=PROBE_SCOPES)
    assert len(sentences) == 3
    assert sentences[-1].startswith("precision=fp16 is not supported")


def test_a_cluster_without_peaks_runs_every_precision() -> None:
    assert violations(make_layout(precision="bf16"), make_model(), NODES) == []
