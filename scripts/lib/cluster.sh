# shellcheck shell=bash
# Shared by node.sh and scripts/env/*.sh; to be sourced after common.sh.

# Device of this machine: what --device means where it is not given.
detect_device() {
    if compgen -G "/dev/davinci[0-9]*" > /dev/null; then
        echo ascend_910c
    elif command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

# How many dies, GPUs or logical devices this machine has; nothing where it cannot tell.
detect_devices() {
    case "$1" in
        ascend_910c)
            if [ -n "${ASCEND_RT_VISIBLE_DEVICES:-}" ]; then
                echo "$ASCEND_RT_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .
            else
                compgen -G "/dev/davinci[0-9]*" | grep -c . || true
            fi
            ;;
        cuda)
            if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
                echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .
            elif command -v nvidia-smi > /dev/null; then
                nvidia-smi -L | grep -c '^GPU' || true
            fi
            ;;
        cpu) echo 1 ;;
    esac
}

# Network interface of the default route, without the command ip, which containers lack.
default_interface() {
    awk '$2 == "00000000" && $8 == "00000000" { print $1; exit }' "${1:-/proc/net/route}"
}

# Exports a variable that is not set yet: a value in the shell wins.
set_default() {
    [ -n "${!1+set}" ] || export "$1=$2"
}

# Sources a vendor's script, which may use unset variables, if it is there.
source_if_there() {
    local status=0
    [ -f "$1" ] || return 0
    set +eu
    # shellcheck disable=SC1090
    source "$1"
    status=$?
    set -eu
    # No error: it may be the status of a last line such as "[ -f x ] && source x".
    [ "$status" -eq 0 ] || say "$1 ended with status $status: look there if something is missing"
}

# As many open files as training needs: every node holds connections to all the others.
raise_open_files() {
    local wanted="$1" now
    now="$(ulimit -n)"
    [ "$now" = unlimited ] || [ "$now" -ge "$wanted" ] || ulimit -n "$wanted" 2> /dev/null \
        || say "open files stay at $now, $wanted are advised: raise the limit (ulimit -Hn)"
}

# Preloads the first of these libraries that exists.
preload_first() {
    local library
    for library in "$@"; do
        if [ -f "$library" ]; then
            export LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}"
            return
        fi
    done
}
