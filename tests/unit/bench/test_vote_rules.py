"""What each rule of the voting brings: changed copies of the package, the record, its section."""

import filecmp
import json
import subprocess
import sys

import pytest

from benchmarks import results_page, vote_rules
from benchmarks.measuring import REPOSITORY
from benchmarks.real_traces import SOURCES
from benchmarks.vote_rules import VARIANTS, Variant


@pytest.fixture
def traces(tmp_path):
    """The smallest sets that pass for the real ones."""
    folder = tmp_path / "sets"
    folder.mkdir()
    for name in SOURCES:
        (folder / f"{name}.jsonl").write_text('{"prompt": [1], "response": [2, 3, 4]}\n')
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program on a folder; returns the file that it may have written."""

    def run(traces):
        path = tmp_path / "vote_rules.json"
        arguments = ["--traces", str(traces), "--output", str(path)]
        monkeypatch.setattr(sys, "argv", ["vote_rules", *arguments])
        vote_rules.main()
        return path

    return run


def test_the_first_variant_changes_nothing_and_each_has_a_name():
    assert not VARIANTS[0].file
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=lambda variant: variant.name)
def test_a_variant_changes_one_line_of_one_file(variant, tmp_path):
    variant.copy_to(tmp_path)
    changed = tmp_path / "sam_rollout" / variant.file
    compile(changed.read_text(), str(changed), "exec")
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")]
    _, differ, missing = filecmp.cmpfiles(tmp_path, REPOSITORY, files, shallow=False)
    assert differ == [f"sam_rollout/{variant.file}"] and not missing
    texts = [(root / differ[0]).read_text().splitlines() for root in (tmp_path, REPOSITORY)]
    assert sum(mine != theirs for mine, theirs in zip(*texts, strict=True)) == 1


def test_a_line_that_is_gone_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone: config.py must hold once: no such line"):
        Variant("gone", "config.py", "no such line", "").copy_to(tmp_path)


def test_a_variant_is_measured_with_its_own_copy(traces):
    measured = Variant("", "bench/drafts.py", "    result = Replay()\n",
                       "    return Replay(steps=2, tokens=7)\n")  # fmt: skip
    assert list(vote_rules.run_variant(measured, traces)) == [(name, 3.5) for name in SOURCES]


def test_a_variant_that_fails_ends_the_program(traces, capfd):
    broken = Variant("broken", "bench/drafts.py", "    result = Replay()\n", "    raise OSError\n")
    with pytest.raises(subprocess.CalledProcessError, match="broken"):
        list(vote_rules.run_variant(broken, traces))
    assert "OSError" in capfd.readouterr().err


def test_other_sets_are_refused_before_anything_runs(traces, run, tmp_path, monkeypatch):
    monkeypatch.setattr(vote_rules, "run_variant", None)
    (traces / "tau_gpt4o.jsonl").rename(traces / "other.jsonl")
    with pytest.raises(SystemExit, match=r"tau_gpt4o of benchmarks.real_traces.*found.*other"):
        run(traces)
    with pytest.raises(SystemExit, match=r"--traces: .*nowhere"):
        run(tmp_path / "nowhere")
    assert not (tmp_path / "vote_rules.json").exists()


def test_what_was_measured_is_recorded_and_shown(traces, run, monkeypatch):
    def found(variant, traces):
        for name in SOURCES:
            yield name, 2.0 if variant is VARIANTS[0] else 1.95

    monkeypatch.setattr(vote_rules, "run_variant", found)
    record = json.loads(run(traces).read_text())
    assert {"cpu", "date", "numba"} <= set(record["machine"])
    assert record["sources"].keys() == SOURCES.keys()
    assert len(record["rows"]) == len(VARIANTS) * len(SOURCES)
    shown = results_page.section("vote_rules", record)
    heads, _, base, *others = [line for line in shown.splitlines() if line.startswith("|")]
    assert heads == f"| variant | {' | '.join(SOURCES)} |"
    assert base == "| as it is |" + " 2.000 |" * len(SOURCES)
    assert [line.split(" | ")[0][2:] for line in others] == [one.name for one in VARIANTS[1:]]
    assert all(line.count(" 1.950, -2.5% |") == len(SOURCES) for line in others)
    for source in SOURCES.values():
        assert f"github.com/{source.repository}/tree/{source.commit}" in shown
