"""The offline engine's choice of a worker extension."""

import importlib.util
import pkgutil

import pytest

from sam_rollout.integrations.vllm.offline import ON_ASCEND


@pytest.mark.parametrize("name", ON_ASCEND)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM")
def test_what_stands_for_an_extension_on_npus_is_one_too(name):
    assert issubclass(pkgutil.resolve_name(ON_ASCEND[name]), pkgutil.resolve_name(name))
