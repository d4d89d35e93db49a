import json

import pytest

from sam_rollout.doctor import numba_check
from sam_rollout.doctor.probe import ProbeError


def answers(monkeypatch, *said):
    """What fresh interpreters print, one after the other."""
    waiting = iter(said)

    def run_python(_program, _environment=None):
        answer = next(waiting)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer)

    monkeypatch.setattr(numba_check, "run_python", run_python)
    return waiting


def warm_up(compiled=0, cache_path="/", problem="", seconds=1.0):
    return {
        "imports_s": 0.5,
        "seconds": seconds,
        "loaded": 3 - compiled,
        "compiled": compiled,
        "cache_path": cache_path,
        "problem": problem,
    }


def test_cold_and_warm_are_reported(monkeypatch, question, about):
    left = answers(monkeypatch, warm_up(3, seconds=4.2), warm_up(0, seconds=0.7), "more")
    lines = list(numba_check.check_warm_up(question))
    assert about(lines, "kernels").found.startswith("4.2 s to compile, 0.7 s when cached")
    assert about(lines, "kernel cache").status == "ok"
    assert next(left) == "more", "the first start on a machine is measured again"


def test_cached_kernels_are_loaded_once(monkeypatch, question, about):
    left = answers(monkeypatch, warm_up(0, seconds=0.7), "more")
    lines = list(numba_check.check_warm_up(question))
    assert about(lines, "kernels").found.startswith("0.7 s when cached")
    assert next(left) == "more"


def test_a_cache_that_cannot_be_used_is_a_warning(monkeypatch, question, about):
    problem = "RuntimeError: cannot cache function: no locator available"
    answers(monkeypatch, warm_up(3, "", problem))
    line = about(numba_check.check_warm_up(question), "kernel cache")
    assert line.status == "warn" and problem in line.found and "NUMBA_CACHE_DIR" in line.fix


def test_kernels_that_do_not_compile_fail(monkeypatch, question):
    answers(monkeypatch, ProbeError("python ended with status 1: ImportError: numba"))
    (line,) = numba_check.check_warm_up(question)
    assert line.status == "fail" and "ImportError: numba" in line.found


@pytest.mark.parametrize(
    ("machine", "triple", "status"),
    [
        ("aarch64", "aarch64-unknown-linux-gnu", "ok"),
        ("aarch64", "x86_64-unknown-linux-gnu", "fail"),
    ],
)
def test_llvmlite_has_to_be_this_machines(monkeypatch, question, about, machine, triple, status):
    monkeypatch.setattr(numba_check.platform, "machine", lambda: machine)
    answers(monkeypatch, ["0.47.0", triple, "tsv110"])
    assert about(numba_check.check_machine(question), "llvmlite").status == status


def test_settings_of_another_processor_are_named(monkeypatch, question, tmp_path):
    monkeypatch.setattr(numba_check.platform, "machine", lambda: "aarch64")
    there = tmp_path / "libjemalloc.so.2"
    there.touch()
    libraries = f"/usr/lib/x86_64-linux-gnu/libjemalloc.so.2:{there}:{tmp_path / 'gone.so'}"
    monkeypatch.setenv("LD_PRELOAD", libraries)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx512f")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    lines = list(numba_check.check_environment(question))
    assert [(line.what, line.status) for line in lines] == [
        ("NUMBA_DISABLE_JIT", "fail"),
        ("NUMBA_CPU_FEATURES", "warn"),
        ("LD_PRELOAD", "warn"),
        ("LD_PRELOAD", "warn"),
    ]
    assert "another machine" in lines[2].found and "gone.so" in lines[3].found
