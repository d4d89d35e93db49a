import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")
pytest.importorskip("model_hosting_container_standards")

# vLLM's API server sets the level once at import, so each case has its own process.
LEVEL = """
import logging
import model_hosting_container_standards.logging_config
print(logging.getLevelName(logging.getLogger().level))
"""


def root_level(program: str) -> str:
    names = {"LOG_LEVEL", "SAGEMAKER_CONTAINER_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.split()[-1]


@pytest.mark.slow
def test_the_root_logger_still_lets_warnings_through():
    assert root_level("import verl\n" + LEVEL) == "WARNING"


def test_upstream_still_silences_warnings():
    """If this test fails, the plugin's SAGEMAKER_CONTAINER_LOG_LEVEL can be removed."""
    assert root_level(LEVEL) == "ERROR"
