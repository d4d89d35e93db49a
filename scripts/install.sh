#!/usr/bin/env bash
# Installs the project for one device:
#   scripts/install.sh cpu|cuda|ascend                      into .venv of the checkout, all pinned
#   scripts/install.sh cpu|cuda|ascend --into-current-env   into the Python on PATH of a vendor's
#       image: its torch, engine and device packages stay as they are, only what is missing is added
# Variables: PYTHON (the interpreter to start from), PIP_FIND_LINKS and PIP_INDEX_URL (as for pip).
# `sam-rollout install` is the same program.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

[ -z "${PYTHON:-}" ] || command -v "$PYTHON" > /dev/null || die "PYTHON=$PYTHON: there is no such command"
find_python "${PYTHON:-python3}"
exec "$FOUND_PYTHON" "$ROOT/sam_rollout/installer/install.py" --checkout "$ROOT" "$@"
