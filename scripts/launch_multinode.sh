#!/usr/bin/env bash
# Trains on many nodes over ssh: starts Ray on each, runs the recipe on the first, shows its log, and
# ends with its exit status and everything stopped.
#
#   scripts/launch_multinode.sh --nodes hosts.txt --config experiment=qwen3_32b_910c sam=on
#
# hosts.txt has one node a line, the head first: what ssh is given. Behind the head stands, where its
# name does not lead there, its address on the network of training ("node-1 10.0.0.1"); the others'
# addresses are not read. Every node needs the checkout, installed, under the same path. SSH is the command to use ("ssh -p 2222"). Options: --help, and
# docs/clusters.md, also for Slurm and Kubernetes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
[ -x "$PYTHON" ] || PYTHON=python3 # a vendor's image, scripts/install.sh --into-current-env
exec "$PYTHON" "$ROOT/scripts/lib/cluster_launch.py" "$@"
