# shellcheck shell=bash
# The project's scripts source this file.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
CACHE_DIR="$ROOT/.cache"
PYTHON_VERSION="3.11"

say() { echo "==> $*"; }

die() {
    echo "error: $*" >&2
    exit 1
}

# Sets FOUND_PYTHON to the first of the given commands that exists, else to a Python on PATH.
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

# Sets UV to a command that runs uv with pip's settings and fetches uv into .cache if needed. With
# CPU_TORCH=1, uv takes the CPU build of torch. Arguments: interpreters whose pip may fetch uv.
# shellcheck disable=SC2034  # scripts that source this file use it
find_uv() {
    find_python "$@"
    UV=("$FOUND_PYTHON" "$ROOT/sam_rollout/installer/run_uv.py" --cache "$CACHE_DIR/uv")
}
