"""The Hydra groups: what they compose to, and that their reference page tells the truth."""

import dataclasses
import re
from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes.dapo_qwen3.main import REPOSITORY
from sam_rollout.config import (
    ConfigError,
    DynamicSamplingConfig,
    RolloutSamplerConfig,
    RolloutTelemetryConfig,
    SamConfig,
)
from sam_rollout.gating import make_gate
from sam_rollout.integrations.verl.launch import check

CONFIGS = REPOSITORY / "configs"
REFERENCE = (REPOSITORY / "docs" / "configuration.md").read_text()
SECTIONS = {
    "sam": SamConfig,
    "rollout_sampler": RolloutSamplerConfig,
    "rollout_telemetry": RolloutTelemetryConfig,
    "dynamic_sampling": DynamicSamplingConfig,
}
GROUP_OPTIONS = [
    f"{path.parent.relative_to(CONFIGS)}={path.stem}" for path in sorted(CONFIGS.glob("*/*.yaml"))
]


@cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("dapo_qwen3", overrides=list(overrides))


def leaves(node, path: str = "") -> dict[str, object]:
    """Path -> value of everything below a node of a plain configuration."""
    if not isinstance(node, dict):
        return {path: node}
    found = {}
    for key, value in node.items():
        found |= leaves(value, f"{path}.{key}" if path else str(key))
    return found


def resolved(*overrides: str) -> dict[str, object]:
    return leaves(OmegaConf.to_container(composed(*overrides), resolve=True))


def differing(one: dict[str, object], other: dict[str, object]) -> set[str]:
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def test_off_is_on_without_drafting_and_nothing_else():
    on, off = (resolved("experiment=tiny_cpu", f"sam={option}") for option in ("on", "off"))
    assert differing(on, off) == {"sam.enabled"}
    assert on["sam.enabled"] is True and off["sam.enabled"] is False


def test_matched_never_opens_and_is_on_otherwise():
    on, matched = (resolved("experiment=tiny_cpu", f"sam={option}") for option in ("on", "matched"))
    assert differing(on, matched) == {"sam.gate.kind"}
    config = SamConfig.from_mapping(OmegaConf.to_container(composed("sam=matched").sam))
    gate = make_gate(config.gate)
    assert config.enabled and not any(gate.open(running) for running in range(2000))


@pytest.mark.parametrize("option", GROUP_OPTIONS)
def test_every_group_composes(option):
    OmegaConf.to_container(composed(option), resolve=False)


@pytest.mark.parametrize("option", ["on", "off", "matched"])
@pytest.mark.parametrize("sampling", ["rounds", "refill"])
def test_the_tiny_experiment_can_be_run(option, sampling, capsys):
    check(composed("experiment=tiny_cpu", f"sam={option}", f"dynamic_sampling={sampling}"))
    assert capsys.readouterr().out == "", "no notes on the settings we ship"


def test_a_run_without_an_experiment_names_what_is_missing():
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.max_model_len"):
        check(composed())


def field_paths(section: type, path: str) -> dict[str, dataclasses.Field]:
    """Full path -> field of a configuration section, sections inside it included."""
    found = {}
    for field in dataclasses.fields(section):
        name = f"{path}.{field.name}"
        inner = dataclasses.is_dataclass(field.type)
        found |= field_paths(field.type, name) if inner else {name: field}
    return found


OUR_FIELDS = {
    name: field
    for group, section in SECTIONS.items()
    for name, field in field_paths(section, group).items()
}


def test_our_groups_set_every_field_and_no_other():
    plain = {group: OmegaConf.to_container(composed()[group]) for group in SECTIONS}
    assert leaves(plain).keys() == OUR_FIELDS.keys()


def reference_rows() -> dict[str, tuple[str, str, str, str]]:
    """Key -> (type, default, allowed, meaning) of the tables in docs/configuration.md."""
    rows = {}
    for line in REFERENCE.splitlines():
        if match := re.match(r"\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", line):
            rows[match[1]] = match.groups()[1:]
    return rows


@pytest.mark.parametrize("name", OUR_FIELDS)
def test_the_reference_describes_every_field(name):
    kind, default, allowed, _meaning = reference_rows()[name]
    field = OUR_FIELDS[name]
    assert kind == field.type.__name__
    value = OmegaConf.select(OmegaConf.create(raw(composed())), name)
    assert default == f"`{value}`".replace("True", "true").replace("False", "false")
    for limit in ("minimum", "maximum"):
        if limit in field.metadata:
            assert re.search(rf"(?<![\d.]){field.metadata[limit]}(?![\d.])", allowed), limit
    for choice in field.metadata.get("choices", ()):
        assert f"`{choice}`" in allowed


def raw(config: DictConfig) -> dict:
    """Plain mappings; a value taken from elsewhere as "<path>"."""
    text = OmegaConf.to_yaml({group: config[group] for group in SECTIONS})
    return OmegaConf.to_container(OmegaConf.create(re.sub(r"\$\{([\w.]+)\}", r"<\1>", text)))


def test_the_reference_names_no_key_that_does_not_exist():
    known = set(leaves(OmegaConf.to_container(composed(), resolve=False)))
    groups = [name for name in reference_rows() if not name.isupper()]
    sections = {name.rpartition(".")[0] for name in known}
    assert [name for name in groups if name not in known | sections] == []


def test_the_reference_lists_every_option_of_every_group():
    for option in GROUP_OPTIONS:
        assert f"`{option}`" in REFERENCE, option


def test_the_reference_lists_the_devices_variables():
    for path in (CONFIGS / "device").glob("*.yaml"):
        for name in OmegaConf.load(path).environment:
            assert f"`{name}`" in REFERENCE, name


def test_the_references_example_experiment_composes(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", REFERENCE, re.DOTALL)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(example)
    config = composed("experiment=mine", f"hydra.searchpath=[{searchpath()},file://{tmp_path}]")
    assert (config.sam.max_draft_tokens, config.sam.gate.threshold) == (5, 4)
    assert config.trainer.experiment_name == "tiny_cpu"
    check(config)


def searchpath() -> str:
    """Where the root finds verl's configuration."""
    return OmegaConf.load(CONFIGS / "dapo_qwen3.yaml").hydra.searchpath[0]
