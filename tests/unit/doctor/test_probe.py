import sys

import pytest

from sam_rollout.doctor.probe import ProbeError, run, run_python


def test_what_a_program_prints(tmp_path, monkeypatch):
    assert run(["echo", "yes"]) == "yes\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise RuntimeError('not from the working directory')")
    assert run_python("import json; print('loading...'); print(json.dumps([1]))") == "[1]"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-program"], "no-such-program: No such file or directory"),
        (["sleep", "60"], "sleep did not answer in 0 s"),
        (["bash", "-c", "echo first >&2; echo last >&2; exit 3"], "ended with status 3: last"),
        ([sys.executable, "-c", "import os; os.abort()"], "ended with status -6: no message"),
    ],
)
def test_why_a_program_does_not_answer(command, said):
    with pytest.raises(ProbeError, match=said):
        run(command, limit_s=0.2 if command[0] == "sleep" else 60)
