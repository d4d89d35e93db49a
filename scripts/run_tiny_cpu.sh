#!/usr/bin/env bash
# Two real DAPO runs of the tiny Qwen3 on this machine's CPU, without and with SAM, and what the
# difference is. From a bare clone it installs and prepares what is missing; later calls start at once.
#
#   bash scripts/run_tiny_cpu.sh                                    # about 10 minutes on two cores
#   bash scripts/run_tiny_cpu.sh joined                             # with drafts of a head, too
#   bash scripts/run_tiny_cpu.sh trainer.total_training_steps=10    # any Hydra override, for all runs
#
# Results: outputs/tiny_cpu/<time>/{off,on} (run folders), comparison.html, .png and .json; of another
# side, such as joined, its run folder and comparison_joined.*.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXPERIMENT=tiny_cpu
OUTPUT_DIR=${OUTPUT_DIR:-outputs/tiny_cpu/$(date +%Y%m%d-%H%M%S)}

bash scripts/install.sh cpu
PYTHON=.venv/bin/python

echo "==> data"
"$PYTHON" -m recipes.dapo_qwen3.prepare_data synthetic --output-dir data/synthetic

source scripts/lib/train_both.sh
