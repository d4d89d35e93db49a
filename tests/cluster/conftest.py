import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Lan, why_not

REQUIRED = "SAM_REQUIRE_CLUSTER_TESTS"


@pytest.fixture(scope="session")
def may_make_machines() -> None:
    if reason := why_not():
        reason = f"no machines can be made of namespaces here: {reason}"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sam") as path:
        yield Path(path)


@pytest.fixture
def lan(may_make_machines: None, folder: Path) -> Iterator[Lan]:
    with Lan(["node-1", "node-2"], folder) as lan:
        yield lan
