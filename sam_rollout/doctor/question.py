"""What the checks are asked about: a device, perhaps an experiment, perhaps many nodes."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

# Name of the device file (configs/device) -> extra of pyproject.toml that installs its engine.
DEVICES = {"ascend_910c": "ascend", "cuda": "cuda", "cpu": "cpu"}


@dataclasses.dataclass(frozen=True)
class Question:
    """What a machine should be good for. Travels to the nodes of a cluster as it is."""

    device: str  # a key of DEVICES
    config: Mapping[str, Any] | None = None  # the experiment as composed, plain and resolved
    experiment: str = ""
    cluster: bool = False  # nodes of a Ray cluster are asked

    @property
    def profile(self) -> str:
        """The extra of pyproject.toml, and the argument of scripts/install.sh."""
        return DEVICES[self.device]

    @property
    def many_nodes(self) -> bool:
        """Whether processes on several nodes have to find each other."""
        return self.cluster or int(self.setting("trainer.nnodes", 1)) > 1

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the experiment by its dotted path; the default if it is unset or unknown."""
        node: Any = self.config
        for key in path.split("."):
            if not isinstance(node, Mapping) or key not in node:
                return default
            node = node[key]
        return default if node is None else node

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the run's processes on this machine: the shell's win over the device's."""
        return {**self.variables, **os.environ}

    @property
    def variables(self) -> dict[str, str]:
        """Variables that the experiment sets; those set to null are left out."""
        given = self.setting("environment", {})
        return {name: str(value) for name, value in given.items() if value is not None}
