# shellcheck shell=bash
# Shared by the scripts of this project; to be sourced.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
CACHE_DIR="$ROOT/.cache"
PYTHON_VERSION="3.11"

say() { echo "==> $*"; }

die() {
    echo "error: $*" >&2
    exit 1
}

# Sets FOUND_PYTHON to the first of these commands that exists, or an interpreter on PATH.
find_python() {
    local candidate
    for candidate in "$@" "python$PYTHON_VERSION" python3; do
        if command -v "$candidate" > /dev/null 2>&1; then
            FOUND_PYTHON="$candidate"
            return
        fi
    done
    die "no Python on PATH: install Python $PYTHON_VERSION, or name it with PYTHON="
}

# Sets UV to the words that run uv with pip's settings, fetching it into .cache if there is none. With
# CPU_TORCH=1 it takes the CPU build of torch. Arguments: interpreters whose pip may fetch it.
# shellcheck disable=SC2034  # used by who sources this
find_uv() {
    find_python "$@"
    UV=("$FOUND_PYTHON" "$ROOT/sam_rollout/installer/run_uv.py" --cache "$CACHE_DIR/uv")
}
