"""Experiments that repeat a published setup have the published values, and the page says so."""

import math

import pytest

from recipes.dapo_qwen3.main import REPOSITORY
from recipes.dapo_qwen3.published_setups import (
    PAGE,
    catalogue,
    entries,
    our_value,
    render,
    setups,
)

PUBLISHED_PREFIXES = ("article_", "customer_", "reference_script_")


def test_every_experiment_of_a_published_setup_is_listed():
    experiments = {path.stem for path in (REPOSITORY / "configs" / "experiment").glob("*.yaml")}
    assert set(setups()) == {name for name in experiments if name.startswith(PUBLISHED_PREFIXES)}


def same(value, other) -> bool:
    if isinstance(value, float) and isinstance(other, int | float):
        return math.isclose(value, other)
    return type(value) is type(other) and value == other


@pytest.mark.parametrize("setup", setups())
def test_the_composed_experiment_has_every_published_value(setup):
    wrong = {
        entry.key: (entry.ours, our_value(setup, entry.key))
        for entry in entries(setup)
        if entry.key and (not entry.why or entry.ours is not None)
        if not same(entry.ours, our_value(setup, entry.key))
    }
    assert wrong == {}, "key: (value of the list, composed value)"


@pytest.mark.parametrize("setup", setups())
def test_every_entry_names_a_source_and_a_key_that_exists(setup):
    for entry in entries(setup):
        assert entry.source in catalogue()["sources"], entry
        if entry.key and not entry.why:
            parent, _, name = entry.key.rpartition(".")
            assert name in our_value(setup, parent), entry.key


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run python -m recipes.dapo_qwen3.published_setups"
    )
