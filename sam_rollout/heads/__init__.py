"""Draft heads: small models that draft from a policy's hidden states, trained here and read here.

What is here reads a head's folder, without torch. `offline_training` is the command that trains an
EAGLE-3 head; `online` trains one beside its policy, with `peers` and the `hidden_states` that it is
given, and `writing` puts it on disk. The other modules are theirs.
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
