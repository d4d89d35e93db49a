#!/usr/bin/env bash
# Makes .venv-ascend for tests/ascend, with the Python code of vLLM and vllm-ascend, but without their
# kernels. scripts/test.sh ascend calls this script after scripts/install.sh cpu; a second call does
# nothing. The source package of vllm-ascend stays in .cache/sdists for the tests of patches/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VENV="$ROOT/.venv-ascend"
PYTHON="$VENV/bin/python"
STAMP="$VENV/.sam_rollout_install"
CONSTRAINTS="$ROOT/constraints/ascend-tests.txt"
SDISTS="$CACHE_DIR/sdists"
LOG="$CACHE_DIR/ascend-tests-environment.log"

pin() { grep "^$1==" "$CONSTRAINTS"; }

# Runs a step with its output in the log; reports an error in one line.
step() {
    local name="$1"
    shift
    "$@" > "$LOG" 2>&1 || die "$name failed, $(grep -m 1 -iE 'error|failed|caused' "$LOG" \
        || tail -n 1 "$LOG") (all of it: .cache/${LOG##*/})"
}

sdist() {
    local files=("$SDISTS"/vllm_ascend-*.tar.gz)
    echo "${files[0]}"
}

wanted="$({ echo "$ROOT"; cat "$CONSTRAINTS" "$ROOT/pyproject.toml" "${BASH_SOURCE[0]}"; } | sha256sum)"
if [ "$(cat "$STAMP" 2> /dev/null)" = "$wanted" ] && [ -f "$(sdist)" ]; then
    say ".venv-ascend is up to date, nothing to do"
    exit 0
fi

mkdir -p "$CACHE_DIR"
rm -rf "$SDISTS" "$VENV"
step "making .venv-ascend" "$ROOT/.venv/bin/python" -m venv "$VENV"
find_uv "$PYTHON"
INSTALL=("${UV[@]}" pip install --quiet --python "$PYTHON" --no-deps)

say "installing $(grep -c == "$CONSTRAINTS") pinned packages from constraints/ascend-tests.txt"
grep -v -E '^(vllm|vllm-ascend)==' "$CONSTRAINTS" > "$VENV/requirements.txt"
CPU_TORCH=1 step "installing packages" "${INSTALL[@]}" -r "$VENV/requirements.txt"

# vLLM and vllm-ascend are built with the installed torch; an isolated build would fetch a CUDA torch.
say "building $(pin vllm) and $(pin vllm-ascend) without kernels"
export VLLM_TARGET_DEVICE=empty COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910b1
step "building vLLM" "${INSTALL[@]}" --no-build-isolation --no-binary vllm "$(pin vllm)"
step "downloading vllm-ascend" "$PYTHON" -m pip download --quiet --no-deps --no-build-isolation \
    --no-binary vllm-ascend --dest "$SDISTS" "$(pin vllm-ascend)"
step "building vllm-ascend" "${INSTALL[@]}" --no-build-isolation "$(sdist)"
step "installing the checkout" "${INSTALL[@]}" --editable "$ROOT"
echo "$wanted" > "$STAMP"
