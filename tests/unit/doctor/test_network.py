import socket

import pytest

from sam_rollout.doctor import Question, network
from sam_rollout.doctor.network import matching

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth01": "10.0.1.7", "docker0": "", "enp1": ""}


@pytest.fixture
def taken():
    """A port on which a server of this process listens."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_names_its_owner(taken, monkeypatch, question):
    monkeypatch.setattr(network, "RAY_PORTS", {taken: "Ray"})
    (line,) = network.check_ray_ports(question)
    assert line.status == "warn" and "pytest" in line.found
    (line,) = network.check_ray_ports(Question("cpu", cluster=True))
    assert line.status == "fail"


def test_a_port_that_is_rays_is_right(taken, monkeypatch, question):
    monkeypatch.setattr(network, "RAY_PORTS", {taken: "Ray"})
    own = "/x/site-packages/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray"
    for owner, status in ((own, "ok"), ("ray::IDLE", "ok"), ("python my/ray/array.py", "warn")):
        monkeypatch.setattr(network, "owner_of", lambda _, owner=owner: owner)
        (line,) = network.check_ray_ports(question)
        assert line.status == status, owner


def test_a_free_port(monkeypatch, question, taken):
    monkeypatch.setattr(network, "is_free", lambda port: True)
    assert [line.status for line in network.check_ray_ports(question)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("given", "selected"),
    [
        ("eth0", ["eth0", "eth01"]),
        ("=eth0", ["eth0"]),
        ("eth0,enp", ["eth0", "eth01", "enp1"]),
        ("^docker,lo", ["eth0", "eth01", "enp1"]),
        ("^=eth0", ["lo", "eth01", "docker0", "enp1"]),
        ("bond0", []),
    ],
)
def test_names_of_interfaces(given, selected):
    assert matching(given, ADDRESSES) == selected


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ("eth0", "ok", "eth0 10.0.0.7"),
        ("enp1", "fail", "has no address"),
        ("bond0", "fail", "does not exist"),
        ("", "skip", "not needed on one node"),
    ],
)
def test_interfaces_must_have_an_address(monkeypatch, question, given, status, said):
    monkeypatch.setattr(network, "interface_addresses", lambda: ADDRESSES)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    (line,) = network.check_interfaces(question)
    assert line.status == status and said in line.found


def test_many_nodes_should_name_them(monkeypatch):
    for name in network.INTERFACE_VARIABLES["ascend_910c"]:
        monkeypatch.delenv(name, raising=False)
    lines = network.check_interfaces(Question("ascend_910c", {"trainer": {"nnodes": 2}}))
    assert [line.status for line in lines] == ["warn"] * 3


def test_this_machine_has_its_loopback():
    assert network.interface_addresses()["lo"] == "127.0.0.1"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    (tmp_path / "ip_local_port_range").write_text("32768\t60999\n")
    monkeypatch.setattr(network, "KERNEL", tmp_path)
    monkeypatch.setattr(network, "is_free", lambda port: True)
    return lambda reserved: (tmp_path / "ip_local_reserved_ports").write_text(reserved)


@pytest.mark.parametrize(
    ("given", "reserved", "status"),
    [
        ("auto", "\n", "ok"),
        ("60000-60050", "\n", "warn"),
        ("60000-60050", "8080,60000-60050\n", "ok"),
        ("61000-61050", "\n", "ok"),
        ("60000-60003", "60000-60050\n", "fail"),  # fewer than processes
        ("60000", "\n", "fail"),
    ],
)
def test_ports_of_hccl(kernel, monkeypatch, given, reserved, status):
    kernel(reserved)
    monkeypatch.setenv(network.HCCL_RANGE, given)
    question = Question("ascend_910c", {"trainer": {"n_gpus_per_node": 16}})
    (line,) = network.check_hccl_ports(question)
    assert line.status == status


def test_ports_of_hccl_that_are_taken(kernel, monkeypatch):
    kernel("60000-60050")
    monkeypatch.setattr(network, "is_free", lambda port: port >= 60040)
    monkeypatch.setenv(network.HCCL_RANGE, "60000-60050")
    question = Question("ascend_910c", {"trainer": {"n_gpus_per_node": 16}})
    (line,) = network.check_hccl_ports(question)
    assert line.status == "fail" and "40 of 51 are taken" in line.found


@pytest.mark.parametrize(
    ("version", "nodes", "status"),
    [(None, 2, "skip"), ("2.48.0", 2, "warn"), ("2.48.0", 1, "ok"), ("2.52.0", 2, "ok")],
)
def test_a_ray_without_tokens(monkeypatch, version, nodes, status):
    monkeypatch.setattr(network, "installed", lambda _: version)
    question = Question("cpu", {"trainer": {"nnodes": nodes}})
    (line,) = network.check_ray_token(question)
    assert line.status == status and ("knows none" in line.found) == (version == "2.48.0")
