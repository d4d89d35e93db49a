# shellcheck shell=bash
# Environment of a node without an accelerator; scripts/node.sh sources it before Ray starts. Variables
# that the shell has set are kept. INTERFACE is the network interface for training. Settings that are the
# same on all nodes are in configs/device/cpu.yaml.

# By default, gloo uses the address of the host name, which is often 127.0.0.1.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"

# By default, Ray ends workers if other programs use the machine's memory. Ray's daemon reads this
# variable when it starts. If the run itself starts Ray, configs/device/cpu.yaml has this setting.
set_default RAY_memory_monitor_refresh_ms 0

# By default, Ray starts Python processes (one per logical CPU) that verl's actors cannot use.
set_default RAY_prestart_worker_first_driver 0

raise_open_files 32768
