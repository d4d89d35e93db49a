from types import SimpleNamespace

import pytest

from sam_rollout.config import SamConfig, SourcesConfig
from sam_rollout.integrations.vllm.engine_settings import (
    PROPOSER_CLASS,
    drafts_here,
    engine_arguments,
)
from sam_rollout.integrations.vllm.scheduling.scheduler_choice import (
    SCHEDULER_CLASS,
    SYNC_SCHEDULER_CLASS,
    scheduler_of,
    why_synchronous,
)
from sam_rollout.integrations.vllm_ascend import versions as ascend
from sam_rollout.sources.model import BY_PASSES, METHODS, WITH_FILES, ModelSourceConfig

KNOWN = "0.31.0+cpu"
NO_MODEL = ModelSourceConfig()
HEAD = ModelSourceConfig(enabled=True, path="head")


def config(
    scheduling: str = "auto", model: ModelSourceConfig = NO_MODEL, **changed: object
) -> SimpleNamespace:
    """Return a configuration of vLLM; in keys of `changed`, `__` stands for the dot."""
    sam = SamConfig(scheduling=scheduling, sources=SourcesConfig(model=model))
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, enable_expert_parallel=False
        ),
        model_config=SimpleNamespace(
            is_moe=False,
            uses_mrope=False,
            is_multimodal_model=False,
            enable_prompt_embeds=False,
            enable_return_routed_experts=False,
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        kv_transfer_config=None,
        speculative_config=SimpleNamespace(method="custom_class", model=PROPOSER_CLASS),
        additional_config=engine_arguments(sam)["additional_config"],
    )
    for name, value in changed.items():
        section, _, field = name.rpartition("__")
        setattr(getattr(made, section) if section else made, field, value)
    return made


@pytest.mark.parametrize("version", ["0.24.0", "0.31.0", "0.31.1+cu130", KNOWN])
def test_an_ordinary_engine_may(version):
    assert why_synchronous(config(), version) == ""
    scheduled_so = config(scheduler_config__scheduler_cls=SYNC_SCHEDULER_CLASS)
    assert why_synchronous(scheduled_so, version) == ""
    dense = config(parallel_config__data_parallel_size=2)  # engines of dense models run apart
    assert why_synchronous(dense, version) == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"scheduling": "sync"}, "sam.scheduling = 'sync'"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline stages"),
        (
            {"parallel_config__data_parallel_size": 2, "model_config__is_moe": True},
            "engines that share experts",
        ),
        ({"model_config__uses_mrope": True}, "inputs other than text"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"model_config__is_multimodal_model": True}, "inputs other than text"),
        ({"model_config__enable_prompt_embeds": True}, "inputs other than text"),
        ({"model_config__enable_return_routed_experts": True}, "experts are told"),
        (
            {"aux_output_config": SimpleNamespace(enable_return_routed_experts=True)},
            "experts are told",
        ),
        ({"scheduler_config__scheduler_cls": "theirs"}, "another scheduler_cls"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "share a prompt"),
    ],
)
def test_others_say_why_not(changed, reason):
    assert reason in why_synchronous(config(**changed), KNOWN)


@pytest.mark.parametrize("version", ["0.23.0", "0.29.0"])
def test_unknown_releases_are_named(version):
    assert f"vLLM 0.24 and 0.31, not {version}" in why_synchronous(config(), version)


@pytest.mark.parametrize(
    ("version", "vllm_version", "parallel", "reason"),
    [
        ("0.23.0", "0.23.0+empty", {}, ""),
        ("0.23.0", "0.23.0", {"worker_cls": "vllm_ascend.worker.worker.NPUWorker"}, ""),
        ("0.23.0", "0.24.0", {}, "vllm-ascend 0.23.0 with vLLM 0.23, not 0.23.0 with 0.24.0"),
        ("0.23.1", "0.23.0", {}, "not 0.23.1 with 0.23.0"),
        (None, "0.23.0", {}, "not a source tree without metadata with 0.23.0"),
        ("0.23.0", "0.23.0", {"worker_cls": "their.Worker"}, "not tried with their.Worker"),
        ("0.23.0", "0.23.0", {"decode_context_parallel_size": 2}, "their own share only"),
    ],
)
def test_vllm_ascend_has_rules_of_its_own(version, vllm_version, parallel, reason, monkeypatch):
    monkeypatch.setattr(ascend, "installed", lambda: version)
    parallel = {"worker_cls": "auto", "decode_context_parallel_size": 1} | parallel
    sections = SimpleNamespace(**parallel)
    found = ascend.why_synchronous(config(parallel_config=sections), vllm_version)
    assert reason in found and bool(found) == bool(reason)
    with_head = ascend.why_synchronous(config(model=HEAD, parallel_config=sections), vllm_version)
    assert (reason or "drafts of a model were not tried") in with_head


@pytest.mark.parametrize("method", METHODS)
def test_with_a_model_that_drafts_on_the_device_an_engine_may(method):
    path = "head" if method in WITH_FILES else ""
    made = config(model=ModelSourceConfig(enabled=True, method=method, path=path))
    reason = "" if method in BY_PASSES else f"{method} reads on the host what was sampled"
    assert why_synchronous(made, KNOWN) == reason
    assert why_synchronous(made, "0.24.0") == reason


@pytest.mark.parametrize(
    ("asynchronous", "stages", "release", "model", "expected"),
    [
        (True, 1, KNOWN, NO_MODEL, SCHEDULER_CLASS),
        (False, 1, KNOWN, NO_MODEL, SYNC_SCHEDULER_CLASS),
        (False, 2, KNOWN, NO_MODEL, None),
        (False, 1, "0.25.0", NO_MODEL, None),
        (False, 1, "0.23.0", HEAD, SYNC_SCHEDULER_CLASS),  # it sets a head's number of passes
        (False, 1, "0.22.0", HEAD, None),
    ],
)
def test_stages_and_unknown_releases_leave_drafts_to_vllm(
    asynchronous, stages, release, model, expected
):
    made = config(
        model=model,
        parallel_config__pipeline_parallel_size=stages,
        scheduler_config__async_scheduling=asynchronous,
    )
    assert scheduler_of(made, release) == expected


def test_only_our_proposer_itself_binds_late():
    assert drafts_here(config())
    assert not drafts_here(config(speculative_config=None))
    assert not drafts_here(config(speculative_config__model="other.Proposer"))
    assert not drafts_here(config(speculative_config__method="ngram"))
    assert not drafts_here(config(additional_config={}))
