# shellcheck shell=bash
# Environment of a node with NVIDIA GPUs, sourced by scripts/node.sh before Ray starts; a value in the
# shell wins. INTERFACE is the network interface of training. Not run: there was no GPU cluster at
# hand. What every process of a run reads and no node decides for itself is in configs/device/cuda.yaml.

# Where the first connections are made; data goes over InfiniBand or RoCE where NCCL finds them.
set_default NCCL_SOCKET_IFNAME "$INTERFACE"
# gloo takes the address that the host name resolves to, often 127.0.0.1, where no other node is.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"
# The same for TensorPipe, torch's remote procedure calls.
set_default TP_SOCKET_IFNAME "$INTERFACE"

raise_open_files 32768
