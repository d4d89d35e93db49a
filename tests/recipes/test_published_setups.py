import math
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from recipes.dapo_qwen3.main import FOLDER
from tests.unit.test_configs import CONFIGS, composed

PUBLISHED_PREFIXES = ("article_", "customer_", "reference_script_")
LISTED = yaml.safe_load((FOLDER / "published_setups.yaml").read_text(encoding="utf-8"))
SETUPS = LISTED["setups"]


def expected(setup: str) -> dict[str, Any]:
    listed = SETUPS[setup]
    found = expected(listed["extends"]) if "extends" in listed else {}
    for values in listed["values"].values():
        found |= values
    for difference in listed.get("differences", ()):
        found.pop(difference["key"], None)  # a difference without "ours" sets nothing
        if "ours" in difference:
            found[difference["key"]] = difference["ours"]
    return found


def same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, int | float):
        return math.isclose(value, other)
    return type(value) is type(other) and value == other


def test_every_experiment_of_a_published_setup_is_listed():
    experiments = {path.stem for path in (CONFIGS / "experiment").glob("*.yaml")}
    assert set(SETUPS) == {name for name in experiments if name.startswith(PUBLISHED_PREFIXES)}


@pytest.mark.parametrize("setup", SETUPS)
def test_the_composed_experiment_has_every_published_value(setup):
    config, wrong = composed(f"experiment={setup}"), {}
    for key, value in expected(setup).items():
        parent, _, name = key.rpartition(".")
        assert name in OmegaConf.select(config, parent), key
        ours = OmegaConf.select(config, key)
        ours = OmegaConf.to_container(ours) if OmegaConf.is_config(ours) else ours
        if not same(value, ours):
            wrong[key] = (value, ours)
    assert wrong == {}, "key: (value of the list, composed value)"


@pytest.mark.parametrize("setup", SETUPS)
def test_every_value_names_its_source(setup):
    differences = SETUPS[setup].get("differences", [])
    named = {*SETUPS[setup]["values"], *(one["source"] for one in differences)}
    assert named <= set(LISTED["sources"])
    assert all(one["why"] for one in differences)
