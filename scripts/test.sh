#!/usr/bin/env bash
# Runs the tests:
#   scripts/test.sh                        every part, after scripts/install.sh cpu
#   scripts/test.sh fast [pytest options]  what to run after every change: lint, and of unit,
#                                          recipes and contracts what is not marked slow
#   scripts/test.sh PART [pytest options]  lint, unit, recipes, contracts, integration, ascend, e2e
#                                          or cluster
# Parts run side by side, two at a time; their output comes when they are done, and lies below
# .test-results, in this run's folder, until the next run. The comparison page is tried in a Chromium
# where there is one (apt-get install chromium, or a path in CHROMIUM); otherwise that test is shown as
# skipped. Exits with 0 only if every part passed. The last line sums up pytest's results over the
# parts; a part that failed without a failed test counts as one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

ALL_PARTS="lint unit recipes contracts integration ascend e2e cluster"
FAST_PARTS="lint fast"
# Groups one after the other; of a group two parts at a time, lint and then the longest first. Runs on
# Ray need many processes and wait for each other: not beside the other parts.
GROUPS_OF_PARTS=("lint integration unit ascend recipes contracts" "e2e cluster")
# Of this run alone, named by its process: another one may be under way in the same checkout.
ALL_RESULTS="$ROOT/.test-results"
RESULTS="$ALL_RESULTS/$$"
VENV_PYTHON="$ROOT/.venv/bin/python"
# vLLM-Ascend's Python parts need vLLM 0.23 and other versions of what both use.
ASCEND_PYTHON="$ROOT/.venv-ascend/bin/python"
KILL_AFTER_S=30 # for what does not stop when its part runs out of time

# Images often forbid Python to keep what it compiled. Some two hundred processes here import torch or
# vLLM, and compiling takes each of them longer than everything else it does.
unset PYTHONDONTWRITEBYTECODE

# A weight sync whose receiver died waits forever: nothing runs without a limit.
limit_s() {
    case "$1" in
        lint) echo 240 ;;
        fast | unit | recipes | contracts) echo 900 ;;
        integration | ascend) echo 1800 ;;
        e2e | cluster) echo 3600 ;;
    esac
}

# Runs a command within its part's limit; its process is noted for end_parts.
limited() {
    local part="$1" status=0
    shift
    set -m # without, what runs in the background ignores SIGINT, and tests send it
    timeout --kill-after="$KILL_AFTER_S" "$(limit_s "$part")" "$@" < /dev/null &
    set +m
    echo $! > "$RESULTS/$part.pid"
    wait $! || status=$?
    rm -f "$RESULTS/$part.pid"
    return "$status"
}

run_lint() {
    local script
    local scripts=(scripts/*.sh scripts/lib/*.sh scripts/env/*.sh .ci/run)
    for script in "${scripts[@]}"; do
        bash -n "$script" || return 1
    done
    # Not on Arm, where there is no package of it.
    [ "$(uname -m)" != x86_64 ] || "$ROOT/.venv/bin/shellcheck" "${scripts[@]}" || return 1
    limited lint "$VENV_PYTHON" -m ruff check . || return
    limited lint "$VENV_PYTHON" -m ruff format --check . || return
    limited lint "$VENV_PYTHON" -m mypy
}

# Status of pytest, or of timeout (124, 137). Status 5, "no tests collected", stays a failure.
run_pytest() {
    local part="$1" python="$VENV_PYTHON"
    local folders=("tests/$part") options=()
    shift
    case "$part" in
        ascend) python="$ASCEND_PYTHON" ;;
        fast)
            folders=(tests/unit tests/recipes tests/contracts)
            # A file's tests share what they have made ready: they stay on one core.
            options=(-m "not slow" --numprocesses logical --maxprocesses 8 --dist loadfile)
            ;;
    esac
    limited "$part" "$python" -m pytest "${folders[@]}" --junit-xml="$RESULTS/$part.xml" \
        ${options[@]+"${options[@]}"} "$@"
}

# Runs one part and notes "STATUS SECONDS" for the summary.
run_part() {
    local part="$1" started=$SECONDS status=0
    shift
    if [ "$part" = lint ]; then
        run_lint || status=$?
    elif [ "$part" = ascend ] && ! scripts/lib/ascend_tests_environment.sh; then
        status=1
    else
        run_pytest "$part" "$@" || status=$?
    fi
    echo "$status $((SECONDS - started))" > "$RESULTS/$part.status"
}

# Prints with a command, one writer at a time, also where that is longer than a pipe's buffer.
alone() {
    {
        flock 9
        "$@"
    } 9> "$RESULTS/printing.lock"
}

print_log() {
    say "$1"
    cat "$RESULTS/$1.log"
}

# Prints a part of the group that no lane has taken, and takes it; nothing when there is none left.
next_part() {
    {
        flock 9
        head -n 1 "$RESULTS/queue"
        sed -i 1d "$RESULTS/queue"
    } 9> "$RESULTS/queue.lock"
}

# Runs parts until none is left, without mixing their output with the other lane's.
run_lane() {
    local part
    while part="$(next_part)" && [ -n "$part" ]; do
        alone say "$part has started; its output: ${RESULTS#"$ROOT"/}/$part.log"
        run_part "$part" > "$RESULTS/$part.log" 2>&1
        alone print_log "$part"
    done
}

# Runs a group's parts in two lanes; a part that dies leaves no status, which counts as failed.
run_group() {
    local pid pids=()
    printf '%s\n' "$@" > "$RESULTS/queue"
    for _ in 1 2; do
        run_lane &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || true; done
}

# Ends what still runs when this script is ended: the lanes, and what they run; timeout passes the
# signal on.
end_parts() {
    local file
    # shellcheck disable=SC2046  # one process each
    kill $(jobs -p) 2> /dev/null || true
    for file in "$RESULTS"/*.pid; do
        [ ! -f "$file" ] || kill "$(cat "$file")" 2> /dev/null || true
    done
}

# Adds a part's line to SUMMARY, and the part to FAILED if it did.
sum_up() {
    local part="$1" status="" seconds="" verdict=passed
    [ ! -f "$RESULTS/$part.status" ] || read -r status seconds < "$RESULTS/$part.status"
    case "$status" in
        0) ;;
        "") verdict="FAILED (it came to no end)" ;;
        124 | 137) verdict="FAILED (stopped after $(limit_s "$part") s)" ;;
        *) verdict="FAILED (exit status $status)" ;;
    esac
    [ "$verdict" = passed ] || FAILED+=("$part")
    SUMMARY+=("$part: $verdict${seconds:+ in $seconds s}")
}

cd "$ROOT"
PARTS="$ALL_PARTS"
if [ $# -gt 0 ]; then
    if [ "$1" = fast ]; then
        PARTS="$FAST_PARTS"
    elif [[ " $ALL_PARTS " = *" $1 "* ]]; then
        PARTS="$1"
    else
        die "unknown part '$1', one of: fast $ALL_PARTS"
    fi
    shift
fi

scripts/install.sh cpu
for old in "$ALL_RESULTS"/*; do
    kill -0 "${old##*/}" 2> /dev/null || rm -rf "$old" # its run is over
done
rm -rf "$RESULTS" # of an earlier run that had this number
mkdir -p "$RESULTS"
trap end_parts EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

STARTED=$SECONDS
if [ "$PARTS" = "$ALL_PARTS" ]; then
    # Before the lanes: it installs the checkout, whose metadata the other parts read.
    scripts/lib/ascend_tests_environment.sh || say "no environment for ascend"
    # shellcheck disable=SC2086  # a group is a list of parts
    for group in "${GROUPS_OF_PARTS[@]}"; do run_group $group; done
else
    for part in $PARTS; do
        say "$part"
        run_part "$part" "$@"
    done
fi

SUMMARY=()
FAILED=()
for part in $PARTS; do sum_up "$part"; done
echo
for line in "${SUMMARY[@]}"; do say "$line"; done
[ ${#FAILED[@]} -eq 0 ] || say "failed parts: ${FAILED[*]}"
[ "$PARTS" = lint ] \
    || "$VENV_PYTHON" scripts/lib/sum_junit.py "$RESULTS" "$((SECONDS - STARTED))" \
        ${FAILED[@]+"${FAILED[@]}"}
[ ${#FAILED[@]} -eq 0 ]
