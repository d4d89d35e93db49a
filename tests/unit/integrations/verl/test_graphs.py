from copy import deepcopy
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from sam_rollout.integrations.verl.graphs import (
    capture_sizes,
    covered_requests,
    graph_mode,
)
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.verl.translation import translate
from sam_rollout.report.run_differences import comparable, differences
from tests.unit.test_configs import CONFIGS, changed, composed

ROLLOUT = "actor_rollout_ref.rollout"
MODE = f"{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode"
JOINED_SIZES = [16, 32, 64, 128, 256, 512]
GRAPH = ("experiment=article_32b_graph",)
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_presets_graphs_hold_every_request_on_both_sides(name):
    config = composed(f"experiment={name}", "sam=on")
    on = read_run_config(config).sam
    matched = replace(on, gate=read_run_config(composed(*GRAPH, "sam=matched")).sam.gate)
    if graph_mode(config) != "NONE":
        for sam in (on, matched, replace(on, enabled=False)):
            assert covered_requests(config, sam) == config.actor_rollout_ref.rollout.max_num_seqs


@pytest.mark.parametrize(
    ("overrides", "sizes", "covered"),
    [
        (["sam=off"], [16, 32, 64, 128], 128),
        (["sam=matched"], [16, 32, 64, 128, 256, 512], 128),
        *(
            (["sam=joined", "sam.max_draft_tokens=3", f"{MODE}={mode}"], JOINED_SIZES, 128)
            for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE")
        ),
        (["sam.max_draft_tokens=1"], [16, 32, 64, 128, 256], 128),
        ([f"{ROLLOUT}.cudagraph_capture_sizes=[256,512]"], [256, 512], 128),
        ([f"{ROLLOUT}.cudagraph_capture_sizes=[16,160]"], [16, 64, 160, 512], 128),
        ([f"{ROLLOUT}.cudagraph_capture_sizes=[8,16]"], [8, 16, 32, 64], 16),
        ([f"{MODE}=PIECEWISE"], [16, 32, 64, 128], 32),
        ([f"{ROLLOUT}.cudagraph_capture_sizes=null"], [], 128),
        ([f"{ROLLOUT}.enforce_eager=true"], [], 0),
    ],
)
def test_sizes_count_tokens(overrides, sizes, covered):
    config = changed(*GRAPH, *overrides)
    sam = read_run_config(config).sam
    assert capture_sizes(config, sam) == sizes
    assert covered_requests(config, sam) == covered


def graph_differences(*others: list[str]) -> list[tuple]:
    sides = []
    for overrides in others:
        config = deepcopy(composed("experiment=reference_script_32b", *overrides))
        translate(config, read_run_config(config))
        sides.append(comparable(OmegaConf.to_container(config, resolve=True)))
    return list(differences(*sides))


@pytest.mark.parametrize(
    "side",
    [["sam=on"], ["sam=matched"], ["sam=joined"], ["sam=joined", "draft_model_path=owner/head"]],
)
def test_larger_graphs_for_drafts_are_no_difference(side):
    assert graph_differences(["sam=off"], side) == []


def test_other_graphs_are_a_difference_still():
    sizes = [16, 64, 128]
    asked = f"{ROLLOUT}.cudagraph_capture_sizes={sizes}".replace(" ", "")
    name = f"{ROLLOUT}.cudagraph_capture_sizes"
    assert graph_differences(["sam=off"], ["sam=on", asked]) == [(name, [16, 32, 64, 128], sizes)]
    assert graph_differences(["sam=off", asked], ["sam=on", asked]) == []
