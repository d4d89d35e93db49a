"""Draft heads: small models that draft from a policy's hidden states.

`offline_training` trains an EAGLE-3 head on recorded texts. `online` trains one while its policy is
trained. `writing` reads and writes heads with torch; `checkpoint` reads their folders without it.
This package exports the functions of `checkpoint`, so importing it does not import torch.
"""

from sam_rollout.heads.checkpoint import (
    HeadShape,
    check_belongs,
    is_fresh,
    read_head,
    shape_for,
    tensor_shapes,
)

__all__ = ["HeadShape", "check_belongs", "is_fresh", "read_head", "shape_for", "tensor_shapes"]
