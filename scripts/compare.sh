#!/usr/bin/env bash
# Trains pairs of runs without and with SAM in turn, and compares them. Both runs of a pair have the
# same seed; pairs have different seeds. The run without SAM comes first, because the run with SAM logs
# the metrics of both. The first run on a machine spends extra time on reading files and on compiling,
# which would favour SAM. Most of this time falls into the first step, so the comparison leaves out the
# first step of all runs.
#
#   scripts/compare.sh experiment=tiny_cpu                                  # three pairs of runs
#   scripts/compare.sh experiment=tiny_cpu repeats=5 trainer.total_training_steps=20
#   scripts/compare.sh --dry-run experiment=qwen3_32b_910c                  # print what would run
#
# Arguments are Hydra overrides for all runs, except for these two:
#
#   repeats=N      number of pairs; default 3
#   skip_first=N   number of first steps that are not compared; default 1, or 0 with
#                  trainer.total_training_steps=1
#
# The same command continues after an interruption. Finished runs are kept. A run with a checkpoint
# (trainer.save_freq) is resumed. Any other run starts again in a new folder. A later call may have a
# larger value of repeats, which adds runs. It may also have another value of skip_first; then the same
# runs are compared again.
#
# Variables:
#   OUTPUT_DIR   folder of the runs base-1, sam-1, base-2, ...; default outputs/compare/<experiment>.
#                wandb's group has the name of this folder
#   LAUNCH       command that starts a run; overrides are appended. For many nodes:
#                LAUNCH="scripts/launch_multinode.sh --nodes hosts.txt --config". This machine and the
#                head have to share OUTPUT_DIR
#   SEED         seed of the first pair's prompts and rollouts; default 1
#   TIMEOUT_S    time limit of one run; default none
#   PYTHON       command or path; default .venv's, or python3
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() { sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" > /dev/null || die "PYTHON=$PYTHON: there is no such command"
else
    PYTHON="$ROOT/.venv/bin/python"
    [ -x "$PYTHON" ] || PYTHON=python3 # in a vendor's image, after install.sh --into-current-env
fi
COMPARE="${COMPARE:-$PYTHON -m sam_rollout.cli compare}"
SEED="${SEED:-1}"
TIMEOUT_S="${TIMEOUT_S:-0}"

DRY_RUN=""
EXPERIMENT=""
REPEATS=3
SKIP_FIRST=""
STEPS=""
OVERRIDES=()
for word in "$@"; do
    case "$word" in
        -h | --help) usage; exit ;;
        --dry-run) DRY_RUN=1 ;;
        -*) die "unknown option '$word'; --help tells which there are" ;;
        experiment=*) EXPERIMENT="${word#*=}" ;;
        repeats=*) REPEATS="${word#*=}" ;;
        skip_first=*) SKIP_FIRST="${word#*=}" ;;
        sam=* | run_dir=* | compare.baseline_run=* | compare.group=* | trainer.resume_mode=*)
            die "$word: this script sets it" ;;
        data.seed=* | actor_rollout_ref.rollout.seed=*)
            die "$word: this script sets it, another one for each pair; SEED=N names the first" ;;
        *=* | ~*)
            OVERRIDES+=("$word")
            [[ "$word" != trainer.total_training_steps=* ]] || STEPS="${word#*=}"
            ;;
        *) die "$word: expected experiment=NAME, repeats=N, skip_first=N or a Hydra override (key=value)" ;;
    esac
done
[ -n "$EXPERIMENT" ] || die "which experiment? scripts/compare.sh experiment=tiny_cpu; --help"
[[ "$REPEATS" =~ ^[1-9][0-9]*$ ]] || die "repeats=$REPEATS: must be a number from 1 on"
[[ "$SKIP_FIRST" =~ ^[0-9]*$ ]] || die "skip_first=$SKIP_FIRST: must be a number; 0: compare all steps"
if [ -z "$SKIP_FIRST" ]; then
    SKIP_FIRST=1
    [ "$STEPS" != 1 ] || SKIP_FIRST=0
elif [[ "$STEPS" =~ ^[0-9]+$ ]] && [ "$SKIP_FIRST" -ge "$STEPS" ]; then
    die "skip_first=$SKIP_FIRST leaves nothing to compare of trainer.total_training_steps=$STEPS"
fi
[[ "$SEED" =~ ^[0-9]+$ ]] || die "SEED=$SEED: must be a number"
[[ "$TIMEOUT_S" =~ ^[0-9]+$ ]] || die "TIMEOUT_S=$TIMEOUT_S: must be a number of seconds; 0: no limit"
if [ -n "${LAUNCH:-}" ]; then
    read -ra LAUNCH_WORDS <<< "$LAUNCH"
else
    LAUNCH_WORDS=("$PYTHON" -m recipes.dapo_qwen3.main)
fi
read -ra COMPARE_WORDS <<< "$COMPARE"
OUTPUT_DIR="${OUTPUT_DIR:-outputs/compare/$EXPERIMENT}"
OUTPUT_DIR="$(realpath -m "$OUTPUT_DIR")"
PLAN="$OUTPUT_DIR/plan.txt"
cd "$ROOT"

declare -A OPTION=([base]=off [sam]=on) # side in a run folder's name -> value of sam
RUNS=()
for ((pair = 1; pair <= REPEATS; pair++)); do RUNS+=("base-$pair" "sam-$pair"); done

# Sets STATE, the action for a run: keep, resume, again or fresh.
look_at() {
    local run_dir="$OUTPUT_DIR/$1"
    STATE=fresh
    if [ -e "$run_dir/.finished" ]; then
        STATE=keep
    elif [ -e "$run_dir/checkpoints/latest_checkpointed_iteration.txt" ]; then
        STATE=resume
    elif [ -e "$run_dir" ]; then
        STATE=again
    fi
}

# Sets COMMAND to the command that trains a run.
command_of() {
    local side="${1%-*}" pair="${1#*-}"
    local seed=$((SEED + pair - 1))
    COMMAND=("${LAUNCH_WORDS[@]}" "experiment=$EXPERIMENT" "sam=${OPTION[$side]}"
        "run_dir=$OUTPUT_DIR/$1" "data.seed=$seed" "actor_rollout_ref.rollout.seed=$seed"
        "compare.group=$(basename "$OUTPUT_DIR")"
        trainer.resume_mode=auto) # resumes from checkpoints in run_dir, if it has any
    # The run logs its metrics beside those of its pair's baseline, which has finished by then.
    [ "$side" = base ] || COMMAND+=("compare.baseline_run=$OUTPUT_DIR/base-$pair")
    COMMAND+=(${OVERRIDES[@]+"${OVERRIDES[@]}"})
}

show_plan() {
    local run
    local pairs="$REPEATS pairs"
    [ "$REPEATS" != 1 ] || pairs="1 pair"
    say "$pairs of runs of $EXPERIMENT below $OUTPUT_DIR"
    for run in "${RUNS[@]}"; do
        look_at "$run"
        case "$STATE" in
            keep) echo "    $run: finished, kept" ;;
            resume) echo "    $run: goes on from its checkpoint" ;;
            again) echo "    $run: was interrupted without a checkpoint, begins again" ;;
            fresh) echo "    $run" ;;
        esac
        [ -z "$DRY_RUN" ] || [ "$STATE" = keep ] || { command_of "$run"; echo "        ${COMMAND[*]@Q}"; }
    done
    [ -z "$DRY_RUN" ] || { compare_command; echo "    ${COMPARE_COMMAND[*]@Q}"; }
}

# Prints what defines the runs. A folder holds one comparison, to which further pairs may be added.
plan_text() { printf '%s\n' "experiment=$EXPERIMENT" "seed=$SEED" ${OVERRIDES[@]+"${OVERRIDES[@]}"}; }

compare_command() {
    local pair
    COMPARE_COMMAND=("${COMPARE_WORDS[@]}")
    for ((pair = 1; pair <= REPEATS; pair++)); do COMPARE_COMMAND+=("$OUTPUT_DIR/base-$pair"); done
    for ((pair = 1; pair <= REPEATS; pair++)); do COMPARE_COMMAND+=(--with "$OUTPUT_DIR/sam-$pair"); done
    COMPARE_COMMAND+=(--skip-first "$SKIP_FIRST")
    COMPARE_COMMAND+=(--html "$OUTPUT_DIR/comparison.html" --json "$OUTPUT_DIR/comparison.json")
}

set_aside() {
    local number=1
    while [ -e "$1.unfinished-$number" ]; do number=$((number + 1)); done
    mv "$1" "$1.unfinished-$number"
    echo "    what it left is kept in $1.unfinished-$number"
}

train() {
    local run_dir="$OUTPUT_DIR/$1" log="$OUTPUT_DIR/$1/log.txt" status=0 limit=()
    [ "$STATE" != again ] || set_aside "$run_dir"
    mkdir -p "$run_dir"
    command_of "$1"
    [ "$TIMEOUT_S" = 0 ] || limit=(timeout --kill-after=30 "$TIMEOUT_S")
    ${limit[@]+"${limit[@]}"} "${COMMAND[@]}" >> "$log" 2>&1 < /dev/null &
    RUN_PID=$!
    "$PYTHON" "$ROOT/scripts/lib/follow_run.py" "$run_dir" --pid "$RUN_PID" &
    FOLLOWER_PID=$!
    # An interrupted script must end its run, or the run would use memory that the next run needs.
    trap 'kill -TERM "$RUN_PID" "$FOLLOWER_PID" 2> /dev/null || true' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    wait "$FOLLOWER_PID" || true # bash handles signals at once while it waits
    wait "$RUN_PID" || status=$?
    trap - EXIT INT TERM
    case "$TIMEOUT_S:$status" in
        *:0) touch "$run_dir/.finished" ;;
        [1-9]*:124 | [1-9]*:137) die "$1 was stopped after $TIMEOUT_S s; its log: $log. The same command goes on from here" ;;
        *) die "$1 failed with status $status; its log: $log. The same command goes on from here" ;;
    esac
}

show_plan
[ -z "$DRY_RUN" ] || exit 0
mkdir -p "$OUTPUT_DIR"
# Because of the lock, two calls of this script cannot train in the same folders.
exec 9> "$OUTPUT_DIR/.lock"
flock -n 9 || die "another comparison is running in $OUTPUT_DIR"
if [ -e "$PLAN" ] && [ "$(cat "$PLAN")" != "$(plan_text)" ]; then
    diff "$PLAN" <(plan_text) >&2 || true
    die "$OUTPUT_DIR holds another comparison (above: < what it has, > what was asked for);" \
        "name another folder: OUTPUT_DIR=... scripts/compare.sh ..."
fi
plan_text > "$PLAN"

number=0
for run in "${RUNS[@]}"; do
    number=$((number + 1))
    look_at "$run"
    [ "$STATE" != keep ] || continue
    side="${run%-*}"
    say "[$number/${#RUNS[@]}] $run: sam=${OPTION[$side]}, seed $((SEED + ${run#*-} - 1))" \
        "(log: $OUTPUT_DIR/$run/log.txt)"
    started=$SECONDS
    train "$run" 9>&-
    took=$((SECONDS - started))
    say "[$number/${#RUNS[@]}] $run: done in $took s," \
        "about $(((${#RUNS[@]} - number) * took)) s to go"
done

say "comparison"
compare_command
"${COMPARE_COMMAND[@]}" || die "the runs are kept: the same command compares them again," \
    "skip_first=0 with all their steps (now without the first $SKIP_FIRST)"
say "done: $OUTPUT_DIR/comparison.html"
