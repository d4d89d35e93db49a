# shellcheck shell=bash
# Environment of an Ascend 910C node, sourced by scripts/node.sh before Ray starts; a value in the
# shell wins. INTERFACE is the network interface of training. Not run: there was no NPU at hand; names
# and values follow verl's and cann-recipes-train's multi-node scripts. What every process of a run
# reads and no node decides for itself (timeouts and buffers of HCCL, the task queue, memory) is in
# configs/device/ascend_910c.yaml.

# CANN and ATB: paths, libraries, kernels. Without them torch_npu cannot be imported. CANN's folder has
# two names, by version; where both are there, they are the same.
ASCEND_ROOT="${ASCEND_ROOT:-/usr/local/Ascend}"
if [ -f "$ASCEND_ROOT/cann/set_env.sh" ]; then
    source_if_there "$ASCEND_ROOT/cann/set_env.sh"
else
    source_if_there "$ASCEND_ROOT/ascend-toolkit/set_env.sh"
fi
source_if_there "$ASCEND_ROOT/nnal/atb/set_env.sh"

# Ray would set ASCEND_RT_VISIBLE_DEVICES in each worker to the dies it was given; verl chooses by
# rank among all dies of the node, and training and rollout share a die.
set_default RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES 1

# Where HCCL's ranks find each other; data goes over the NPUs' own network.
set_default HCCL_SOCKET_IFNAME "$INTERFACE"
# gloo takes the address that the host name resolves to, often 127.0.0.1, where no other node is.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"
# The same for TensorPipe, torch's remote procedure calls.
set_default TP_SOCKET_IFNAME "$INTERFACE"

# Not set: HCCL_HOST_SOCKET_PORT_RANGE and HCCL_NPU_SOCKET_PORT_RANGE. verl sets them to "auto" in the
# processes of a run. Where a firewall wants known ports, set both in the shell on every node, as verl's
# multi-node examples do (60000-60050 and 61000-61050); each process on a node takes one.

# glibc's allocator fragments the large host memory of offloading and weight transfer.
preload_first /usr/lib/aarch64-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2 \
    /usr/lib/x86_64-linux-gnu/libjemalloc.so.2

raise_open_files 32768
