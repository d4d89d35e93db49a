"""The comparison of nodes; a real cluster is asked in tests/integration."""

import dataclasses

import pytest

from sam_rollout.doctor import Question, nodes
from sam_rollout.doctor.nodes import CHECKOUT, Facts, compare, facts

SAME = Facts({"torch": "2.10.0", "ray": "2.60.0"}, "aarch64", "/opt/sam", "abc", "1234567", 16)
NPUS = Question("ascend_910c", cluster=True)


def statuses(*nodes: Facts, question=NPUS):
    known = {f"node{n}": node for n, node in enumerate(nodes)}
    return {line.what: line for line in compare(question, known)}


def test_equal_nodes_are_right():
    lines = statuses(SAME, SAME, SAME)
    assert {line.status for line in lines.values()} == {"ok"}
    assert list(compare(NPUS, {})) == []


def test_what_differs_is_named_with_its_nodes():
    other = dataclasses.replace(
        SAME, versions={"torch": "2.9.0", "ray": "2.60.0"}, sources="abd", checkout="/opt/other"
    )
    lines = statuses(SAME, SAME, other, dataclasses.replace(SAME, devices=8, machine="x86_64"))
    assert {what for what, line in lines.items() if line.status == "fail"} == {
        "version of torch", "code and configs", "path of the checkout", "machine", "devices",
    }  # fmt: skip
    assert lines["version of torch"].found == "2.10.0 on node0, node1, node3; 2.9.0 on node2"


def test_the_same_code_of_another_commit_is_right():
    """A checkout without git, or a commit that touched only documents."""
    lines = statuses(SAME, dataclasses.replace(SAME, commit=""))
    assert lines["code and configs"].status == "ok"


def test_devices_of_cpus_are_not_compared():
    assert "devices" not in statuses(SAME, question=Question("cpu"))


@pytest.mark.parametrize("shared", [True, False])
def test_checkpoints_have_to_lie_where_all_nodes_see_them(tmp_path, shared):
    """Each node of the test has a root of its own for what it does not share."""
    folder = "checkpoints/of/a/run"

    def ask(name, function, path, *arguments):
        root = tmp_path / ("all" if shared else name)
        root.mkdir(exist_ok=True)
        assert path == str(nodes.CHECKOUT / folder)
        return function(str(root / folder), *arguments)

    asked = Question("cpu", {"trainer": {"default_local_dir": folder}}, cluster=True)
    line = nodes.shared_checkpoints(asked, ["node0", "node1", "node2"], ask)
    assert line.status == ("ok" if shared else "fail")
    assert ("of node0 is not that of node1, node2" in line.found) == (not shared)
    assert not [path for path in tmp_path.rglob("*") if path.parent != tmp_path], "all is removed"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    where = {"default_local_dir": str(tmp_path / "file" / "checkpoints")}
    asked = Question("cpu", {"trainer": where}, cluster=True)
    line = nodes.shared_checkpoints(asked, ["a", "b"], lambda _, function, *a: function(*a))
    assert line.status == "fail" and "NotADirectoryError" in line.found


def test_the_facts_of_this_machine(question):
    here = facts(question)
    assert here == facts(question)
    assert here.checkout == str(CHECKOUT) and here.versions["sam_rollout"]


def test_the_digest_follows_the_code(question, monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "CHECKOUT", tmp_path)
    (tmp_path / "configs").mkdir()
    digests = set()
    for text in ("a: 1", "a: 2"):
        (tmp_path / "configs" / "x.yaml").write_text(text)
        digests.add(facts(question).sources)
    assert len(digests) == 2
