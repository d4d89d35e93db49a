#!/usr/bin/env bash
# Runs the tests:
#   scripts/test.sh                        every part, after scripts/install.sh cpu
#   scripts/test.sh fast [pytest options]  after every change: lint, and the tests of unit, recipes
#                                          and contracts that are not marked slow
#   scripts/test.sh PART [pytest options]  lint, unit, recipes, contracts, integration, ascend, e2e
#                                          or cluster
# Two parts run at a time. Their output is shown when they end, and is kept in this run's folder below
# .test-results until the next run. The test of the comparison page needs a Chromium (apt-get install
# chromium, or a path in CHROMIUM); without one it is skipped. The exit status is 0 only if every part
# passed. The last line sums up pytest's results over all parts; a part that failed without a failed
# test counts as one failure.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

ALL_PARTS="lint unit recipes contracts integration ascend e2e cluster"
FAST_PARTS="lint fast"
# The order in which parts start: lint, then the long parts, then the short ones. In this order, the
# two lanes (run_lane) end at about the same time.
ORDER="lint e2e integration unit cluster ascend recipes contracts"
# The folder's name is this process's id, because another run may use the same checkout.
ALL_RESULTS="$ROOT/.test-results"
RESULTS="$ALL_RESULTS/$$"
VENV_PYTHON="$ROOT/.venv/bin/python"
# The part ascend needs vLLM 0.23, and other versions of shared packages.
ASCEND_PYTHON="$ROOT/.venv-ascend/bin/python"
KILL_AFTER_S=30 # a process that exceeds its part's time limit gets this time to stop

# Images often forbid Python to cache compiled code. Compiling would take most of the tests' time.
unset PYTHONDONTWRITEBYTECODE

# Every part has a time limit in seconds, because a failing test may wait forever.
limit_s() {
    case "$1" in
        lint) echo 240 ;;
        fast | unit | recipes | contracts) echo 900 ;;
        integration | ascend) echo 1800 ;;
        e2e | cluster) echo 3600 ;;
    esac
}

# Runs a command within its part's time limit; stores the process's id for end_parts.
limited() {
    local part="$1" status=0
    shift
    set -m # without job control, background processes ignore SIGINT, which tests send
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
    # There is no package of shellcheck for Arm.
    [ "$(uname -m)" != x86_64 ] || "$ROOT/.venv/bin/shellcheck" "${scripts[@]}" || return 1
    limited lint "$VENV_PYTHON" -m ruff check . || return
    limited lint "$VENV_PYTHON" -m ruff format --check . || return
    limited lint "$VENV_PYTHON" -m mypy
}

# Returns the status of pytest or timeout (124, 137). Status 5, "no tests collected", is a failure.
run_pytest() {
    local part="$1" python="$VENV_PYTHON"
    local folders=("tests/$part") options=()
    shift
    case "$part" in
        ascend) python="$ASCEND_PYTHON" ;;
        fast)
            folders=(tests/unit tests/recipes tests/contracts)
            # A file's tests share fixtures, so they run on one core.
            options=(-m "not slow" --numprocesses logical --maxprocesses 8 --dist loadfile)
            ;;
    esac
    limited "$part" "$python" -m pytest "${folders[@]}" --junit-xml="$RESULTS/$part.xml" \
        ${options[@]+"${options[@]}"} "$@"
}

# Runs one part and stores "STATUS SECONDS" for the summary.
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

# Runs a command under a lock, so that its output is not mixed with the output of the other lane.
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

# Takes a part from the queue and prints its name; prints nothing if none is left.
next_part() {
    {
        flock 9
        head -n 1 "$RESULTS/queue"
        sed -i 1d "$RESULTS/queue"
    } 9> "$RESULTS/queue.lock"
}

# Runs parts, one after the other, until none is left in the queue. Two of these lanes run at once.
run_lane() {
    local part
    while part="$(next_part)" && [ -n "$part" ]; do
        alone say "$part has started; its output: ${RESULTS#"$ROOT"/}/$part.log"
        run_part "$part" > "$RESULTS/$part.log" 2>&1
        alone print_log "$part"
    done
}

# Runs all parts in two lanes. If a part leaves no status, it counts as failed.
run_lanes() {
    local pid pids=()
    printf '%s\n' "$@" > "$RESULTS/queue"
    for _ in 1 2; do
        run_lane &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || true; done
}

# Ends the lanes and their processes when this script is ended; timeout passes the signal on.
end_parts() {
    local file
    # shellcheck disable=SC2046  # each word is a process's id
    kill $(jobs -p) 2> /dev/null || true
    for file in "$RESULTS"/*.pid; do
        [ ! -f "$file" ] || kill "$(cat "$file")" 2> /dev/null || true
    done
}

# Adds a part's line to SUMMARY, and a failed part to FAILED.
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
    kill -0 "${old##*/}" 2> /dev/null || rm -rf "$old" # the run of that folder has ended
done
rm -rf "$RESULTS" # an earlier process may have had the same id
mkdir -p "$RESULTS"
trap end_parts EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

STARTED=$SECONDS
if [ "$PARTS" = "$ALL_PARTS" ]; then
    # The environment of the part ascend is made first, because this also installs the checkout, whose
    # metadata other parts read.
    scripts/lib/ascend_tests_environment.sh || say "no environment for ascend"
    # shellcheck disable=SC2086  # a list of parts
    run_lanes $ORDER
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
