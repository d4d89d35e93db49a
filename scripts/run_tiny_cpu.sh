#!/usr/bin/env bash
# Trains the tiny Qwen3 with DAPO on this machine's CPU, without and with SAM, and compares both runs.
# The first call installs what is missing; later calls start at once.
#
#   bash scripts/run_tiny_cpu.sh                                    # about 10 minutes on two cores
#   bash scripts/run_tiny_cpu.sh joined                             # also with drafts of a head
#   bash scripts/run_tiny_cpu.sh trainer.total_training_steps=10    # any Hydra override, for all runs
#
# Results: outputs/tiny_cpu/<time>/{off,on} (run folders), comparison.html, .png and .json. Another
# side, such as joined, adds its run folder and comparison_joined.*.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXPERIMENT=tiny_cpu
OUTPUT_DIR=${OUTPUT_DIR:-outputs/tiny_cpu/$(date +%Y%m%d-%H%M%S)}

bash scripts/install.sh cpu
PYTHON=.venv/bin/python

echo "==> data"
"$PYTHON" -m recipes.dapo_qwen3.prepare_data synthetic --output-dir data/synthetic

source scripts/lib/train_both.sh
