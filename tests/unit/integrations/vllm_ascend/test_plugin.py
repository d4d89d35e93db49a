import importlib
import sys
from types import SimpleNamespace

import pytest

from sam_rollout.config import RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from sam_rollout.integrations.vllm_ascend import hooks, plugin, versions
from sam_rollout.integrations.vllm_ascend.versions import UnsupportedVersionError

RUNNER = """
class NPUModelRunner:
    def __init__(self, vllm_config, device):
        self.vllm_config, self.speculative_config = vllm_config, vllm_config.speculative_config
        self.drafter = self._get_drafter()

    def _get_drafter(self):
        return "upstream's"

    def propose_draft_token_ids(self, valid_sampled_token_ids, metadata):
        return "upstream's"
"""
DRAFTER = """
class AscendSpecDecodeBaseProposer:
    def _maybe_share_embeddings(self, target_language_model):
        pass

    def _maybe_share_lm_head(self, model):
        pass
"""
ON = SamConfig()
OFF = SamConfig(enabled=False)
STOCK = RolloutSamplerConfig("stock")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    package = tmp_path / "vllm_ascend"
    (package / "worker").mkdir(parents=True)
    (package / "spec_decode").mkdir()
    (package / "spec_decode" / "llm_base_proposer.py").write_text(DRAFTER)
    for folder in (package, package / "worker", package / "spec_decode"):
        (folder / "__init__.py").touch()
    runner = package / "worker" / "model_runner_v1.py"
    runner.write_text(RUNNER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(versions, "version", lambda _name: "0.23.0.post1")
    yield runner
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


@pytest.fixture
def called(monkeypatch):
    calls = []
    monkeypatch.setattr(hooks, "make_drafter", lambda *_: calls.append("drafter") or "ours")
    monkeypatch.setattr(hooks, "propose_drafts", lambda *_: calls.append("propose") or "ours")
    monkeypatch.setattr(hooks, "install_samplers", lambda _runner: calls.append("samplers"))
    return calls


def runner_class():
    return importlib.import_module(plugin.RUNNER_MODULE).NPUModelRunner


def config(method="custom_class", sam=ON, sampler=STOCK):
    return SimpleNamespace(
        additional_config=engine_arguments(sam, sampler)["additional_config"],
        speculative_config=SimpleNamespace(method=method),
    )


def test_nothing_is_imported_before_the_engine_does(installed, called):
    plugin.register()
    assert not any(name.startswith("vllm_ascend") for name in sys.modules)
    runner = runner_class()(config(), "npu")
    assert runner.drafter == "ours"
    assert runner.propose_draft_token_ids([[1]], None) == "ours"
    assert called == ["drafter", "samplers", "propose"]


def test_a_patched_source_is_not_wrapped(installed, called):
    installed.write_text(f"{plugin.PATCHED_FLAG} = True\n{RUNNER}")
    plugin.register()
    runner = runner_class()(config(), "npu")
    assert runner.drafter == "upstream's" and called == []


@pytest.mark.parametrize("found", ["0.22.1rc1", "0.24.0"])
def test_another_release_is_refused_by_name(installed, monkeypatch, found):
    monkeypatch.setattr(versions, "version", lambda _name: found)
    plugin.register()
    with pytest.raises(UnsupportedVersionError) as error:
        runner_class()(config(sampler=RolloutSamplerConfig("coupled")), "npu")
    asked = "sam.enabled = True and rollout_sampler.kind = 'coupled' needs"
    for part in (f"vllm-ascend {found} is installed", asked, "vllm-ascend 0.23.x", "sam=off"):
        assert part in str(error.value)


def test_another_release_is_left_alone_without_ours(installed, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _name: "0.25.1rc1")
    plugin.register()
    engine = config(sam=OFF)
    assert runner_class()(engine, "npu").drafter == "upstream's"
    plain = SimpleNamespace(additional_config={}, speculative_config=None)
    assert runner_class()(plain, "npu").drafter == "upstream's"


@pytest.mark.parametrize("found", ["0.23.0", "0.23.0rc1", "0.23.1.dev3+g1234567"])
def test_every_build_of_the_release_is_supported(installed, monkeypatch, found):
    monkeypatch.setattr(versions, "version", lambda _name: found)
    assert versions.is_supported()
