#!/usr/bin/env bash
# Runs one node's part in a training run over many nodes. Slurm, Kubernetes or the user calls this
# script on every node; with ssh, scripts/launch_multinode.sh calls it.
#
#   scripts/node.sh auto --config experiment=qwen3_32b_910c sam=on       # head if rank 0, else worker
#   scripts/node.sh worker --node-rank 3 --num-nodes 8 --head-address 10.0.0.1
#   scripts/node.sh doctor --experiment qwen3_32b_910c                   # is this node ready?
#
# Options or environment variables give the rank, the number of nodes and the head's address: see
# docs/clusters.md or scripts/node.sh --help. --print shows the commands without starting them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/lib/cluster.sh"
ENVIRONMENTS="$ROOT/scripts/env"

cd "$ROOT"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
[ -x "$PYTHON" ] || PYTHON=python3 # in a vendor's image, after install.sh --into-current-env

# --help has to work even if the checks below fail.
case "${1:---help}" in
    head | worker | auto | doctor) ;;
    *) exec "$PYTHON" "$ROOT/scripts/lib/cluster.py" "${1:---help}" "${@:2}" ;;
esac

DEVICE="$(option --device "$@")"
DEVICE="${DEVICE:-$(detect_device)}"
[ -f "$ENVIRONMENTS/$DEVICE.sh" ] || die "--device $DEVICE: must be one of" \
    "$(cd "$ENVIRONMENTS" && printf '%s ' *.sh | sed 's/\.sh//g')"
INTERFACE="$(option --interface "$@")"
INTERFACE="${INTERFACE:-$(default_interface)}"
[ -n "$INTERFACE" ] || die "no default route: name the network interface of training (--interface)"
DEVICES="$(option --devices-per-node "$@")"
DEVICES="${DEVICES:-$(detect_devices "$DEVICE")}"
[ "$1" = doctor ] || [ "${DEVICES:-0}" != 0 ] || die "no $DEVICE devices found here: give --devices-per-node"

# ATB's set_env.sh asks the python3 on PATH how its torch was built.
FOUND="$(command -v "$PYTHON")" || die "no Python: run scripts/install.sh, or set PYTHON"
PATH="$(dirname "$FOUND"):$PATH"

# The doctor runs in the environment of a run's processes: vendor's paths, interfaces, limits.
if [ "$1" = doctor ]; then
    shift
    QUESTIONS=()
    while [ $# -gt 0 ]; do
        case "$1" in
            --device | --interface | --devices-per-node) shift ;;
            --device=* | --interface=* | --devices-per-node=*) ;;
            *) QUESTIONS+=("$1") ;;
        esac
        [ $# -eq 0 ] || shift
    done
    # The doctor's output may be JSON, so the output of the vendor's scripts goes to stderr.
    # shellcheck disable=SC1090
    source "$ENVIRONMENTS/$DEVICE.sh" >&2
    exec "$PYTHON" -m sam_rollout.cli doctor --device "$DEVICE" ${QUESTIONS[@]+"${QUESTIONS[@]}"}
fi

# shellcheck disable=SC1090
source "$ENVIRONMENTS/$DEVICE.sh"

# If a token is set, Ray requires it for every connection. Head and workers need the same mode.
set_default RAY_AUTH_MODE "$([ -n "${RAY_AUTH_TOKEN:-}" ] && echo token || echo disabled)"

find_place "$@"
exec "$PYTHON" "$ROOT/scripts/lib/cluster.py" "$1" --device "$DEVICE" \
    --devices-per-node "$DEVICES" --interface "$INTERFACE" --node-rank "$OWN_RANK" --names "$NAMES" \
    --head-address "$HEAD" "${@:2}"
