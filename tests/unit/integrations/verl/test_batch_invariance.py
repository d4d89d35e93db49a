import pytest

from sam_rollout.config import ConfigError, RolloutSamplerConfig
from sam_rollout.integrations.verl.check_results import hold
from sam_rollout.integrations.verl.checks import batch_invariance_rules
from sam_rollout.integrations.verl.environment import environment
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.vllm.batch_invariance import BATCH_INVARIANT_ENV
from sam_rollout.integrations.vllm.drafting.startup_check import StartUpError, check_samplers
from tests.unit.integrations.verl.test_checks import ENGINE, ROLLOUT, composed

SWITCH = "rollout_sampler.batch_invariant"
ON_CUDA = (f"{SWITCH}=true", "trainer.device=cuda")


def checked(*overrides: str) -> dict[str, str]:
    config = composed(*overrides)
    config.run_dir = "run"
    run = read_run_config(config)
    hold(batch_invariance_rules(config, run))
    return environment(config, run)


def test_both_sides_have_it_by_one_switch():
    for side in ("sam=on", "sam=off"):
        assert checked(side, *ON_CUDA)[BATCH_INVARIANT_ENV] == "1"
        assert BATCH_INVARIANT_ENV not in checked(side)
    checked(*ON_CUDA, f"+{ENGINE}.attention_backend=triton_attn")
    checked(f"{SWITCH}=true", "trainer.device=npu", f"+{ENGINE}.attention_backend=CUSTOM")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{SWITCH}=true"], f"{SWITCH} = True: must be false on trainer.device=cpu"),
        ([*ON_CUDA, f"{ROLLOUT}.dtype=float8"], f"{ROLLOUT}.dtype = 'float8': must be one of bf"),
        (
            [*ON_CUDA, f"+{ENGINE}.attention_backend=FLASHINFER"],
            f"{ENGINE}.attention_backend = 'FLASHINFER': must be one of FLASH_ATTN, ",
        ),
        (
            [*ON_CUDA, f"+{ENGINE}.attention_config={{backend:FLASHINFER}}"],
            f"{ENGINE}.attention_config.backend = 'FLASHINFER': must be one of ",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides, said):
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    found = str(caught.value).replace("bfloat16", "bf")
    assert found.startswith(said) and "\n" not in found


@pytest.mark.parametrize(("value", "wanted"), [("1", False), ("0", True)])
def test_the_variable_alone_would_not_be_recorded(monkeypatch, value, wanted):
    monkeypatch.setenv(BATCH_INVARIANT_ENV, value)
    with pytest.raises(ConfigError, match=f"must agree with {BATCH_INVARIANT_ENV}={value}"):
        checked(f"{SWITCH}={str(wanted).lower()}", "trainer.device=cuda")
    monkeypatch.setenv(BATCH_INVARIANT_ENV, "01"[wanted])
    checked(f"{SWITCH}={str(wanted).lower()}", "trainer.device=cuda")


def test_an_engine_that_did_not_switch_is_refused():
    asked = RolloutSamplerConfig(batch_invariant=True)
    on, off = ({"sampler": "coupled", "batch_invariant": value} for value in (True, False))
    assert check_samplers([on, on], asked).endswith("2 worker(s), batch-invariant kernels")
    with pytest.raises(StartUpError, match="batch_invariant=True, but"):
        check_samplers([on, off], asked)
    assert "invariant" not in check_samplers([off], RolloutSamplerConfig())
