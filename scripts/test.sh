#!/usr/bin/env bash
# Runs the tests:
#   scripts/test.sh                        every part that exists, after scripts/install.sh cpu
#   scripts/test.sh PART [pytest options]  lint, unit, contracts, integration, ascend, e2e or
#                                          cluster
# The comparison page is tried in a Chromium where there is one (apt-get install chromium, or a path
# in CHROMIUM); otherwise that test is shown as skipped.
# Exits with 0 only if every part passed. The last line sums up pytest's results over the parts.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

ALL_PARTS="lint unit contracts integration ascend e2e cluster"
RESULTS="$ROOT/.test-results"
VENV_PYTHON="$ROOT/.venv/bin/python"
# vLLM-Ascend's Python parts need vLLM 0.23 and other versions of what both use.
ASCEND_PYTHON="$ROOT/.venv-ascend/bin/python"
KILL_AFTER_S=30 # for what does not stop when its part runs out of time

# A weight sync whose receiver died waits forever: nothing runs without a limit.
limit_s() {
    case "$1" in
        lint) echo 120 ;;
        unit | contracts) echo 900 ;;
        integration | ascend) echo 1800 ;;
        e2e | cluster) echo 3600 ;;
    esac
}

folders() {
    case "$1" in
        unit) echo "tests/unit tests/recipes" ;;
        *) echo "tests/$1" ;;
    esac
}

run_lint() {
    local script
    local scripts=(scripts/*.sh scripts/lib/*.sh scripts/env/*.sh .ci/run)
    for script in "${scripts[@]}"; do
        bash -n "$script" || return 1
    done
    # Not on Arm, where there is no package of it.
    [ "$(uname -m)" != x86_64 ] || "$ROOT/.venv/bin/shellcheck" "${scripts[@]}" || return 1
    timeout --kill-after="$KILL_AFTER_S" "$(limit_s lint)" "$VENV_PYTHON" -m ruff check .
}

# Status of pytest, or of timeout (124, 137). Status 5, "no tests collected", stays a failure.
run_pytest() {
    local part="$1" python="$VENV_PYTHON" folder
    local existing=()
    shift
    for folder in $(folders "$part"); do
        [ -d "$folder" ] && existing+=("$folder")
    done
    [ "$part" = ascend ] && python="$ASCEND_PYTHON"
    timeout --kill-after="$KILL_AFTER_S" "$(limit_s "$part")" \
        "$python" -m pytest "${existing[@]}" --junit-xml="$RESULTS/$part.xml" "$@"
}

part_exists() {
    local folder
    [ "$1" = lint ] && return 0
    for folder in $(folders "$1"); do
        [ -d "$folder" ] && return 0
    done
    return 1
}

cd "$ROOT"
PARTS="$ALL_PARTS"
if [ $# -gt 0 ]; then
    case " $ALL_PARTS " in
        *" $1 "*) PARTS="$1" ;;
        *) die "unknown part '$1', one of: $ALL_PARTS" ;;
    esac
    shift
fi

scripts/install.sh cpu
rm -rf "$RESULTS"
mkdir -p "$RESULTS"

SUMMARY=()
FAILED=()
for part in $PARTS; do
    if ! part_exists "$part"; then
        SUMMARY+=("$part: skipped, there is no $(folders "$part")")
        continue
    fi
    say "$part"
    started=$SECONDS
    status=0
    if [ "$part" = lint ]; then
        run_lint || status=$?
    elif [ "$part" = ascend ] && ! scripts/lib/ascend_tests_environment.sh; then
        status=1
    else
        run_pytest "$part" "$@" || status=$?
    fi
    verdict=passed
    if [ "$status" -ne 0 ]; then
        FAILED+=("$part")
        verdict="FAILED (exit status $status)"
        case "$status" in 124 | 137) verdict="FAILED (stopped after $(limit_s "$part") s)" ;; esac
    fi
    SUMMARY+=("$part: $verdict in $((SECONDS - started)) s")
done

echo
for line in "${SUMMARY[@]}"; do say "$line"; done
[ ${#FAILED[@]} -eq 0 ] || say "failed parts: ${FAILED[*]}"
[ "$PARTS" = lint ] || "$VENV_PYTHON" scripts/lib/sum_junit.py "$RESULTS"
[ ${#FAILED[@]} -eq 0 ]
