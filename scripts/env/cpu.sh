# shellcheck shell=bash
# Sets the environment of a node without an accelerator; scripts/node.sh sources this file before Ray
# starts. Variables that the shell has set are kept. INTERFACE is the network interface for training.
# Settings that are the same on all nodes are in configs/device/cpu.yaml.

# By default, gloo uses the address of the host name, which is often 127.0.0.1.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"

# 0: Ray never ends workers, even if other programs use the machine's memory. Ray's daemon reads this
# variable when it starts. If the run itself starts Ray, configs/device/cpu.yaml sets the variable.
set_default RAY_memory_monitor_refresh_ms 0

# 0: Ray does not start a Python process for each logical CPU. verl's actors could not use these
# processes.
set_default RAY_prestart_worker_first_driver 0

raise_open_files 32768
