"""Tests that a new source needs only one file; this source is the example of CONTRIBUTING.md."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sam_rollout
from sam_rollout.sources import NAMES
from tests.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # may have to compile kernels

SCRIPTS = ROOT / "scripts"
PROBE = """
import json

import reference

import sam_rollout
from sam_rollout.config import ConfigError, SamConfig
from sam_rollout.report.panels import SECTIONS
from sam_rollout.sources import NAMES
from sam_rollout.telemetry.records import ENGINE_STEPS
from sam_rollout.telemetry.schema import METRICS
from tests.unit.session.engine import Engine

settings = {"sources": {"own": {"enabled": False}, "toy": {"enabled": True, "token": 9}}}
sources = SamConfig.from_mapping(settings).sources
found = {"package": sam_rollout.__file__, "names": NAMES, "section": sources.toy.token}
try:
    SamConfig.from_mapping({"sources": {"toy": {"tokn": 9}}})
except ConfigError as error:
    found["refusal"] = str(error)
found["metrics"] = [metric.name for metric in METRICS if "toy" in metric.name]
found["page of metrics"] = [line for line in reference.metrics().splitlines() if "toy" in line]
found["page of settings"] = [line for line in reference.settings().splitlines() if "toy" in line]
panels = [panel for section in SECTIONS for panel in section.panels]
found["panels"] = [one.title for one in panels if "sam/draft/accepted_toy" in one.metrics]
found["column"] = ENGINE_STEPS.field("drafted_per_source").metadata[b"meaning"].decode()

engine = Engine("a", "b", sources=sources)
engine.step("a", "b")
found["drafts"] = engine.go_on({"a": [9, 9, 9, 1], "b": [1]})
drained = engine.drain()
found["drafted"] = drained["steps"]["drafted_per_source"]
found["accepted"] = drained["steps"]["accepted_per_source"]
found["own count"] = drained["counters"]["draft/toy_drafts"]
print(json.dumps(found))
"""


def toy() -> str:
    walk = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a draft source\n")[2]
    return textwrap.dedent(re.search(r" *```python\n(.*?)```", walk, re.DOTALL)[1])


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("toy")
    package = Path(sam_rollout.__file__).parent
    shutil.copytree(package, folder / "sam_rollout")  # with the compiled kernels, which are inside
    (folder / "sam_rollout" / "sources" / "toy.py").write_text(toy())
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [folder, ROOT, SCRIPTS]))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert Path(told["package"]).is_relative_to(folder)
    return told


def test_it_is_found_and_shown_wherever_sources_are_told_apart(found):
    assert [name for name in found["names"] if name != "toy"] == list(NAMES)
    assert found["section"] == 9
    expected = "sam.sources.toy.tokn = 9: unknown key; did you mean 'token'?"
    assert found["refusal"].startswith(expected)
    row = "| `sam.sources.toy.token` | int | `7` | at least 0 | The token. |"
    assert row in found["page of settings"]
    assert found["metrics"] == ["sam/draft/toy_drafts"]
    assert "Drafts of one token." in "".join(found["page of metrics"])
    assert ", ".join(found["names"]) in found["column"]
    assert found["panels"] == ["Accepted by source"]


def test_its_drafts_come_out_of_a_session_and_are_counted(found):
    assert found["drafts"] == [[9, 9, 9]] * 2
    is_toy = [name == "toy" for name in found["names"]]
    assert found["drafted"] == [[], [6 * toy for toy in is_toy]]
    assert found["accepted"] == [[], [3 * toy for toy in is_toy]]
    assert found["own count"] == 4
