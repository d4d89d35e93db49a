# shellcheck shell=bash
# Environment of a node without an accelerator; scripts/node.sh sources it before Ray starts. A value in
# the shell wins. INTERFACE is the network interface of training. Settings that are the same on all nodes
# are in configs/device/cpu.yaml.

# By default, gloo uses the address of the host name, which is often 127.0.0.1.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"

# Ray would end workers because of the memory that other programs of the machine use. Ray's daemon reads
# this when it starts; configs/device/cpu.yaml has the setting for a Ray that the run itself starts.
set_default RAY_memory_monitor_refresh_ms 0

# Ray starts a Python process for each logical CPU when the first program connects. verl's actors
# cannot use them, because their environment differs, and a small machine has no memory for them.
set_default RAY_prestart_worker_first_driver 0

raise_open_files 32768
