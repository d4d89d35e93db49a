"""verl's request router, with siblings kept together.

verl has one router for all agent-loop workers, an actor that every request asks for its server. A
prompt's responses are all made by one worker, but only the router sees how much runs on a server;
so the rule runs there, and costs no call that verl does not make anyway. verl makes its router from
the YAML file that ``rollout.router_config_path`` names.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from sam_rollout.identity import TRAIN_SPLIT, VAL_SPLIT, RequestIdentity
from sam_rollout.integrations.verl.names import ROUTER_SETTINGS
from sam_rollout.routing import GroupRouter
from sam_rollout.sources.siblings import SiblingsSourceConfig

ROUTER_CLASS = "sam_rollout.integrations.verl.router.GroupLoadBalancer"


class GroupLoadBalancer(GlobalRequestLoadBalancer):
    """verl's router with the choice of a server left to `GroupRouter`.

    Requests whose id is known stay on their server, as with verl: later turns of a conversation,
    responses that go on after an interruption.

    Args:
        servers: Server address -> actor handle.
        settings: What `write_settings` wrote.
    """

    def __init__(self, servers: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(dict(servers))
        self._router = GroupRouter(
            servers,
            max_siblings_per_replica=settings["max_siblings_per_replica"],
            max_imbalance=settings["max_imbalance"],
        )
        self._siblings: Mapping[str, int] = settings["siblings"]
        # Of requests that run, by id: their group and server, more than once if one runs twice.
        self._running: dict[str, list[tuple[Any, str]]] = {}

    def require_acquire_fields(self) -> list[str]:
        """A request's identity travels in its sampling parameters."""
        return ["sampling_params"]

    def require_release_fields(self) -> list[str]:
        """To know the group of what ended."""
        return ["request_id"]

    def acquire_server(
        self, request_id: str, sampling_params: Mapping[str, Any] | None = None
    ) -> tuple[str, Any]:
        """Return the server of a request, and count the request there.

        Raises:
            RuntimeError: There is no server; in verl's words, which its clients wait for.
        """
        if not self._servers:
            raise RuntimeError("No available servers in load balancer")
        identity = RequestIdentity.from_extra_args((sampling_params or {}).get("extra_args"))
        group: Hashable = request_id
        siblings = 1
        if identity is not None:
            group = identity.group_key
            siblings = self._siblings.get(identity.split, 1)
        server = self._request_id_to_server.get(request_id)
        if server in self._servers:
            self._router.resume(group, server)
        else:
            server = self._router.assign(group, siblings)
            self._request_id_to_server[request_id] = server
        self._running.setdefault(request_id, []).append((group, server))
        self._inflight_requests[server] += 1
        return server, self._servers[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """A request has ended; nothing is to be done if its server has left since."""
        for group, server in self._running.get(request_id or "", []):
            if server == server_id:
                super().release_server(server_id)
                self._forget(str(request_id), group, server)
                break

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Servers joined; nothing runs there, on those that were known before no more."""
        self.remove_servers([server for server in servers if server in self._servers])
        super().add_servers(servers)
        for server in servers:
            self._router.add(server)

    def remove_servers(self, server_ids: list[str]) -> None:
        """Servers left; what ran there is asked for again by verl's clients."""
        super().remove_servers(server_ids)
        for server in server_ids:
            self._router.remove(server)
        # Their ends come late, perhaps when the server is back and runs others.
        lost = [
            (request_id, group, server)
            for request_id, places in self._running.items()
            for group, server in places
            if server in server_ids
        ]
        for request_id, group, server in lost:
            self._forget(request_id, group, server)

    def _forget(self, request_id: str, group: Any, server: str) -> None:
        self._router.finished(group, server)
        places = self._running[request_id]
        places.remove((group, server))
        if not places:
            del self._running[request_id]


def write_settings(config: DictConfig, siblings: SiblingsSourceConfig) -> None:
    """Write the file that verl makes our router from; nothing where it makes another.

    Must run in the process that verl makes the router in, before it does.
    """
    rollout = config.actor_rollout_ref.rollout
    path = Path(config.run_dir).absolute() / ROUTER_SETTINGS
    if rollout.router_config_path != str(path):
        return
    settings = {
        "router_class": ROUTER_CLASS,
        "max_siblings_per_replica": siblings.max_siblings_per_replica,
        "max_imbalance": siblings.max_imbalance,
        # Prompts of a data set may be stored several times over; what comes beyond is not expected.
        "siblings": {TRAIN_SPLIT: int(rollout.n), VAL_SPLIT: int(rollout.val_kwargs.n)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(settings), path)
