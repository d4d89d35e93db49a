"""A source is one file: what is written there shows up wherever sources are told apart."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sam_rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # compiles the drafter's kernels

TOY = '''
"""Drafts the same token over and over."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sam_rollout.automaton.interface import MATCH_LENGTH
from sam_rollout.metric import Metric
from sam_rollout.settings import Section, setting
from sam_rollout.sources.contract import Source, SourceEntry


@dataclass(frozen=True)
class ToyConfig(Section):
    PATH: ClassVar[str] = "sam.sources.toy"

    enabled: bool = setting(False, meaning="Draft one token over and over.")
    token: int = setting(7, minimum=0, meaning="Which one.")


class Toy(Source):
    name = "toy"

    def __init__(self, config, limits):
        self._token, self._asked = config.token, 0

    def bind(self, request_ids, identities):
        """Nothing to know of them."""

    def match(self, token_ids, num_tokens, eligible, out_matches):
        self._asked += int(eligible.sum())
        out_matches[:, MATCH_LENGTH] = eligible

    def draft(self, matches, k, out_tokens, out_counts):
        out_tokens[k > 0] = self._token
        np.copyto(out_counts, k, where=k > 0)

    def counters(self):
        return {"toy_asked": self._asked}


SOURCE = SourceEntry(
    "toy",
    ToyConfig,
    Toy,
    order=25,
    metrics=(Metric("toy_asked", "rows", "Rows that the toy was asked about."),),
    benchmark=lambda folder: {},
)
'''

PROBE = """
import json

import numpy as np

import sam_rollout
from sam_rollout.bench.sides import all_sides
from sam_rollout.config import ConfigError, SamConfig
from sam_rollout.dashboard.layout import SECTIONS
from sam_rollout.session.session import DraftSession
from sam_rollout.sources import NAMES
from sam_rollout.telemetry import docs
from sam_rollout.telemetry.records import ENGINE_STEPS, DraftNote
from sam_rollout.telemetry.schema import METRICS

config = SamConfig.from_mapping(
    {"sources": {"own": {"enabled": False}, "toy": {"enabled": True, "token": 9}}}
)
found = {"package": sam_rollout.__file__, "names": NAMES, "section": config.sources.toy.token}
try:
    SamConfig.from_mapping({"sources": {"toy": {"tokn": 9}}})
except ConfigError as error:
    found["refusal"] = str(error)
found["metrics"] = [metric.name for metric in METRICS if "toy" in metric.name]
found["page of metrics"] = [line for line in docs.render().splitlines() if "toy" in line]
found["sides"] = [side.name for side in all_sides() if "toy" in side.name]
found["panels"] = [
    panel.title
    for section in SECTIONS
    for panel in section.panels
    if "sam/draft/accepted_toy" in panel.metrics
]
found["column"] = ENGINE_STEPS.field("drafted_per_source").metadata[b"sources"].decode()


class Requests:
    live = ("a", "b")

    def identity(self, request_id):
        return None

    def is_control(self, request_id):
        return False


session = DraftSession(config, Requests(), max_rows=2, max_model_len=20)
texts = np.zeros((2, 20), np.int32)
texts[0, 5:10] = 9, 9, 9, 1, 1
for lengths, sampled in (([5, 5], [1, 1]), ([9, 6], [4, 1])):
    lengths, sampled = np.array(lengths, np.int32), np.array(sampled, np.int32)
    batch = session.step(["a", "b"], texts, lengths, sampled)
    found["drafts"] = batch.to_lists()
drained = session.drain()
found["drafted"] = drained["steps"]["drafted_per_source"]
found["accepted"] = drained["steps"]["accepted_per_source"]
found["asked"] = drained["counters"]["draft/toy_asked"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What a process with one more file among its sources says."""
    folder = tmp_path_factory.mktemp("toy")
    package = Path(sam_rollout.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / "sam_rollout", ignore=ignore)
    (folder / "sam_rollout" / "sources" / "toy.py").write_text(textwrap.dedent(TOY))
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert Path(told["package"]).is_relative_to(folder)
    return told


def test_it_is_found_in_its_place(found):
    assert found["names"] == ["own", "siblings", "history", "toy", "corpus"]


def test_it_has_a_section_of_the_configuration(found):
    assert found["section"] == 9
    expected = "sam.sources.toy.tokn = 9: unknown key; did you mean 'token'?"
    assert found["refusal"].startswith(expected)


def test_it_has_metrics_and_rows_on_their_page(found):
    expected = ["sam/draft/drafted_toy", "sam/draft/accepted_toy", "sam/draft/toy_asked"]
    assert sorted(found["metrics"]) == sorted(expected)
    for name in expected:
        assert any(line.startswith(f"| `{name}`") for line in found["page of metrics"])
    assert "Rows that the toy was asked about." in "".join(found["page of metrics"])


def test_it_has_a_place_in_the_records_and_a_side_in_the_benchmark(found):
    assert found["column"] == "own,siblings,history,toy,corpus"
    assert found["sides"] == ["own + toy"]


def test_it_has_a_curve_on_the_dashboard(found):
    assert found["panels"] == ["Accepted by source"]


def test_its_drafts_come_out_of_a_session_and_are_counted(found):
    assert found["drafts"] == [[9, 9, 9]] * 2
    assert found["drafted"] == [[], [0, 0, 0, 6, 0]]
    assert found["accepted"] == [[], [0, 0, 0, 3, 0]]
    assert found["asked"] == 4
