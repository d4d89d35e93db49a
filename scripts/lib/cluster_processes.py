"""The processes of a cluster on this node: found again by what they carry, ended one by one.

Every process a node starts inherits an environment variable that names its cluster, and writes its
log into the cluster's folder; vLLM's engines and Ray's daemons do, too. So what is left of an
earlier run can be told from other people's Ray, other clusters of the same user, and everything
else. One sign is not enough: who changes its title, as Ray's workers do, loses its environment.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import psutil
from cluster_identity import ClusterError

MARK = "SAM_ROLLOUT_CLUSTER"
TERMINATE_S = 10.0  # between asking a process to end and ending it


def of_cluster(folder: Path) -> list[psutil.Process]:
    """Processes of the cluster with this folder, this process and its parents left out."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and _carries(process, folder):
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def _carries(process: psutil.Process, folder: Path) -> bool:
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    if process.environ().get(MARK) == str(folder):
        return True
    return any(Path(file.path).is_relative_to(folder) for file in process.open_files())


def end(processes: Iterable[psutil.Process], patience_s: float = 0.0) -> None:
    """End processes: after ``patience_s`` they are asked to, after ``TERMINATE_S`` more made to."""
    _, alive = psutil.wait_procs(list(processes), timeout=patience_s)
    for ask, wait_s in (
        (psutil.Process.terminate, TERMINATE_S),
        (psutil.Process.kill, TERMINATE_S),
    ):
        for process in alive:
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(alive, timeout=wait_s)


def refuse_others(folder: Path) -> None:
    """Make sure that a cluster's folder is this user's: everybody can make one of its name in /tmp.

    Raises:
        ClusterError: It is another user's, or no folder.
        FileNotFoundError: There is none.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ClusterError(f"{folder} is not ours: remove it, or choose another --port")


class Claim:
    """The right to run a cluster in a folder, held as long as this process lives.

    Raises:
        ClusterError: Another process holds it, or the folder is another user's.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            refuse_others(folder)
            folder.chmod(0o700)
        self._file = (folder / "supervisor.pid").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                f"a run of ours with this port is under way here (process {holder(folder)}): wait "
                "for it, end it with scripts/node.sh stop, or choose another --port"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()


def holder(folder: Path) -> int | None:
    """Process that holds the claim to a folder; None if nobody does.

    Raises:
        ClusterError: The folder is another user's.
    """
    try:
        refuse_others(folder)
        file = (folder / "supervisor.pid").open("r+")
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read() or 0)
    return None


def listener(port: int) -> str:
    """Who listens on a port of this machine, in words."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                if connection.pid is None:
                    return "another user's program"
                name = " ".join(psutil.Process(connection.pid).cmdline())[:100]
                return f"process {connection.pid} ({name})"
    except psutil.Error:  # it ended meanwhile, or may not be asked about
        pass
    return "another program"
