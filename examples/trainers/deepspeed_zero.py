"""A training program with DeepSpeed that layout-tuner can run as a probe.

Its plain engine: data parallelism, ZeRO stage 0 or 1, gradient accumulation. It runs on what
DS_ACCELERATOR names, which the entry sets: cpu or cuda.
"""

from __future__ import annotations

import argparse
import sys
import time

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from layout_tuner import report_step


class Decoder(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden, vocab = args.hidden_size, args.vocab_size
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, args.num_heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(args.num_layers)
        )
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask.to(x.dtype), is_causal=True)
        return self.head(x)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("steps", "tp", "pp", "micro-batch-size", "num-microbatches", "num-layers"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("hidden-size", "num-heads", "seq-length", "vocab-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--zero-stage", type=int, choices=(0, 1), default=0)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    if args.tp * args.pp > 1:
        sys.exit(f"this script has data parallelism only, not tp={args.tp} and pp={args.pp}")
    return args


def main() -> None:
    args = read_arguments()
    torch.manual_seed(0)
    model = Decoder(args)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": args.micro_batch_size,
            "gradient_accumulation_steps": args.num_microbatches,
            "zero_optimization": {"stage": args.zero_stage},
            "bf16": {"enabled": args.precision == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
        },
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(args.steps):
        started, fed, losses = time.perf_counter(), 0, []
        for _ in range(args.num_microbatches):
            shape = (args.micro_batch_size, args.seq_length + 1)
            tokens = torch.randint(args.vocab_size, shape, generator=generator)
            tokens = tokens.to(engine.device)
            logits = engine(tokens[:, :-1]).flatten(0, 1).float()
            loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            fed += tokens[:, 1:].numel()
            losses.append(loss.detach())
        loss = torch.stack(losses).double().mean()
        told = torch.stack([loss, torch.tensor(float(fed)).to(loss)])
        dist.all_reduce(told)
        sums = told.tolist()
        report_step(
            step_time_s=time.perf_counter() - started,
            tokens=round(sums[1]),
            loss=sums[0] / dist.get_world_size(),
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
