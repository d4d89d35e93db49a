"""Contains parts of the stand-in for torch_npu; see the package torch_npu beside this one."""
