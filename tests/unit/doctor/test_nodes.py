from sam_rollout.doctor import nodes
from sam_rollout.doctor.scope import Question

CPU = Question("cpu")
SAME = {"version of torch": "2.10.0", "path of the package": "/opt/sam", "devices": "16"}


def test_what_differs_is_named_with_its_nodes():
    (line,) = nodes.compare({"a": SAME, "b": dict(SAME)})
    assert line.status == "ok"
    known = {"a": SAME, "b": {**SAME, "version of torch": "2.9.0"}, "c": SAME}
    (line,) = nodes.compare(known)
    assert (line.status, line.what) == ("fail", "version of torch")
    assert line.found == "2.10.0 on a, c; 2.9.0 on b"
    assert list(nodes.compare({})) == []


def test_checkpoints_have_to_lie_where_all_nodes_see_them(tmp_path):
    with nodes.marked(str(tmp_path / "checkpoints")) as marker:
        seen = nodes.facts(CPU, marker)
        blind = nodes.facts(CPU, marker.replace("doctor", "other"))
    (line,) = nodes.compare({"node0": seen, "node1": seen, "node2": blind})
    assert (line.status, line.what) == ("fail", "folder of checkpoints")
    assert "on node2" in line.found and str(tmp_path) in line.found
    assert not [*(tmp_path / "checkpoints").iterdir()], "the file is removed"


def test_the_digest_follows_the_code(monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "recipe_folder", lambda: tmp_path)
    (tmp_path / "configs").mkdir()
    digests = set()
    for text in ("a: 1", "a: 2"):
        (tmp_path / "configs" / "x.yaml").write_text(text)
        digests.add(nodes.facts(CPU)["code and configs"])
    assert len(digests) == 2
