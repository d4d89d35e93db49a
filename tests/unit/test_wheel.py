"""Builds the wheel, installs it into an empty environment, and uses it outside a checkout.

Nothing is downloaded: build tools come from uv's cache, other packages from this environment.
"""

import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from sam_rollout.installer import CONSTRAINTS
from sam_rollout.installer.install import STAMP
from tests.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MOST_BYTES = 25_000_000
COMPOSE = """
from pathlib import Path
import recipes, sam_rollout
from sam_rollout.core.composition import compose
config, device = compose("experiment=tiny_cpu", "sam=on")
print(device, config["data"]["train_files"], config["actor_rollout_ref"]["model"]["path"])
print(Path(sam_rollout.__file__).parents[1], Path(recipes.__file__).parents[1], sep="\\n")
"""


def run(*command, cwd):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    uv = [ROOT / "sam_rollout" / "installer" / "run_uv.py", "--cache", ROOT / ".cache" / "uv"]
    run(sys.executable, *uv, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel):
    folder = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", folder, cwd=wheel.parent)
    programs = folder / "bin"
    run(programs / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The borrowed folder comes last in sys.path, and .pth files in it are not read.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_all_that_training_needs_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"sam_rollout/py.typed", "sam_rollout/core/upstream.toml"}
    wanted |= {f"sam_rollout/installer/constraints/{one.name}" for one in CONSTRAINTS.iterdir()}
    for folder in ("recipes", "configs"):
        files = [one for one in (ROOT / folder).rglob("*") if one.is_file()]
        prefix = "" if folder == "recipes" else "recipes/dapo_qwen3/"
        wanted |= {f"{prefix}{one.relative_to(ROOT)}" for one in files if one.suffix != ".pyc"}
    assert wanted - names == set()
    parts = {name.partition("/")[0] for name in names}
    assert parts == {"sam_rollout", "recipes", f"sam_rollout-{version('sam_rollout')}.dist-info"}
    assert wheel.stat().st_size < MOST_BYTES


def test_its_commands_answer_outside_a_checkout(alone, environment, tmp_path):
    said = run(environment / "sam-rollout", "--help", cwd=tmp_path)
    assert all(command in said for command in ("install", "train", "compare", "doctor"))
    said = run(environment / "sam-rollout", "install", "--help", cwd=tmp_path)
    assert "{cpu,cuda,ascend}" in said


def test_it_composes_an_experiment_outside_a_checkout(alone, environment, tmp_path):
    pytest.importorskip("verl")
    first, *places = run(environment / "python", "-c", COMPOSE, cwd=tmp_path).splitlines()
    device, data, model = first.split()
    assert device == "cpu" and data == str(tmp_path / "data" / "synthetic" / "train.parquet")
    assert {Path(model).parents[2], *map(Path, places)} == {Path(places[0])}
    assert Path(places[0]).is_relative_to(environment.parent)
    assert (Path(model) / "config.json").is_file()


def test_an_environment_is_for_one_device(alone, environment, tmp_path):
    (environment.parent / STAMP).write_text("cpu 0123\n")
    command = [environment / "sam-rollout", "install", "cuda"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "was installed for cpu; make a new" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
