# shellcheck shell=bash
# Sets the environment of an Ascend 910C node; scripts/node.sh sources this file before Ray starts.
# Variables that the shell has set are kept. INTERFACE is the network interface for training. This file
# was not run, because there was no NPU; names and values follow verl's and cann-recipes-train's
# multi-node scripts. Settings that are the same on all nodes (timeouts and buffers of HCCL, the task
# queue, memory) are in configs/device/ascend_910c.yaml.

# CANN and ATB set paths of libraries and kernels, which torch_npu needs. CANN's folder has one of two
# names, depending on the version; if both names exist, they name the same folder.
ASCEND_ROOT="${ASCEND_ROOT:-/usr/local/Ascend}"
if [ -f "$ASCEND_ROOT/cann/set_env.sh" ]; then
    source_if_there "$ASCEND_ROOT/cann/set_env.sh"
else
    source_if_there "$ASCEND_ROOT/ascend-toolkit/set_env.sh"
fi
source_if_there "$ASCEND_ROOT/nnal/atb/set_env.sh"

# Ray must not hide dies from workers, because verl chooses a die by rank among all dies of the node.
set_default RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES 1

# HCCL's ranks find each other through this interface; data goes over the NPUs' own network.
set_default HCCL_SOCKET_IFNAME "$INTERFACE"
# By default, gloo and TensorPipe use the address of the host name, which is often 127.0.0.1.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"
set_default TP_SOCKET_IFNAME "$INTERFACE"

# verl sets HCCL_HOST_SOCKET_PORT_RANGE and HCCL_NPU_SOCKET_PORT_RANGE to "auto" in the processes of a
# run. If a firewall needs known ports, set both in the shell on every node, as verl's multi-node
# examples do (60000-60050 and 61000-61050); each process on a node takes one port.

# glibc's allocator fragments the large host memory that offloading and weight transfer need.
preload_first /usr/lib/aarch64-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2 \
    /usr/lib/x86_64-linux-gnu/libjemalloc.so.2

raise_open_files 32768
