"""Options of Megatron's family that the reader does not take: which matter, and which do not.

Sources: megatron/training/arguments.py with the configurations whose fields become options
(Megatron-LM d98e8a64), and megatron/arguments.py of Megatron-DeepSpeed (f4157bea).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from layout_tuner.search_spaces.models.foreign_words import words_of
from layout_tuner.trainers.found_jobs.megatron.megatron_options import Arguments

_NO_COUNTERPART: Final = "it may change time or memory, and has no counterpart here"

_SWITCHING: Final = re.compile(r"--((no|disable|enable|use)-)?")
"""Beginnings of options that turn something on or off."""

_MATTERS: Final = re.compile(
    "|".join(
        words_of(
            r"""
            \S*offload\S* symmetric-ar-type deterministic-mode batch-invariant-\S+
            (main|megatron-fsdp)-\S+-dtype grad-reduce-in-bf16 fp[48]-param-gather fp8-output-proj
            fp32-residual-connection first-last-layers-bf16 num-layers-at-\S+-in-bf16
            te-precision-config-file embedding-weights-in-fp32 megatron-fsdp-(version|max-pool\S*)
            megatron-fsdp-enable-fine-grained-param-gather fsdp-double-buffer nccl-ub sharp
            overlap-p2p-communication(-warmup-flush)? ddp-num-buckets overlap-cpu-optimizer-\S+
            microbatch-group-size-per-virtual-pipeline-stage defer-embedding-wgrad-compute
            overlap-param-gather-with-optimizer-step overlap-dispatch-backward-\S+ ep-overlap-\S+
            moe-paged-stash moe-\S*capacity\S* expert-tensor-parallel-num-weight-shards gtp-\S+
            transformer-engine-op-fuser mlp-chunks-for-training mtp-standalone
            pipeline-model-parallel-split-rank standalone-embedding-stage hierarchical-\S+
            zbh1-\S+ ds-sequence-parallel-fpdt\S* force-ds-sequence-parallel tutel tile-factor
            split-transformers scattered-embeddings synchronize-each-layer variable-seq-lengths
            max-seqlen-per-dp-cp-rank kitchen-attention
            """
        )
    )
)
"""What changes time or memory, and cannot be said by a layout, a model or a job knob."""

_SETS: Final[Mapping[str, str]] = {
    r"recompute|swap-attention|checkpoint-(activations|layers)": "recompute",
    r"zero(-|\d)|fsdp|distributed-optimizer": "zero_stage",
    r"noop-layers": "model.num_layers",
    r"layer-list|pp-partition|pipeline(?!.*comm)|vpp|-stage-": "pipeline_split",
    r"schedules?-method": "schedule",
    r"tensor-(model-)?parallel-size|model-parallel-size": "tp",
    r"ulysses|ring-attn|context-parallel": "cp",
    r"moe-tp-extend-ep|moe-extended-tp": "etp",
    r"expert-(model-)?parallel": "ep",
    r"fp8|fp4|mxfp": "precision",
    r"data-parallel-size": "dp",
    r"seq-len(gth)?$|sequence-length": "model.seq_length",
    r"(global|micro|train)-batch": "global_batch_size",
    r"vocab-size|patch-tokenizer": "model.vocab_size",
    r"shared-expert": "model.shared_expert_ffn_hidden_size",
    r"dense-replace|moe-layer": "model.num_dense_layers",
    r"moe-intermediate": "model.moe_ffn_hidden_size",
    r"(num|n)-(routed-)?experts": "model.num_experts",
    r"hidden-size|intermediate-size|ffn-": "model.ffn_hidden_size",
    r"head-kv|kv-heads|heads-kv|key-value|multi-?query|head-type": "model.num_kv_heads",
    r"window": "model.attention_window",
    r"glu|activation|gelu|rope|rotary|alibi|pos(ition)?-emb": "model.family",
    r"tie-": "model.tied_embeddings",
}
"""The field that an option of a fork may set, by a part of its name; the first that fits counts.
Such an option is not read, since forks differ in what its values mean."""
_OF_KERNELS: Final = re.compile(
    r"fus|overlap-|comm|async|-impl$|backend|mem-|memory|opt(imi[sz]e)?-"
)
"""Parts of names of options that choose a kernel or its order."""

_OTHER_SUBJECTS: Final = words_of(
    """
    adam adlr aml app-tag async bert biencoder block-data check-for check-weight checkpoint-args
    checkpoint-opt checkpoint-assume ckpt classes config-logger cuda-graph-warmup data
    data-sharding dataloader dataset deepscale dino dist-ckpt distrib-optim distributed-backend
    distributed-timeout ds-inference dsa dump-param error-injection eval evidence exit fault fim
    flight-recorder ft full-validation gpu-sniff grpo head-lr ict img indexer inference init-method
    init-model inprocess kill-switch langrl linear lion load local-rank log logging logits lr mamba
    manual-gc mask memory-snapshot merge mhc mid-level min-lr mla mock-data msc mscale mtp
    multiple-validation mup muon nccl-communicator non-persistent null-tokenizer nvtx
    object-storage one-logger otel per-dataset per-split persistent phase-transition profile
    pytorch-profiler qk-clip query-in record refit replication rerun reset result-rejected
    retriever retro rl run-workload sample-rate save seed sft sgd short-seq skip-train
    special-tokens split start-eval start-weight straggler swin te-rng tensorboard test tiktoken
    timing titles tokenizer train trust universal-checkpoint valid validation verify vision
    vocab-extra wandb warmup weight-decay yarn kd decoupled chunked-prefill relative-attention
    kitchen-attention-backend rope-scaling moe-paged-stash-buffer moe-paged-stash-page tokenizer-model
    """
)
"""Beginnings of options for data, logs, saving, the learning rate, other models and the parts of
models that are named by another option."""

_OTHER_NAMES: Final = words_of(
    """
    accumulate-allreduce-grads-in-fp32 align-grad-reduce align-param-gather
    allow-ambiguous-pad-tokens apply-layernorm-1p apply-query-key-layer-scaling
    apply-wd-to-qk-layernorm attention-softmax-in-fp32 auto-detect-ckpt-format
    barrier-with-level-1-timing bf16-reduced-precision-matmul bias-dropout-fusion
    bias-gelu-fusion bias-swiglu-fusion cache-mla-latents calc-ft-timeouts
    calculate-per-token-loss chat-template check-for-nan-in-loss-and-grad clip-grad
    clone-scatter-output-in-embedding contiguous-buffers-in-local-ddp cpu-initialization
    cpu-torch-adam create-all-gather-group create-attention-mask-in-dataloader
    create-moe-param-group ddp-average-in-collective ddp-impl
    ddp-pad-buckets-for-high-nccl-busbw ddp-param-name-patterns-for-fp32-local-accumulation
    ddp-reduce-scatter-with-fp32-accumulation decode-only-cuda-graphs decoder-seq-length
    decrease-batch-size-if-needed ds-fused-adam embedding-init-method-std embedding-path
    empty-unused-memory-level end-weight-decay eod-mask-loss experimental fake-process-group
    finetune flash-attention-version flash-decode fp16-lm-cross-entropy fp4-quantizer-factory
    fp4-recipe fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin
    fp8-quantizer-factory fp8-wgrad freeze-all-layers fsdp-db-use-persist-buf-on-alloc-fail
    fsdp-manual-registration full-sharding-in-hsdp fused-residual-rmsnorm
    fused-weighted-squared-relu gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute
    gdp-num-householder gigatoken gloo-process-groups glu-linear-offset
    gradient-accumulation-fusion gradient-reduce-div-fusion grouped-gemm-for-dense-mlp
    grouped-gemm-for-shared-expert help high-priority-a2a-comm-stream
    high-priority-stream-groups hysteresis activation-func-clamp-value initial-loss-scale
    initialization iter-per-epoch iterations-to-skip jit-fuser keep-fp8-transpose-cache
    layer-wise-param-layout layernorm-epsilon lazy-mpu-init legacy-models legacy-static-engine
    local-rank loss-scale loss-scale-window masked-softmax-fusion max-tokens-to-oom mcore-models
    mem-efficient-ln min-loss-scale mlp-chunks-for-prefill mmap-bin-files mmap-warmup
    moe-apply-probs-on-input moe-aux-loss-coeff moe-combine-bwd-dtype moe-deepep-num-sms
    moe-dispatch-fwd-dtype moe-enable-deepep moe-enable-routing-replay
    moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute
    moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing
    moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps moe-loss-coeff moe-min-capacity
    moe-mlp-glu-interleave-size moe-ncclep-zero-copy moe-per-layer-logging
    moe-permute-fusion-into-hybridep moe-router-bias-update-rate moe-router-dtype
    moe-router-force-biased moe-router-force-load-balancing moe-router-load-balancing-type
    moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
    moe-router-quantile-balancing-ema moe-routing-trace-capture-hidden-states
    moe-routing-trace-capture-logits moe-routing-trace-dump-weights
    moe-routing-trace-max-training-iters moe-routing-trace-path
    moe-shared-expert-glu-interleave-size moe-single-grouped-bias moe-single-grouped-weight
    moe-token-dropping moe-top2-2nd-expert-sampling moe-upcycling-granularity
    moe-use-grouped-tensor moe-use-upcycling moe-z-loss-coeff mp-args-from-checkpoint-args
    mrope-section nccl-all-reduce-for-prefill norm-epsilon num-channels num-classes
    num-dataset-builder-threads num-speculative-tokens num-workers one-sent-docs onnx-safe
    openai-gelu optimizer-cuda-graph output-bert-embeddings output-logit-dtype
    override-ckpt-iteration override-opt-param-scheduler pad-vocab-size patch-dim
    perform-rl-step persist-layer-norm pin-cpu-grads pin-cpu-params pin-memory
    pipeline-model-parallel-comm-backend pretrained-checkpoint qk-l2-norm
    query-key-layer-scaling repeated-dataloader return-data-index
    reuse-grad-buf-for-mxfp8-param-ag ring-exchange-p2p rope-freq rope-fusion rope-scaling
    rope-scaling-factor rope-type rotary-interleaved rotary-scaling-factor
    rotary-seq-len-interpolation-factor same-sampling-seed-across-dp-ranks
    scatter-gather-tensors-in-pipeline sharp-enabled-group strict-fsdp-dtensor-load
    suggested-communication-unit-size symmetric-registration te-activation-func
    tp-comm-bootstrap-backend tp-comm-bulk-dgrad tp-comm-bulk-wgrad tp-comm-overlap-ag
    tp-comm-overlap-cfg tp-comm-overlap-rs tp-comm-overlap-rs-dgrad tp-comm-split-ag
    tp-comm-split-rs async-tensor-model-parallel-allreduce weight-decay-cond-type
    wgrad-deferral-limit zero-allgather-bucket-size zero-contigious-gradients
    zero-reduce-bucket-size zero-reduce-scatter moe-pad-experts-for-cuda-graph-inference
    log-zero-guard-type log-zero-guard-value save-activations-interval moe-token-drop-policy
    original-max-position-embeddings partial-rotary-factor norm-topk-prob
    """
)
"""Options that leave layout, model, batch and precision as they are."""


def is_irrelevant(name: str) -> bool:
    """Whether an option, with hyphens, says nothing of layout, model, batch and precision."""
    bare = name.lower()
    for _ in range(2):  # also `--no-use-...`
        bare = "--" + _SWITCHING.sub("", bare, count=1)
    bare = bare.removeprefix("--")
    if bare in _OTHER_NAMES or bare.endswith("-teacher"):
        return True
    if re.match(r"(data|train|load|log|merge|save|split|test)-", bare) and field_of(name):
        return False  # an option of a fork: the word alone does not tell what it is about
    return any(bare == each or bare.startswith(f"{each}-") for each in _OTHER_SUBJECTS)


def matters(name: str) -> bool:
    """Whether an option is known to change time or memory in a way that nothing here says."""
    return _MATTERS.fullmatch(_SWITCHING.sub("", name, count=1)) is not None


_DATA: Final = re.compile(r"--(\S*data-path|split|profile-ranks|data-args)")


def note_others(arguments: Arguments, known: set[str]) -> None:
    """Lists the options that matter and are not read, and those that nobody knows.

    Args:
        arguments: all options; what the reader asked for is known.
        known: names that job knobs have taken.
    """
    optimizer = arguments.text("", "--optimizer")
    if optimizer not in (None, "adam", "adamw") and not arguments.findings.is_open("zero_stage"):
        option = arguments.options["--optimizer"]
        arguments.miss(option, "predictions are for Adam, which has two states a weight")
    for name, option in arguments.options.items():
        if name in arguments.asked or name in known:
            pass
        elif matters(name):
            if not option.said.endswith((" 0", "=0", " none")):
                arguments.miss(option, _NO_COUNTERPART)
        elif not is_irrelevant(name):
            why = f"{arguments.trainer} has no such option that is known here"
            if " --" in name:
                why = "all these options are one word: their variable stands in quotes"
            arguments.miss(option, why, field_of(name))
        # What a variable may hold behind an option's own value: further options.
        for word in () if _DATA.fullmatch(name) else option.values[1:]:
            if word.text is None:
                arguments.findings.miss(word.said, word.why, line=word.line)


def field_of(name: str) -> str:
    """The field that an unknown option may set; empty: none, as far as its name says."""
    if _OF_KERNELS.search(name):
        return ""
    return next((field for part, field in _SETS.items() if re.search(part, name)), "")
