"""A training program in plain torch that layout-tuner can run as a probe.

DTensor tensor parallelism, torch.distributed.pipelining, DDP and ZeroRedundancyOptimizer, in any
mixture, on CPUs (Gloo) and GPUs (NCCL). One process runs for each device, with the variables that
torchrun sets. Two things in it are for layout-tuner: it takes the layout as arguments, as
trainers.yaml beside it fills them in, and it calls `report_step` after each optimizer step. Outside
of a probe `report_step` does nothing, so that the same program trains:

    torchrun --nproc-per-node 2 torch_native.py --device cuda --tp 2 --num-microbatches 4

All layouts of a model start from the same weights and read the same tokens in the same order.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from layout_tuner import report_step

COUNTS = {
    "tp": 1, "cp": 1, "pp": 1, "dp": 1, "vpp": 1, "micro_batch_size": 1,
    "num_microbatches": 1, "zero_stage": 0, "zero_replicas": 1, "num_layers": 4, "hidden_size": 128,
    "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128,
    "vocab_size": 1024, "steps": 10, "seed": 0,
}  # fmt: skip
WORDS = {
    "family": ("gpt", "llama"),
    "recompute": ("none", "full", "selective"),
    "precision": ("fp32", "bf16", "fp16"),
    "sequence_parallel": ("false", "true"),
    "tied_embeddings": ("false", "true"),
    "cp_comm_type": ("all_gather", "p2p", "a2a"),
    "schedule": ("1f1b", "gpipe", "zero_bubble"),
    "rank_order": ("tp_cp_dp_pp", "tp_cp_pp_dp"),
    "pipeline_split": ("layers", "embedding", "head", "embedding_and_head"),
}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a GPT or a Llama on random tokens.")
    for name, default in COUNTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    for name, choices in WORDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", choices=choices, default=choices[0])
    parser.add_argument("--rotary-base", type=float, default=10000.0)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.recompute == "selective":
        sys.exit("recompute=selective is not written here; choose none or full")
    if args.precision == "fp16":
        sys.exit("precision=fp16 is not written here: it needs loss scaling; choose fp32 or bf16")
    if args.zero_stage > 1:
        sys.exit(f"zero_stage={args.zero_stage} is not written here; choose 0 or 1")
    if args.zero_replicas > 1:
        sys.exit(f"zero_replicas={args.zero_replicas} is not written here; choose 1")
    if args.cp > 1:
        sys.exit(f"cp={args.cp} is not written here; choose 1")
    if args.pipeline_split != "layers":
        sys.exit(f"pipeline_split={args.pipeline_split} is not written here; choose layers")
    if args.schedule == "zero_bubble":
        sys.exit("schedule=zero_bubble is not written here; choose 1f1b or gpipe")
    if args.tied_embeddings == "true" and args.tp * args.pp > 1:
        sys.exit(f"tied embeddings cannot be cut over tp={args.tp} and pp={args.pp} here")
    return args


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return normal.type_as(x) * self.weight


def make_norm(args: argparse.Namespace) -> nn.Module:
    is_llama = args.family == "llama"
    return RMSNorm(args.hidden_size) if is_llama else nn.LayerNorm(args.hidden_size)


def make_embedding(*size: int) -> nn.Embedding:
    embedding = nn.Embedding(*size)
    nn.init.normal_(embedding.weight, std=0.02)
    return embedding


class Attention(nn.Module):
    """Causal attention; a Llama's has rotary positions and may have fewer heads of keys."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden, self.head_size = args.hidden_size, args.hidden_size // args.num_heads
        self.grouped, self.rotary = args.num_heads != args.num_kv_heads, args.family == "llama"
        kv_hidden, bias = args.num_kv_heads * self.head_size, args.family == "gpt"
        self.query = nn.Linear(hidden, hidden, bias=bias)
        self.key = nn.Linear(hidden, kv_hidden, bias=bias)
        self.value = nn.Linear(hidden, kv_hidden, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)
        powers = torch.arange(0, self.head_size, 2) / self.head_size
        angles = torch.outer(torch.arange(args.seq_length), args.rotary_base**-powers).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_size)  # -1: a rank of tensor parallelism has fewer
        q, k, v = (
            layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.rotary:
            q, k = self.rotated(q).type_as(v), self.rotated(k).type_as(v)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.grouped
        )
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        sizes, bias = (args.hidden_size, args.ffn_hidden_size), args.family == "gpt"
        self.gate = nn.Linear(*sizes, bias=False) if args.family == "llama" else None
        self.up = nn.Linear(*sizes, bias=bias)
        self.down = nn.Linear(*sizes[::-1], bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.attention = make_norm(args), Attention(args)
        self.feed_forward_norm, self.feed_forward = make_norm(args), FeedForward(args)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Some layers of the model: the first bring the embedding, the last the head.

    Each part has a random seed of its own, so that all layouts start from the same weights.
    """

    def __init__(self, args: argparse.Namespace, layers: range) -> None:
        super().__init__()
        self.recompute, size = args.recompute == "full", (args.vocab_size, args.hidden_size)
        torch.manual_seed(args.seed)
        is_first, is_last = layers.start == 0, layers.stop == args.num_layers
        self.embedding = make_embedding(*size) if is_first else None
        has_positions = is_first and args.family == "gpt"
        self.positions = make_embedding(args.seq_length, size[1]) if has_positions else None
        self.layers = nn.ModuleDict()
        for index in layers:
            torch.manual_seed(args.seed + 1 + index)
            self.layers[str(index)] = Block(args)
        torch.manual_seed(args.seed + 1 + args.num_layers)
        self.norm = make_norm(args) if is_last else None
        self.head = nn.Linear(*size[::-1], bias=False) if is_last else None
        if args.tied_embeddings == "true" and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            ids, x = x, self.embedding(x)
            if self.positions is not None:
                x = x + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.layers.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x if self.head is None else self.head(self.norm(x))


def cut_over_tp(part: Decoder, mesh, sequence_parallel: bool) -> None:
    """Cuts the matrices; with sequence parallelism also what lies between them, by tokens."""
    stream = Shard(1) if sequence_parallel else Replicate()
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    styles = {
        "embedding": embedding,
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for layer in part.layers:
        for name in ("attention", "feed_forward"):
            styles[f"layers.{layer}.{name}"] = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),)
            )
        for name in ("attention.query", "attention.key", "attention.value"):
            styles[f"layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("feed_forward.gate", "feed_forward.up"):
            styles[f"layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "feed_forward.down"):
            styles[f"layers.{layer}.{name}"] = RowwiseParallel(output_layouts=stream)
    names = [name for name, _ in part.named_modules()]
    if sequence_parallel:
        styles |= {name: SequenceParallel() for name in names if name.endswith("norm")}
    parallelize_module(part, mesh, {name: styles[name] for name in names if name in styles})


class Trainer:
    """A rank's part of the job; needs the process group."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        axes = ("pp", "dp", "tp") if args.rank_order == "tp_cp_dp_pp" else ("dp", "pp", "tp")
        degrees = tuple(getattr(args, axis) for axis in axes)
        self.mesh = init_device_mesh(device.type, degrees, mesh_dim_names=axes)
        self.stage, self.replica = (self.mesh[name].get_local_rank() for name in ("pp", "dp"))
        self.is_first_of_tp = self.mesh["tp"].get_local_rank() == 0
        # DDP knows neither DTensors nor the micro-batches of a pipeline.
        self.has_ddp = args.dp > 1 and args.tp == args.pp == 1
        self.parts = [self._part(chunk * args.pp + self.stage) for chunk in range(args.vpp)]
        trained = [weight for part in self.parts for weight in part.parameters()]
        # Optimizers work on the rank's own parts of cut weights; they share their memory.
        self.weights = [(weight, _own_part(weight)) for weight in trained]
        self.optimizer = self._optimizer([own for _, own in self.weights])
        self.schedule = self._schedule() if args.pp > 1 else None

    def _part(self, stage: int) -> nn.Module:
        args = self.args
        num = args.num_layers // (args.pp * args.vpp)
        part: nn.Module = Decoder(args, range(stage * num, (stage + 1) * num)).to(self.device)
        if args.tp > 1:
            cut_over_tp(part, self.mesh["tp"], args.sequence_parallel == "true")
        if self.has_ddp:
            group = self.mesh["dp"].get_group()
            part = DistributedDataParallel(part, process_group=group, gradient_as_bucket_view=True)
        return part

    def _optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        rate = self.args.learning_rate
        if self.args.zero_stage == 1 and self.args.dp > 1:
            return ZeroRedundancyOptimizer(
                weights,
                torch.optim.AdamW,
                process_group=self.mesh["dp"].get_group(),
                # One broadcast a rank instead of one a weight. It moves the weights into buckets,
                # which the DTensors of tensor parallelism would not follow.
                parameters_as_bucket_view=self.args.tp == 1,
                fused=True,
                lr=rate,
            )
        return torch.optim.AdamW(weights, lr=rate, fused=True)

    def _schedule(self) -> Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B:
        args, group = self.args, self.mesh["pp"].get_group()
        stages = [
            PipelineStage(
                part, chunk * args.pp + self.stage, args.pp * args.vpp, self.device, group=group
            )
            for chunk, part in enumerate(self.parts)
        ]
        options = {"loss_fn": self._loss, "scale_grads": False}
        if args.vpp == 1:
            kind = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
            return kind(stages[0], args.num_microbatches, **options)
        return ScheduleInterleaved1F1B(stages, args.num_microbatches, **options)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss / self.args.num_microbatches

    def step(self, number: int) -> tuple[int, float]:
        """One optimizer step; returns the tokens that all ranks were fed, and the mean loss."""
        args = self.args
        dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        ids, targets = self._batch(number)
        with contextlib.ExitStack() as contexts:
            if args.tp > 1:
                contexts.enter_context(loss_parallel())
            if dtype != torch.float32:
                contexts.enter_context(torch.autocast(self.device.type, dtype))
            losses = self._passes(ids, targets) if args.pp == 1 else self._pipeline(ids, targets)
        for weight, own in self.weights:
            gradient = weight.grad
            if isinstance(weight, DTensor):  # autograd may have left it whole, or in sums
                gradient = gradient.redistribute(placements=weight.placements).to_local()
            own.grad = gradient
        if args.dp > 1 and not self.has_ddp:
            self._average_gradients()
        self.optimizer.step()
        for weight, own in self.weights:
            weight.grad = own.grad = None
        # Each rank adds what it has: the first stage was fed the tokens, the last has the loss.
        fed = ids.numel() if self.stage == 0 and self.is_first_of_tp else 0
        loss = sum(map(_whole, losses)) / args.dp if losses else 0.0
        told = [fed, loss if self.is_first_of_tp else 0.0]
        sums = torch.tensor(told, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return int(sums[0].item()), sums[1].item()

    def _average_gradients(self) -> None:
        gradients = [own.grad for _, own in self.weights]
        joined = torch.cat([gradient.flatten() for gradient in gradients]) / self.args.dp
        dist.all_reduce(joined, group=self.mesh["dp"].get_group())
        parts = joined.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        """This replica's part of a step's tokens."""
        args = self.args
        own = args.micro_batch_size * args.num_microbatches
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + number)
        shape = (args.dp * own, args.seq_length + 1)
        tokens = torch.randint(args.vocab_size, shape, generator=generator).to(self.device)
        tokens = tokens[self.replica * own : (self.replica + 1) * own]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _passes(self, ids: Tensor, targets: Tensor) -> list[Tensor]:
        (part,), num, losses = self.parts, self.args.num_microbatches, []
        for index, (some, wanted) in enumerate(
            zip(ids.chunk(num), targets.chunk(num), strict=True)
        ):
            goes_on = self.has_ddp and index < num - 1
            with part.no_sync() if goes_on else contextlib.nullcontext():
                loss = self._loss(part(some), wanted)
                loss.backward()
            losses.append(loss.detach())
        return losses

    def _pipeline(self, ids: Tensor, targets: Tensor) -> list[Tensor]:
        inputs, losses = (ids,) if self.stage == 0 else (), []
        if self.stage == self.args.pp - 1:
            self.schedule.step(*inputs, target=targets, losses=losses)
        else:
            self.schedule.step(*inputs)
        return [loss.detach() for loss in losses]


def _own_part(weight: nn.Parameter) -> nn.Parameter:
    data = weight.detach()
    return nn.Parameter(data.to_local()) if isinstance(data, DTensor) else weight


def _whole(loss: Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def main() -> None:
    args = read_arguments()
    on_gpus = args.device == "cuda"
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpus else "cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if dist.get_world_size() != args.tp * args.pp * args.dp:
        sys.exit(f"tp*pp*dp={args.tp}*{args.pp}*{args.dp} is not {dist.get_world_size()} processes")
    trainer = Trainer(args, device)
    for number in range(args.steps):
        started = time.perf_counter()
        tokens, loss = trainer.step(number)  # reads the sums, and so waits for the GPU
        step_time_s = time.perf_counter() - started
        report_step(
            step_time_s=step_time_s,
            tokens=tokens,
            loss=loss,
            # On CPUs the worker samples it.
            peak_memory_bytes=torch.cuda.max_memory_allocated() if on_gpus else None,
        )
        if dist.get_rank() == 0:
            print(f"step {number}: {step_time_s:.4f} s, {tokens} tokens, loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
