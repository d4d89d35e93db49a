import pickle

from sam_rollout.doctor import Question

CONFIG = {
    "trainer": {"nnodes": 2, "max_actor_ckpt_to_keep": None},
    "environment": {"A": 1, "B": "b"},
}


def test_settings_by_path():
    question = Question("cpu", CONFIG)
    assert question.setting("trainer.nnodes") == 2
    assert question.setting("trainer.max_actor_ckpt_to_keep", 0) == 0, "unset is not a value"
    assert question.setting("trainer.nnodes.more", "default") == "default"
    assert Question("cpu").setting("trainer.nnodes", 1) == 1


def test_the_shells_variables_win(monkeypatch):
    monkeypatch.setenv("A", "shell")
    monkeypatch.delenv("B", raising=False)
    environment = Question("cpu", CONFIG).environment
    assert (environment["A"], environment["B"]) == ("shell", "b")


def test_many_nodes():
    assert Question("cpu", CONFIG).many_nodes and Question("cpu", cluster=True).many_nodes
    assert not Question("cpu").many_nodes


def test_a_question_travels():
    question = Question("cpu", CONFIG, "tiny_cpu", cluster=True)
    assert pickle.loads(pickle.dumps(question)) == question
