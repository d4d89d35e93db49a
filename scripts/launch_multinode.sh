#!/usr/bin/env bash
# Trains on many nodes over ssh: starts Ray on each node, runs the recipe on the first node, shows
# the recipe's log, stops all processes at the end, and exits with the recipe's status.
#
#   scripts/launch_multinode.sh --nodes hosts.txt --config experiment=qwen3_32b_910c sam=on
#
# Each line of hosts.txt is a node's destination for ssh; the first line is the head. If the head's name
# does not resolve to its address on the training network, add the address ("node-1 10.0.0.1"). Addresses
# of other nodes are ignored. Every node needs the installed checkout at the same path. The variable SSH
# replaces the command ssh ("ssh -p 2222"). See --help, and docs/clusters.md for Slurm and Kubernetes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
[ -x "$PYTHON" ] || PYTHON=python3 # in a vendor's image, after install.sh --into-current-env
exec "$PYTHON" "$ROOT/scripts/lib/cluster_launch.py" "$@"
