from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rollout import SIDES, TAIL_THRESHOLD, drafting
from sam_rollout.config import ARTICLE, GateConfig, sources_of


def test_every_side_has_a_configuration(tmp_path):
    made = {name: drafting(name, tmp_path) for name in SIDES}
    assert [name for name, sam in made.items() if not sam.enabled] == ["stock", "off"]
    assert replace(made["matched"], gate=made["on"].gate) == made["on"]
    assert made["article"] == replace(ARTICLE, gate=GateConfig("threshold", TAIL_THRESHOLD))
    assert made["on"].texts.path == str(tmp_path)


def test_a_name_says_sources_k_and_gate():
    sam = drafting("run:5:12", Path("kept"))
    assert (sam.max_draft_tokens, sam.gate) == (5, GateConfig("threshold", 12))
    assert (sam.sources.run.enabled, sam.sources.run.when) == (True, "always")
    assert not sam.sources.prompt.enabled
    assert sam.texts.path == "kept"
    own = drafting("own:8:auto", Path("kept"))
    assert own.gate.kind == "auto" and not own.sources.run.enabled
    assert own.sources == replace(sources_of("own"), run=own.sources.run)
    with pytest.raises(SystemExit, match="no such sources: sibling"):
        drafting("sibling:3:16", Path("kept"))
