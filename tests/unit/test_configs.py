import dataclasses
import re
import typing
from collections.abc import Mapping
from copy import deepcopy
from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes.dapo_qwen3.main import FOLDER
from sam_rollout.config import ARTICLE, ConfigError, RunConfig, SamConfig
from sam_rollout.integrations.vllm.hybrids import WITHOUT_DRAFTS
from sam_rollout.sizing.shape import HardwareConfig, ModelShape
from tests.pages import ROOT
from tests.settings_checks import check

CONFIGS = FOLDER / "configs"
REFERENCE = (ROOT / "docs" / "configuration.md").read_text()
SECTIONS = {**RunConfig.groups(), "model_shape": ModelShape, "hardware": HardwareConfig}
GROUP_OPTIONS = [
    f"{path.parent.relative_to(CONFIGS)}={path.stem}" for path in sorted(CONFIGS.glob("*/*.yaml"))
]


@cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("dapo_qwen3", overrides=list(overrides))


def changed(*overrides: str) -> DictConfig:
    groups, values = [], []
    for override in overrides:
        name = override.partition("=")[0]
        (groups if (CONFIGS / name).is_dir() else values).append(override)
    config = deepcopy(composed(*groups))
    for value in values:
        name, _, text = value.partition("=")
        OmegaConf.update(config, name, OmegaConf.create(f"value: {text}").value)
    return config


@pytest.fixture(autouse=True)
def plain_shell(monkeypatch):
    for device in (CONFIGS / "device").glob("*.yaml"):
        for name in OmegaConf.load(device).environment:
            monkeypatch.delenv(name, raising=False)


def leaves(node, path: str = "") -> dict[str, object]:
    if not isinstance(node, dict) or not node:
        return {path: node}
    found = {}
    for key, value in node.items():
        found |= leaves(value, f"{path}.{key}" if path else str(key))
    return found


def resolved(*overrides: str) -> dict[str, object]:
    return leaves(OmegaConf.to_container(composed(*overrides), resolve=True))


def differing(one: dict[str, object], other: dict[str, object]) -> set[str]:
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def test_baselines_are_on_but_for_one_setting():
    on, off, matched = (
        resolved("experiment=tiny_cpu", f"sam={option}") for option in ("on", "off", "matched")
    )
    assert differing(on, off) == {"sam.enabled"} and on["sam.enabled"] is True
    assert differing(on, matched) == {"sam.gate.kind"}
    config = SamConfig.from_mapping(OmegaConf.to_container(composed("sam=matched").sam))
    assert config.enabled and config.gate.most_drafting(max_num_seqs=2000) == 0


def test_the_article_drafts_from_own_text_below_a_threshold():
    chosen = composed("sam=article").sam
    assert SamConfig.from_mapping(OmegaConf.to_container(chosen)) == ARTICLE
    assert [name for name, source in chosen.sources.items() if source.enabled] == ["own"]


@pytest.mark.parametrize("option", GROUP_OPTIONS)
def test_every_group_composes(option):
    OmegaConf.to_container(composed(option), resolve=False)


@pytest.mark.parametrize("option", ["on", "off", "article", "matched", "joined"])
@pytest.mark.parametrize("sampling", ["rounds", "refill"])
def test_the_tiny_experiment_can_be_run(option, sampling, capsys):
    check(composed("experiment=tiny_cpu", f"sam={option}", f"dynamic_sampling={sampling}"))
    assert capsys.readouterr().out == "", "no notes on the settings we ship"


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_experiment_can_be_run(path, capsys):
    config = composed(f"experiment={path.stem}")
    check(config)
    assert capsys.readouterr().out == "", "no notes on the settings we ship"
    assert config.trainer.experiment_name == path.stem, "or two experiments share a run folder"
    saves = config.trainer.save_freq > 0
    assert saves or not path.stem.startswith("qwen3_"), "large models train for days"
    if saves and config.trainer.device != "cpu":
        assert 0 < config.trainer.max_actor_ckpt_to_keep <= 2, "checkpoints are large"


HYBRIDS = [f"qwen3_5_{name}" for name in ("27b_cuda", "27b_910c", "35b_a3b_cuda", "35b_a3b_910c")]


@pytest.mark.parametrize("name", HYBRIDS)
def test_presets_of_hybrids_do_not_draft(name):
    preset = check(composed(f"experiment={name}"))
    assert (preset.sam.enabled, preset.sampler.kind, preset.decisions) == (False, "stock", ())
    for option in ("on", "article"):
        asked = check(composed(f"experiment={name}", f"sam={option}"))
        assert (asked.sam.enabled, asked.decisions) == (False, (WITHOUT_DRAFTS,)), option


def test_two_nodes_train_as_one_does():
    one, two = (resolved(f"experiment={name}") for name in ("tiny_cpu", "tiny_cpu_2nodes"))
    changed = {path for path in differing(one, two) if not path.startswith("trainer.")}
    named = {"run_dir", "actor_rollout_ref.rollout.trace.experiment_name"}
    assert changed <= named | {"ray_kwargs.ray_init.address"}


def test_a_run_without_an_experiment_names_what_is_missing():
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.max_model_len"):
        check(composed())


def field_paths(section: type, path: str) -> dict[str, tuple[type, Mapping]]:
    """Return full path -> (type, limits) of each field, also of fields in inner sections."""
    found = {}
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, kind = f"{path}.{field.name}", kinds[field.name]
        inner = dataclasses.is_dataclass(kind)
        found |= field_paths(kind, name) if inner else {name: (kind, field.metadata)}
    return found


OUR_FIELDS = {
    name: field
    for group, section in SECTIONS.items()
    for name, field in field_paths(section, group).items()
}


def test_our_groups_set_every_field_and_no_other():
    plain = {group: OmegaConf.to_container(composed()[group]) for group in SECTIONS}
    assert leaves(plain).keys() == OUR_FIELDS.keys()


def test_the_groups_hold_the_defaults_of_the_sections():
    follows_another = {"dynamic_sampling.gen_batch_size"}
    for group, section in RunConfig.groups().items():
        defaults = leaves(section().to_mapping(), group)
        chosen = leaves(OmegaConf.to_container(composed()[group]), group)
        chosen = {path: {} if defaults.get(path) == {} else v for path, v in chosen.items()}
        assert differing(defaults, chosen) <= follows_another, group


def reference_rows() -> dict[str, tuple[str, str, str, str]]:
    """Return key -> (type, default, allowed, meaning) of the tables in docs/configuration.md."""
    rows = {}
    for line in REFERENCE.splitlines():
        if match := re.match(r"\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", line):
            rows[match[1]] = match.groups()[1:]
    return rows


@pytest.mark.parametrize("name", OUR_FIELDS)
def test_the_reference_describes_every_field(name):
    kind, default, allowed, _meaning = reference_rows()[name]
    its_kind, limits = OUR_FIELDS[name]
    assert kind == its_kind.__name__
    value = OmegaConf.select(OmegaConf.create(raw(composed())), name)
    value = {} if its_kind is dict and value is None else value
    assert default == f"`{value}`".replace("True", "true").replace("False", "false")
    for limit in ("minimum", "maximum"):
        if limit in limits:
            assert re.search(rf"(?<![\d.]){limits[limit]}(?![\d.])", allowed), limit
    for choice in limits.get("choices", ()):
        assert f"`{choice}`" in allowed


def raw(config: DictConfig) -> dict:
    text = OmegaConf.to_yaml({group: config[group] for group in SECTIONS})
    return OmegaConf.to_container(OmegaConf.create(re.sub(r"\$\{([\w.]+)\}", r"<\1>", text)))


def test_the_reference_names_no_key_that_does_not_exist():
    known = set(leaves(OmegaConf.to_container(composed(), resolve=False)))
    groups = [name for name in reference_rows() if not name.isupper()]
    sections = {name.rpartition(".")[0] for name in known}
    assert [name for name in groups if name not in known | sections] == []


def test_the_reference_lists_options_and_variables():
    variables = [
        name
        for path in (CONFIGS / "device").glob("*.yaml")
        for name in OmegaConf.load(path).environment
    ]
    assert [name for name in [*GROUP_OPTIONS, *variables] if f"`{name}`" not in REFERENCE] == []


def test_the_references_example_experiment_composes(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", REFERENCE, re.DOTALL)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(example)
    config = composed("experiment=mine", f"hydra.searchpath=[{searchpath()},file://{tmp_path}]")
    assert config.sam.max_draft_tokens == 5
    assert (config.sam.gate.kind, config.sam.gate.threshold) == ("threshold", 4)
    assert config.trainer.experiment_name == "tiny_cpu"
    check(config)


def searchpath() -> str:
    return OmegaConf.load(CONFIGS / "dapo_qwen3.yaml").hydra.searchpath[0]
