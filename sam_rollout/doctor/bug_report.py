"""Writes a bug report: versions, the doctor's findings, settings, the end of a log.

Secrets, addresses, names of hosts and users, and home folders are left out.
"""

import getpass
import os
import re
import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sam_rollout.core.upstream import MADE_FOR
from sam_rollout.doctor.installation import all_versions
from sam_rollout.doctor.printed_checks import Finding, to_text
from sam_rollout.doctor.scope import Question
from sam_rollout.telemetry.records import RunFolder

LOG_LINES = 80
SECRET, ADDRESS, USER, HOST = "<secret>", "<address>", "<user>", "<host>"
# The value of a key is a secret if the key ends in one of these words. The key max_draft_tokens
# ends in "tokens", which is none of them.
_SECRET_WORD = (
    r"(?:(?<!per_)token|secret|passw(?:or)?d|passphrase|credentials?|authorization|auth"
    r"|(?:api|access|secret|private|license)[_-]?key)"
)
_SECRET_KEY = re.compile(rf"(?:^|[\W_]){_SECRET_WORD}$", re.IGNORECASE)
_RULES: tuple[tuple[str, Any], ...] = (  # a pattern, and what `re.sub` puts in its place
    # Matches name=value, name: value, "name": "value", JSON inside a string, and --name value.
    (
        rf"""(?i)((?:\b|_){_SECRET_WORD}\b\\*["']?\s*[=:]\s*)(?:(?:Bearer|Basic|Token)\s+)?"""
        r"""(?:\\*"[^"\\]*\\*"|\\*'[^'\\]*\\*'|[^\s"'}]*[^\s"'},])"""
        rf"|(--[\w-]*{_SECRET_WORD}[ =])\S+",
        lambda found: f"{found[1] or found[2]}{SECRET}",
    ),
    # Matches access tokens of well-known services, and long hexadecimal numbers.
    (
        r"\b(?:hf_[A-Za-z0-9]{20,}"
        r"|(?:gh[opusr]_|github_pat_|glpat-|sk-|xox[abp]-|wandb_v1_|AKIA|eyJ)[\w.-]{10,})"
        r"|\b[0-9a-f]{32,}\b",
        SECRET,
    ),
    (r"\b[a-z][a-z0-9+.-]*://[^\s'\",)\]}]+", ADDRESS),
    (r"\b[\w.+-]+@[\w.-]+\b", ADDRESS),
    (r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])", ADDRESS),
    (
        r"(?<![\w:.])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}"
        r"|[0-9a-f]{0,4}(?::[0-9a-f]{1,4})*::(?:[0-9a-f]{1,4}:?)+)(?![\w:])",
        ADDRESS,
    ),
    (r"\b[\w-]+(?:\.[\w-]+)*\.(?:com|net|org|io|cn|local|lan|internal|corp|svc)\b", HOST),
    (r"/(?:home|Users)/[^/\s'\",:]+", "~"),
)
_ADDRESSES = ("RAY_ADDRESS", "MASTER_ADDR", "HOSTNAME")  # Environment variables that name a host.


def write(
    path: Path, question: Question, findings: Sequence[Finding], run: Path | None = None
) -> None:
    """Write the bug report to a file."""
    config, log, run_versions = question.config or {}, ["no run was named"], {}
    if run is not None:
        info = RunFolder(run).read_starts()[-1]
        config, log, run_versions = info.config, list(_end_of_log(run)), dict(info.versions)
    settings = OmegaConf.to_yaml(OmegaConf.create(without_secrets(config))) if config else "none"
    sections = {
        "Versions": _rows(all_versions(question)),
        "Versions of the run": _rows(run_versions),
        "Made for": _rows({name: ", ".join(releases) for name, releases in MADE_FOR.items()}),
        "Doctor": "\n".join(to_text(f"{question.device} {question.experiment}".strip(), findings)),
        "Settings": settings,
        f"The last {LOG_LINES} lines of the log": "\n".join(log),
    }
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items() if body)
    hosts = {word for finding in findings for word in finding.node.split()}
    path.write_text(redact(text, hosts) + "\n", encoding="utf-8")


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a configuration without its secrets; a value is secret if its key names a secret."""
    if isinstance(value, Mapping):
        return {name: without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    return SECRET if value not in (None, "") and _SECRET_KEY.search(key) else value


def redact(text: str, hosts: Iterable[str] = ()) -> str:
    """Replace secrets, addresses, hosts, users and home folders in a text."""
    home = Path.home()
    if len(home.parts) > 1:  # in a container the home may be /
        text = re.sub(rf"{re.escape(str(home))}(?![\w.-])", "~", text)
    for pattern, put in _RULES:
        text = re.sub(pattern, put, text)
    names = {socket.gethostname(), *hosts, *(os.environ.get(name, "") for name in _ADDRESSES)}
    names |= {name.partition(":")[0] for name in names} | {name.split(".")[0] for name in names}
    text = _without(text, names - {"localhost", "auto"}, HOST)
    with suppress(OSError, KeyError):  # raised if the process's user has no name
        text = _without(text, {getpass.getuser()} - {"root"}, USER)
    return text


def _without(text: str, names: Iterable[str], put: str) -> str:
    for name in sorted({name for name in names if len(name) > 2}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", put, text)
    return text


def _end_of_log(run: Path) -> Iterable[str]:
    logs = [run / "log.txt"] if (run / "log.txt").is_file() else list(run.glob("*.log"))
    if not logs:
        return ["the run folder holds no log.txt"]
    newest = max(logs, key=lambda one: one.stat().st_mtime)
    with newest.open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in deque(file, maxlen=LOG_LINES)]


def _rows(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())
