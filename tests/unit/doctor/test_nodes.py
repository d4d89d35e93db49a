"""The comparison of nodes; a real cluster is asked in tests/integration."""

import pytest

from sam_rollout.doctor import Question, nodes

SAME = {"version of torch": "2.10.0", "path of the checkout": "/opt/sam", "devices": "16"}


def test_what_differs_is_named_with_its_nodes():
    (line,) = nodes.compare({"a": SAME, "b": dict(SAME)})
    assert line.status == "ok"
    known = {"a": SAME, "b": {**SAME, "version of torch": "2.9.0"}, "c": SAME}
    (line,) = nodes.compare(known)
    assert (line.status, line.what) == ("fail", "version of torch")
    assert line.found == "2.10.0 on a, c; 2.9.0 on b"
    assert list(nodes.compare({})) == []


@pytest.mark.parametrize("shared", [True, False])
def test_checkpoints_have_to_lie_where_all_nodes_see_them(tmp_path, monkeypatch, shared):
    """Each node of the test has a root of its own for what it does not share."""
    monkeypatch.setattr(nodes, "CHECKOUT", tmp_path)

    def ask(name, function, path, *arguments):
        root = tmp_path / ("all" if shared else name)
        return function(path.replace(str(tmp_path), str(root)), *arguments)

    asked = Question("cpu", {"trainer": {"default_local_dir": "checkpoints"}}, cluster=True)
    line = nodes.shared_checkpoints(asked, ["node0", "node1", "node2"], ask)
    assert line.status == ("ok" if shared else "fail")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the file is removed"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    where = {"default_local_dir": str(tmp_path / "file" / "checkpoints")}
    asked = Question("cpu", {"trainer": where}, cluster=True)
    line = nodes.shared_checkpoints(asked, ["a", "b"], lambda _, function, *a: function(*a))
    assert line.status == "fail" and "NotADirectoryError" in line.found


def test_the_digest_follows_the_code(question, monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "CHECKOUT", tmp_path)
    (tmp_path / "configs").mkdir()
    digests = set()
    for text in ("a: 1", "a: 2"):
        (tmp_path / "configs" / "x.yaml").write_text(text)
        digests.add(nodes.facts(question)["code and configs"])
    assert len(digests) == 2
