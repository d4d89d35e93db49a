"""The processes of a cluster on this node: found again by what they carry, ended one by one.

Every process a node starts inherits an environment variable that names its cluster, and writes its
log into the cluster's folder; vLLM's engines and Ray's daemons do, too. So what is left of an
earlier run can be told from other people's Ray, other clusters of the same user, and everything
else. One sign is not enough: Ray's workers change their titles, and so lose their environments.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import psutil
from cluster_common import ClusterError

MARK = "SAM_ROLLOUT_CLUSTER"
TERMINATE_S = 10.0  # between asking a process to end and ending it


def of_cluster(folder: Path) -> list[psutil.Process]:
    """Processes of the cluster with this folder, this process and its parents left out."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == str(folder) or any(
                Path(file.path).is_relative_to(folder) for file in process.open_files()
            ):
                found.append(process)
    return found


def end_all(processes: Iterable[psutil.Process], patience_s: float = 0.0) -> None:
    """End processes: after ``patience_s`` they are asked to, after ``TERMINATE_S`` more made to."""
    _, alive = psutil.wait_procs(list(processes), timeout=patience_s)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(process)
        _, alive = psutil.wait_procs(alive, timeout=TERMINATE_S)


def end(process: subprocess.Popen, patience_s: float) -> None:
    """End a child, which ends its own children if it is given the time."""
    process.terminate()
    try:
        process.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def claim(folder: Path) -> TextIO:
    """Take the right to run a cluster in a folder, which lasts as long as the file is open.

    Raises ClusterError if another process holds it, or if the folder is another user's.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()  # everybody can make a folder of this name in /tmp
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ClusterError(f"{folder} is not ours: remove it, or choose another --port")
    file = (folder / "supervisor.pid").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ClusterError(
            f"a run of ours with this port is under way here (process {file.read()}): wait for it, "
            "end that process, or choose another --port"
        ) from None
    folder.chmod(0o700)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
