"""pytest plugin for vllm-ascend's own unit tests: the process of a vLLM that has our plugin."""

from importlib.metadata import entry_points
from pathlib import Path

from npu_stand_in.placeholders import install_placeholders

# Their conftest mocks torch_npu; these two they expect to be installed.
install_placeholders("torchaudio", "torchvision")


def pytest_sessionstart():
    """Load the plugins as vLLM does in every process, once their conftest has set up its mocks."""
    from vllm.plugins import load_general_plugins

    assert "sam_rollout" in {point.name for point in entry_points(group="vllm.general_plugins")}
    load_general_plugins()


def pytest_sessionfinish():
    """Note whether the runner they tested was wrapped."""
    from sam_rollout.integrations.vllm_ascend.plugin import way_in

    Path("way_in.txt").write_text(str(way_in()))
