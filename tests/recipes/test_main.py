import os
import sys

import pytest
from omegaconf import OmegaConf

from recipes.dapo_qwen3 import main as program

REFUSED = [
    ("sam.max_draft_tokens=0", "sam.max_draft_tokens = 0: must be 1..32"),
    ("+sam.gate.treshold=4", "sam.gate.treshold = 4: unknown key; did you mean 'threshold'?"),
    (
        "run_dir=/x/year=2019",
        "run_dir = '/x/year=2019': a value with = : , ( ) { } [ ] or a space needs quotes for "
        "Hydra, and others for the shell: 'run_dir=\"/x/year=2019\"'",
    ),
]
DATA = "data.train_files=nowhere.parquet"
QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")  # Hydra sets up no logging
MISSING = "data.train_files = 'nowhere.parquet': there is no such file; python -m recipes.dapo_qw"


def run_command(monkeypatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["main", "experiment=tiny_cpu", *QUIET, *arguments])
    monkeypatch.delenv(program.FULL_ERROR, raising=False)
    with pytest.raises(SystemExit) as ended:
        program.run_command()
    assert program.FULL_ERROR not in os.environ, "the program leaves it unset"
    return ended.value.code


@pytest.mark.parametrize(
    ("flags", "overrides", "said"),
    [
        *(([], *refused) for refused in [*REFUSED, (DATA, MISSING)]),
        ([program.CHECK_ONLY], DATA, MISSING),
        ([program.DRY_RUN], *REFUSED[0]),
    ],
)
def test_one_line_says_what_is_wrong(flags, overrides, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # otherwise a note is printed
    code = run_command(monkeypatch, *flags, overrides, f"run_dir={tmp_path}/run")
    assert code.startswith(f"Configuration error: {said}") and "\n" not in code
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("folder", "made"), [("synthetic", True), ("other", False)])
def test_the_recipes_own_problems_are_made_where_they_are_missing(
    folder, made, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data" / folder / "train.parquet"
    config = OmegaConf.create({"data": {"train_files": str(file)}})
    program.make_data(config)
    assert file.exists() == made
    if made:
        first = file.stat().st_mtime_ns
        program.make_data(config)
        assert file.stat().st_mtime_ns == first
