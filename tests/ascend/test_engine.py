"""A whole engine: vllm-ascend's platform, worker, runner and samplers, with ours installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.ascend.conftest import ROOT

LIMIT_S = 300


@pytest.fixture(scope="module")
def report():
    command = [sys.executable, "-m", "tests.ascend.generate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_engine_is_vllm_ascends_with_our_sampler(report):
    assert report["runner"] == "vllm_ascend.worker.model_runner_v1.NPUModelRunner"
    assert report["sampler"] == "coupled"


def test_drafts_do_not_change_the_texts(report):
    results = report["results"]
    plain = results["none"]
    assert plain["steps"]["verify"] == 0
    for name in ("ngram", "suffix automaton"):
        assert results[name]["texts"] == plain["texts"], name
        assert results[name]["steps"]["verify"] > 0
        assert results[name]["steps"]["all"] < plain["steps"]["all"]
