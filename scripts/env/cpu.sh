# shellcheck shell=bash
# Environment of a node without an accelerator, sourced by scripts/node.sh before Ray starts; a value
# in the shell wins. INTERFACE is the network interface of training. What every process of a run reads
# and no node decides for itself is in configs/device/cpu.yaml.

# gloo takes the address that the host name resolves to, often 127.0.0.1, where no other node is.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"

# Ray would end workers because of the memory that other programs of the machine use. Read by Ray's
# daemon when it starts; configs/device/cpu.yaml says it for a Ray that the run itself starts.
set_default RAY_memory_monitor_refresh_ms 0

# Ray starts a Python process for each logical CPU when the first program connects. verl's actors
# cannot use them, because their environment differs, and a small machine has no memory for them.
set_default RAY_prestart_worker_first_driver 0

raise_open_files 32768
