# shellcheck shell=bash
# Trains an experiment without and with SAM on this machine's CPU, and compares the runs.
#
# A script sources this file after it has set EXPERIMENT, OUTPUT_DIR and PYTHON. The first arguments are
# further values of sam, such as joined; the rest are Hydra overrides for all runs. TIMEOUT_S is a run's
# time limit in seconds.

# The time limit ends a run that hangs, for example because its engine died during a weight sync.
TIMEOUT_S=${TIMEOUT_S:-3600}

# Training on a CPU works without network, wandb account and usage statistics.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=${WANDB_MODE:-offline}
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1

train() {  # train <off|on> [overrides...]
    local side=$1
    shift
    local run_dir=$OUTPUT_DIR/$side
    echo "==> DAPO with sam=$side (log: $run_dir/log.txt)"
    mkdir -p "$run_dir"
    timeout --kill-after=30 "$TIMEOUT_S" \
        "$PYTHON" -m recipes.dapo_qwen3.main "experiment=$EXPERIMENT" "sam=$side" \
        "run_dir=$run_dir" "$@" >"$run_dir/log.txt" 2>&1 &
    RUN_PID=$!
    # An interrupted script must end its run, or the run would use memory that the next run needs.
    trap 'kill -TERM "$RUN_PID" 2> /dev/null || true' EXIT
    "$PYTHON" scripts/lib/follow_run.py "$run_dir" --pid "$RUN_PID"
    wait "$RUN_PID"
    trap - EXIT
}

# Words at the start that have no "=" are further values of sam.
SIDES=(on)
while [[ "${1:-}" =~ ^[a-z_]+$ ]]; do
    SIDES+=("$1")
    shift
done

train off "$@"
for side in "${SIDES[@]}"; do
    train "$side" "$@"
done

for side in "${SIDES[@]}"; do
    echo "==> comparison of off and $side"
    page=$OUTPUT_DIR/comparison
    [ "$side" = on ] || page+=_$side
    .venv/bin/sam-rollout compare "$OUTPUT_DIR/off" --with "$OUTPUT_DIR/$side" \
        --html "$page.html" --picture "$page.png" --json "$page.json"
done
