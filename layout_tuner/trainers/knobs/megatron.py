"""Knobs of Megatron-LM and Megatron-Bridge.

Both fill the fields of megatron-core's configurations: Megatron-LM from flags of the same names,
Megatron-Bridge from overrides such as `model.moe_permute_fusion`. A knob is declared by its fields,
and both forms follow. The defaults are what the exports write.

Sources: MLM is Megatron-LM at d98e8a64 (core 0.20), MB Megatron-Bridge at 067f987d, and MB#5094 an
issue or pull request there; a module without a folder lies in `megatron/core`. Times are of steps.

The priors of the exchange of tokens come from four times of one model on one cluster (Qwen3 30B, 16
H100, ep=16): 41.25 and 31.31 s with all-to-all, 24.71 and 20.99 s with HybridEP, each without and
with overlap. With e for the share of the exchange in the step of 41.25 s, f for the factor of
HybridEP on it and h for the factor of overlap, 1 - e (1 - f) = 24.71/41.25, and the two gains of
overlap are e (1 - h) and e f (1 - h): f = 0.37, e = 0.64, h = 0.62.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.search_spaces.jobs.condition import Condition
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect, KnobKind, Touched
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.trainers.trainer_knob import VALUE, TrainerKnob, Writing
from layout_tuner.units import GIB

_EXCHANGE: Final = "MB#5094, MB#3862: Qwen3 30B on 16 H100, ep=16"
_GRAPHS: Final = (
    "MB skills/nemo-mbridge-perf-cuda-graphs: Qwen3 30B and GPT-OSS 20B, -16 to -25 %; MB#3868: "
    "+2 %; MB#4080: Llama 3 70B, -7 %"
)
_EXCHANGING: Final[tuple[Touched, ...]] = ("ep", "host")

_Ran = tuple[tuple[str, JobValue | None], ...]
Fields = Mapping[str, Any]
"""Values by path, which begins with the section of Megatron-Bridge."""
_NEGATED: Final[Mapping[str, tuple[str, ...]]] = {
    "rerun_state_machine.check_for_nan_in_loss": ("--no-check-for-nan-in-loss-and-grad",),
    "ddp.check_for_nan_in_grad": (),
}
"""Flags of fields that are true where no flag says otherwise; both fields have one flag."""


def _flag(path: str) -> str:
    name = {"ddp.bucket_size": "ddp_bucket_size"}.get(path, path.rpartition(".")[2])
    return f"--{name.replace('_', '-')}"


def _words(path: str, value: Any) -> tuple[str, ...]:
    if value is True:
        return (_flag(path),)
    values = value if isinstance(value, tuple) else (value,)
    return (_flag(path), *map(str, values))


def _flags(value: JobValue | None, fields: Fields, **more: Any) -> Writing:
    """Fields as flags of Megatron-LM: those that are false are left out."""
    set_fields = {path: each for path, each in fields.items() if each is not False}
    words = [word for each in set_fields.items() for word in _words(*each)]
    without = []
    for path in fields.keys() - set_fields.keys():
        words += _NEGATED.get(path, ())
        without += [] if path in _NEGATED else [_flag(path)]
    return Writing(value=value, arguments=tuple(words), without=tuple(sorted(without)), **more)


def _overrides(value: JobValue | None, fields: Fields, **more: Any) -> Writing:
    """Fields as overrides of Megatron-Bridge."""
    keys = {path: list(each) if isinstance(each, tuple) else each for path, each in fields.items()}
    if "model.cuda_graph_impl" in fields:  # models/gpt_provider.py asserts it
        keys |= {"model.use_te_rng_tracker": True, "rng.te_rng_tracker": True}
    return Writing(value=value, keys=keys, **more)


class _Knob:
    """A knob with its fields, for both trainers."""

    def __init__(
        self,
        name: str,
        source: str,
        *,
        fields: Fields | None = None,
        by_value: Mapping[JobValue, Fields] | None = None,
        default: JobValue = False,
        when: str | None = None,
        needs: Mapping[JobValue, str] | None = None,
        environment: Mapping[str, str] | None = None,
        before: tuple[Writing, ...] = (),
        lacking_in_bridge: bool = False,
        ran: _Ran | None = None,
        bridge_ran: _Ran = (),  # what it prints where it does something else
        **more: Any,
    ) -> None:
        kinds: dict[type, KnobKind] = {bool: "switch", str: "word", int: "count"}
        kind = kinds[type(default)]
        values = (False, True) if by_value is None else (default, *by_value)
        self.knob = JobKnob(
            **{"values": values} | more,
            name=name,
            kind=kind,
            default=default,
            when=None if when is None else Condition.read(when),
            needs=tuple((value, Condition.read(text)) for value, text in (needs or {}).items()),
        )
        self._fields: list[tuple[JobValue | None, Fields]] = [*(by_value or {}).items()]
        if fields is not None:
            self._fields.append((None, fields))
        self._source, self._environment = source, environment or {}
        self._before, self.in_bridge = before, not lacking_in_bridge
        printed = next(iter(self._fields[0][1])).rpartition(".")[2]
        shown = (rf"^\s*{printed} \.+ (?P<value>True|False)\s*$", None)
        self._ran = ran or ((shown,) if kind == "switch" else ())
        self._bridge_ran = bridge_ran

    def of(self, *, bridge: bool) -> TrainerKnob:
        write = _overrides if bridge else _flags
        since = self._before[0].before if self._before and not bridge else ""
        writings = tuple(
            write(value, fields, environment=self._environment, since=since)
            for value, fields in self._fields
        )
        return TrainerKnob(
            knob=self.knob,
            source=self._source,
            writings=writings if bridge else (*writings, *self._before),
            ran=self._bridge_ran if bridge else self._ran,
        )


def _te_graph(*modules: str) -> Fields:
    return {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_modules": modules}


_PARTIAL: Final = KnobEffect(
    touches=("compute", "host"),
    # The mean logarithm of the four published changes, 0.78, 0.80, 1.02 and 0.93, and their spread.
    factor=0.88,
    log_sd=0.12,
    memory_bytes=3 * GIB,
    memory_log_sd=0.05,
    source=_GRAPHS + "; a few GB: MB docs/performance-guide.md",
)
_WHOLE: Final = KnobEffect(
    touches=("compute", "host"),
    # 0.79 of the partial graphs' time (514 and 647 TFLOP/s a device).
    factor=0.7,
    log_sd=0.2,
    memory_factor=1.6,
    memory_log_sd=0.2,
    source="MLM examples/moe_recipes/README.md (dev): Qwen3 30B on 16 GB200; 1.5 to 2 times the "
    "peak: MB skills/nemo-mbridge-perf-cuda-graphs",
)
_OLD_GRAPHS: Final = tuple(
    Writing(
        value=value,
        arguments=("--cuda-graph-impl", implementation, "--cuda-graph-scope", *scope, *more),
        before="0.17",
    )
    for value, implementation, scope, more in (
        ("attn", "transformer_engine", ("attn",), ()),
        ("moe_router", "transformer_engine", ("moe_router", "moe_preprocess"), ()),
        (
            "attn_moe_router",
            "transformer_engine",
            ("attn", "moe_router", "moe_preprocess"),
            (),
        ),
        (
            "full_iteration",
            "local",
            ("full_iteration",),
            ("--no-check-for-nan-in-loss-and-grad",),
        ),
    )
)
"""Up to core 0.16 the modules were a scope, and the whole iteration a scope of `local`."""


def _dispatcher(backend: str) -> Fields:
    return {
        "model.moe_token_dispatcher_type": "flex",
        "model.moe_flex_dispatcher_backend": backend,
    }


_KNOBS: Final = (
    _Knob(
        "moe_dispatcher",
        "transformer/transformer_config.py, moe_token_dispatcher_type; moe_flex_dispatcher_backend",
        by_value={
            "allgather": {"model.moe_token_dispatcher_type": "allgather"},
            "deepep": _dispatcher("deepep"),
            "hybridep": _dispatcher("hybridep"),
        },
        default="alltoall",
        when="ep > 1",
        # Megatron-Bridge takes alltoall on other chips, and says so in its log.
        needs={
            "deepep": "device not in [gb200, gb300, v100, amd, cpu]",
            "hybridep": "device not in [v100, amd, cpu]",
        },
        touches=_EXCHANGING,
        effects={
            "hybridep": KnobEffect(
                # Between 0.37 there and 1.1 here: GPT-OSS 120B on 64 GB200 was 2 to 4 % slower.
                factor=0.64,
                log_sd=0.5,
                memory_log_sd=0.05,
                source=f"{_EXCHANGE}; MB#3561: GPT-OSS 120B on 64 GB200, slower",
            ),
            "deepep": KnobEffect(
                # HybridEP was 8 % faster a step than DeepEP, of which the exchange may be 0.4.
                factor=0.77,
                log_sd=0.5,
                memory_log_sd=0.05,
                source="HybridEP's, and MB#1731: DeepSeek-V3 on B200, 8 % slower than it; "
                "Megatron-LM#1456: slower within a node",
            ),
        },
        help="how tokens get to their experts; DeepEP and HybridEP are libraries of their own",
        ran=((r"^\s*moe_token_dispatcher_type \.+ (?P<value>allgather|alltoall)\s*$", None),),
        # training/flex_dispatcher_backend.py
        bridge_ran=((r"(?:DeepEP|HybridEP) is only .* Falling back to alltoall", "alltoall"),),
    ),
    _Knob(
        "ep_overlap",
        "model_parallel_config.py, overlap_moe_expert_parallel_comm",
        fields={"model.overlap_moe_expert_parallel_comm": True},
        when="ep > 1 and (pp == 1 or vpp > 1) and recompute != full and precision != fp32 and "
        "moe_dispatcher != allgather and num_mtp_layers <= 1",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},  # arguments.py, validate_args
        touches=("ep",),
        effects={
            True: KnobEffect(
                factor=0.62,
                log_sd=0.3,
                memory_log_sd=0.03,
                source=_EXCHANGE + ", -24 % with all-to-all and -15 % with HybridEP",
            )
        },
        help="the exchange of one micro-batch's tokens beside the products of another",
    ),
    _Knob(
        "cuda_graphs",
        "transformer/transformer_config.py, cuda_graph_impl; cuda_graph_modules",
        by_value={
            "attn": _te_graph("attn"),
            "moe_router": _te_graph("moe_router", "moe_preprocess"),
            "attn_moe_router": _te_graph("attn", "moe_router", "moe_preprocess"),
            "full_iteration": {
                "model.cuda_graph_impl": "full_iteration",
                "rerun_state_machine.check_for_nan_in_loss": False,
                "ddp.check_for_nan_in_grad": False,
            },
        },
        default="none",
        when="recompute != full",
        needs={
            "moe_router": "num_experts > 0",
            "attn_moe_router": "num_experts > 0",
            # A mixture needs buffers of a fixed size, which drop tokens: that is another training.
            "full_iteration": "num_experts == 0",
        },
        touches=("compute", "host"),
        effects={
            "attn": _PARTIAL,
            "moe_router": _PARTIAL,
            "attn_moe_router": _PARTIAL,
            "full_iteration": _WHOLE,
        },
        before=_OLD_GRAPHS,
        help="launches of kernels that are recorded once: of modules, or of the whole iteration",
    ),
    _Knob(
        "delay_wgrad",
        "model_parallel_config.py, delay_wgrad_compute",
        fields={"model.delay_wgrad_compute": True},
        when="ep_overlap",
        touches=("ep",),
        effects={
            True: KnobEffect(factor=0.99, log_sd=0.05, source="MB#3862: 31.31 and 31.20 s a step")
        },
        help="gradients of weights are computed beside the exchange; needs Transformer Engine 2.8",
    ),
    _Knob(
        "permute_fusion",
        "transformer/transformer_config.py, moe_permute_fusion",
        fields={"model.moe_permute_fusion": True},
        when="num_experts > 0",
        touches=("compute",),
        help="one kernel puts tokens in the order of their experts; needs Transformer Engine 2.1",
    ),
    _Knob(
        "router_fusion",
        "transformer/transformer_config.py, moe_router_fusion",
        fields={"model.moe_router_fusion": True},
        when="num_experts > 0",
        touches=("host", "compute"),
        losses="rounding",
        help="one kernel for the router's choice; needs Transformer Engine",
    ),
    _Knob(
        "grouped_gemm",
        "transformer/transformer_config.py, moe_grouped_gemm",
        fields={"model.moe_grouped_gemm": False},
        default=True,
        when="num_experts > 0",
        touches=("compute", "host"),
        help="the products of all local experts in one kernel",
    ),
    _Knob(
        "shared_expert_overlap",
        "transformer/transformer_config.py, moe_shared_expert_overlap",
        fields={"model.moe_shared_expert_overlap": True},
        when="ep > 1 and shared_expert_ffn_hidden_size > 0 and not ep_overlap and "
        "moe_dispatcher == alltoall",
        touches=("ep",),
        help="the shared expert is computed beside the exchange of tokens",
    ),
    _Knob(
        "tp_overlap",
        "model_parallel_config.py, tp_comm_overlap",
        fields={"model.tp_comm_overlap": True},
        # Megatron-Bridge turns it off in silence otherwise.
        when="tp > 1 and sequence_parallel",
        touches=("tp",),
        # training/comm_overlap.py
        bridge_ran=((r"Disabling tensor parallel communication overlap", False),),
        help="tensor parallel communication in pieces beside the products (userbuffers)",
    ),
    _Knob(
        "grad_overlap",
        "distributed/distributed_data_parallel_config.py, overlap_grad_reduce",
        fields={"ddp.overlap_grad_reduce": False, "ddp.overlap_param_gather": False},
        default=True,
        when="dp_cp > 1 and zero_stage == 1",
        touches=("dp",),
        help="reduction of gradients beside the backward pass; off: of weights beside the forward "
        "pass neither",
    ),
    _Knob(
        "param_gather_overlap",
        "distributed/distributed_data_parallel_config.py, overlap_param_gather",
        fields={"ddp.overlap_param_gather": False},
        default=True,
        when="dp_cp > 1 and zero_stage == 1 and grad_overlap",
        touches=("dp",),
        help="gathering of weights beside the forward pass",
    ),
    _Knob(
        "bucket_millions",
        "distributed/distributed_data_parallel_config.py, bucket_size",
        fields={"ddp.bucket_size": f"{VALUE}000000"},
        default=0,
        values=(0, 80, 200, 800),
        when="dp_cp > 1 and zero_stage == 1 and grad_overlap",
        touches=("dp",),
        help="millions of parameters that are reduced together; 0: 40, or one for each rank of dp",
    ),
    _Knob(
        "cross_entropy",
        "model_parallel_config.py, cross_entropy_loss_fusion; cross_entropy_fusion_impl",
        by_value={
            "native": {
                "model.cross_entropy_loss_fusion": True,
                "model.cross_entropy_fusion_impl": "native",
            },
            "te": {
                "model.cross_entropy_loss_fusion": True,
                "model.cross_entropy_fusion_impl": "te",
            },
        },
        default="unfused",
        touches=("compute",),
        losses="rounding",
        help="the kernel of the loss",
    ),
    _Knob(
        "moment_dtype",
        "optimizer/optimizer_config.py, exp_avg_dtype; exp_avg_sq_dtype",
        by_value={
            "bf16": {
                "optimizer.use_precision_aware_optimizer": True,
                "optimizer.exp_avg_dtype": "bf16",
                "optimizer.exp_avg_sq_dtype": "bf16",
            }
        },
        default="fp32",
        when="zero_stage == 1 and precision != fp32 and optimizer_states == fp32",
        touches=("optimizer",),
        effects={
            "bf16": KnobEffect(
                # 8 of 12 bytes a parameter: two moments of 2 bytes in place of 4, weights of 4.
                memory_of="optimizer",
                memory_factor=8 / 12,
                source="optimizer/optimizer_config.py: bytes a parameter",
            )
        },
        losses="other",
        lacking_in_bridge=True,  # its overrides are words, and the field is a torch.dtype
        help="type of Adam's moments",
    ),
)

MEGATRON_LM_KNOBS: Final = tuple(each.of(bridge=False) for each in _KNOBS)
MEGATRON_BRIDGE_KNOBS: Final = tuple(each.of(bridge=True) for each in _KNOBS if each.in_bridge)
