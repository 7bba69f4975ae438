#!/bin/bash
#SBATCH --job-name=train-7b
#SBATCH --nodes=16
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
# Megatron-LM trains a Llama of 7 billion parameters, in bf16.

export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_DIR=${MEGATRON_DIR:-/path/to/Megatron-LM}
TP=4
PP=4
MBS=1

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP   # within a node
    --pipeline-model-parallel-size $PP
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

TRAINING_ARGS="--micro-batch-size $MBS \
    --global-batch-size 512 \
    --train-iters 100000 \
    --lr 3.0e-4 \
    --bf16"

DATA_ARGS="--data-path /data/corpus_text_document \
    --tokenizer-type NullTokenizer --vocab-size 32000"

srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 \
    --rdzv_backend c10d --rdzv_endpoint "$(hostname):29500" \
    $MEGATRON_DIR/pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    $TRAINING_ARGS \
    $DATA_ARGS \
    --save /checkpoints/train-7b --save-interval 1000
