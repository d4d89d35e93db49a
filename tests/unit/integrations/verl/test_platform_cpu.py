"""The CPU as verl sees it."""

import pytest

from sam_rollout.integrations.verl.platform_cpu import PLATFORM_ENV, PlatformCPU


@pytest.mark.parametrize(("value", "chosen"), [("cpu", True), ("cuda", False), ("", False)])
def test_it_is_chosen_by_name_only(monkeypatch, value, chosen):
    monkeypatch.setenv(PLATFORM_ENV, value)
    assert PlatformCPU().is_platform_available() is chosen
