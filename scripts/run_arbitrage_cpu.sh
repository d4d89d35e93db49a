#!/usr/bin/env bash
# Runs Arbitrage (recipes/arbitrage) with the tiny models on this machine's CPU: compares the steps of
# both models, trains a router on the comparisons, and answers test problems in every mode, with and
# without drafts.
#
#   bash scripts/run_arbitrage_cpu.sh              # about 8 minutes on two cores
#   bash scripts/run_arbitrage_cpu.sh --sides on   # options go to the report
#
# Results: outputs/arbitrage_cpu/<time>/report.json.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUTPUT_DIR=${OUTPUT_DIR:-outputs/arbitrage_cpu/$(date +%Y%m%d-%H%M%S)}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1

bash scripts/install.sh cpu
mkdir -p "$OUTPUT_DIR"

# The tiny models end their steps with single line breaks.
SAMPLING=(--delimiter '\n' --max-tokens 1024 --max-step-tokens 256 --max-num-seqs 128)

arbitrage() {  # arbitrage <command> [options...]
    echo "==> $1"
    .venv/bin/python -m recipes.arbitrage "$@" "${SAMPLING[@]}" --router "$OUTPUT_DIR/router" \
        --pairs "$OUTPUT_DIR/pairs.jsonl"
}

arbitrage collect --limit "${COLLECT:-128}"
arbitrage train
arbitrage report --shares 0.1 0.3 --limit "${ANSWERS:-64}" --output "$OUTPUT_DIR/report.json" "$@"
echo "written: $OUTPUT_DIR/report.json"
