from sam_rollout.telemetry.progress import EngineProgress, progress_line, total

BUSY = EngineProgress(
    finished=37, running=12, waiting=3, tokens=5000, draft_requests=100, accepted_tokens=131,
    engines=1, drafting=1,
)  # fmt: skip
IDLE = EngineProgress(tokens=400, engines=1)


def test_the_line_says_where_all_engines_stand():
    before = total([EngineProgress(tokens=2992, engines=2)])
    assert progress_line(total([BUSY, IDLE]), before, elapsed_s=2.0) == (
        "rollout: 37 finished, 12 running, 3 waiting | 1,204 tokens/s | 1 of 2 engines drafting | "
        "acceptance length 2.31"
    )


def test_what_is_not_known_is_left_out():
    assert progress_line(IDLE, None, 0.0) == "", "nothing is in flight"
    line = progress_line(EngineProgress(running=1, tokens=10, engines=1), None, 0.0)
    assert line == "rollout: 0 finished, 1 running, 0 waiting | 0 of 1 engines drafting"
    drained = progress_line(EngineProgress(running=1, tokens=10, engines=1), BUSY, 1.0)
    assert "tokens/s" not in drained, "records were drained in between"
