"""The parts of the stand-in for torch_npu; see torch_npu beside it."""
