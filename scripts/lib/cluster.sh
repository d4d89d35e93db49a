# shellcheck shell=bash
# node.sh sources this file after common.sh; scripts/env/*.sh use its functions, too.

# Prints this machine's device, the default of --device.
detect_device() {
    if compgen -G "/dev/davinci[0-9]*" > /dev/null; then
        echo ascend_910c
    elif command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

# Prints the number of dies, GPUs or logical devices; prints nothing if it is unknown.
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

# Prints the interface of the default route, without the command ip, which containers lack.
default_interface() {
    awk '$2 == "00000000" && $8 == "00000000" { print $1; exit }' "${1:-/proc/net/route}"
}

# Exports a variable, unless it is set already.
set_default() {
    [ -n "${!1+set}" ] || export "$1=$2"
}

# Sources a vendor's script, which may use unset variables, if the script exists.
source_if_there() {
    local status=0
    [ -f "$1" ] || return 0
    set +eu
    # shellcheck disable=SC1090
    source "$1"
    status=$?
    set -eu
    # A failing status is not an error, because the script's last line may be a condition, such as
    # "[ -f x ] && source x".
    [ "$status" -eq 0 ] || say "$1 ended with status $status: look there if something is missing"
}

# Raises the limit of open files, because every node has connections to all the others. verl's guide
# for several nodes advises 32768.
raise_open_files() {
    local wanted="$1" now
    now="$(ulimit -n)"
    [ "$now" = unlimited ] || [ "$now" -ge "$wanted" ] || ulimit -n "$wanted" 2> /dev/null \
        || say "open files stay at $now, $wanted are advised: raise the limit (ulimit -Hn)"
}

# Preloads the first of the given libraries that exists.
preload_first() {
    local library
    for library in "$@"; do
        if [ -f "$library" ]; then
            export LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}"
            return
        fi
    done
}

# Prints the value of an option, given as "--name value" or "--name=value"; nothing if it is absent.
option() {
    local name="$1"
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
            "$name") echo "${2:-}" && return ;;
            "$name="*) echo "${1#*=}" && return ;;
        esac
        shift
    done
}

# Prints an error, and exits with the status for an incomplete cluster.
no_cluster() {
    echo "error: $*" >&2
    exit 3
}

# Prints the value of the first of the given variables that is set.
first_number() {
    local name
    for name in "$@"; do
        [ -n "${!name:-}" ] || continue
        [[ "${!name}" =~ ^[0-9]+$ ]] || no_cluster "$name=${!name}: must be a number"
        echo "${!name}" && return
    done
}

# Ends with an error if VALUE is empty. Arguments: WHAT VALUE OPTION VARIABLE...
need() {
    local or="${*:4}"
    [ -n "$2" ] || no_cluster "$1 is not known: give $3, or set ${or// / or }"
}

# Sets OWN_RANK, NAMES and HEAD from options, from environment variables, or from host names. Variables
# that count nodes take precedence over RANK and WORLD_SIZE, which may count processes.
find_place() {
    local own stem="" number="" nodes said domain n ask names=()
    local rank_variables=(NODE_RANK SLURM_NODEID JOB_COMPLETION_INDEX RANK)
    local nodes_variables=(NNODES SLURM_JOB_NUM_NODES WORLD_SIZE)
    own="${SLURMD_NODENAME:-$(uname -n)}"
    if [ -n "${KUBERNETES_SERVICE_HOST:-}" ] && [[ "$own" =~ ^(.+)-([0-9]+)$ ]]; then
        stem="${BASH_REMATCH[1]}" number="${BASH_REMATCH[2]}" # the host name of a StatefulSet's pod
    fi

    OWN_RANK="$(option --node-rank "$@")"
    [ -n "$OWN_RANK" ] || [ "$1" != head ] || OWN_RANK=0
    [ -n "$OWN_RANK" ] || OWN_RANK="$(first_number "${rank_variables[@]}")"
    OWN_RANK="${OWN_RANK:-$number}"
    need "this node's rank" "$OWN_RANK" --node-rank "${rank_variables[@]}"

    said="$(option --names "$@")"
    if [ -z "$said" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        ask=(scontrol show hostnames "$SLURM_JOB_NODELIST") # containers often lack scontrol
        said="$("${ask[@]}" 2> /dev/null)" || no_cluster "scontrol cannot tell the nodes' names" \
            "($("${ask[@]}" 2>&1)): give --names and --head-address"
    fi
    IFS=, read -ra names <<< "${said//$'\n'/,}"
    nodes="$(option --num-nodes "$@")"
    [ -n "$nodes" ] || nodes="$(first_number "${nodes_variables[@]}")"
    [ -n "$nodes" ] || [ -z "$said" ] || nodes="${#names[@]}"
    need "the number of nodes" "$nodes" --num-nodes "${nodes_variables[@]}"
    [[ "$OWN_RANK$nodes" =~ ^[0-9]+$ ]] || no_cluster "rank $OWN_RANK of $nodes nodes: must be numbers"
    [ "$OWN_RANK" -lt "$nodes" ] \
        || no_cluster "this node's rank is $OWN_RANK, but there are $nodes nodes: 0..$((nodes - 1))"
    case "$1:$OWN_RANK" in
        head:0 | worker:[1-9]* | auto:*) ;;
        *) no_cluster "this node has rank $OWN_RANK; the head is rank 0" ;;
    esac
    for ((n = 0; n < nodes; n++)); do
        if [ -n "$said" ]; then
            break
        elif [ "$number" = "$OWN_RANK" ]; then
            names+=("$stem-$n")
        elif [ "$n" = "$OWN_RANK" ]; then
            names+=("$own")
        else
            names+=("rank $n")
        fi
    done
    NAMES="$(IFS=, && echo "${names[*]}")"
    [ "${#names[@]}" = "$nodes" ] || no_cluster "$nodes nodes, but ${#names[@]} names: $NAMES"

    HEAD="$(option --head-address "$@")"
    HEAD="${HEAD:-${MASTER_ADDR:-}}"
    if [ -n "$HEAD" ]; then
        return
    elif [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        HEAD="${names[0]}"
    elif [ "$OWN_RANK" = 0 ]; then
        HEAD="$own"
    elif [ "$number" = "$OWN_RANK" ]; then
        # Pods of a StatefulSet reach each other through its headless service.
        domain="$("$PYTHON" -c 'import socket; print(socket.getfqdn().partition(".")[2])')"
        HEAD="${domain:+$stem-0.$domain}"
    fi
    need "the head's address" "$HEAD" --head-address MASTER_ADDR
}
