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

# Sets UV to a usable uv: the one on PATH, the one fetched earlier, or a fresh one, fetched into .cache
# by the first pip found, so that no environment is changed for it.
find_uv() {
    local fetched="$CACHE_DIR/uv"
    local python
    if command -v uv > /dev/null 2>&1; then
        UV="uv"
        return
    fi
    UV="$fetched/bin/uv"
    [ -x "$UV" ] && return
    say "fetching uv into .cache"
    # A virtual environment made by uv has no pip: then the interpreter on PATH.
    for python in "$@" "python$PYTHON_VERSION" python3; do
        if "$python" -m pip --version > /dev/null 2>&1; then
            "$python" -m pip install --quiet --disable-pip-version-check --target "$fetched" uv \
                || die "'$python -m pip' could not fetch uv"
            return
        fi
    done
    die "neither uv nor a Python with pip was found on PATH"
}

# uv does not read pip's variables. Wheels found through PIP_FIND_LINKS include the CPU build of
# torch; without it, uv takes that build from PyTorch's own CPU index. Either way the pin ends in
# +cpu, which the plain registry does not have, so that no CUDA build can slip in.
# Sets TORCH_SOURCE_ARGS for a CPU install.
# shellcheck disable=SC2034  # used by who sources this
configure_uv() {
    TORCH_SOURCE_ARGS=()
    if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then
        export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
    fi
    if [ -n "${PIP_FIND_LINKS:-}" ]; then
        # pip separates several places by spaces, uv by commas
        export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}"
    else
        TORCH_SOURCE_ARGS=(--torch-backend cpu)
    fi
}
