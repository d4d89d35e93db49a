# shellcheck shell=bash
# Sets the environment of a node with NVIDIA GPUs; scripts/node.sh sources this file before Ray starts.
# Variables that the shell has set are kept. INTERFACE is the network interface for training. This file
# was not run, because there was no GPU cluster. Settings that are the same on all nodes are in
# configs/device/cuda.yaml.

# NCCL makes its first connections through this interface. If NCCL finds InfiniBand or RoCE, it sends
# data over that network.
set_default NCCL_SOCKET_IFNAME "$INTERFACE"
# By default, gloo and TensorPipe use the address of the host name, which is often 127.0.0.1.
set_default GLOO_SOCKET_IFNAME "$INTERFACE"
set_default TP_SOCKET_IFNAME "$INTERFACE"

raise_open_files 32768
