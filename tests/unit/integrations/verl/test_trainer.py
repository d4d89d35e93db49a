from types import SimpleNamespace

from sam_rollout.integrations.verl.trainer import SamTrainerSeparateAsync


def manager(rank: int) -> SimpleNamespace:
    replica = SimpleNamespace(replica_rank=rank, servers=[f"server {rank}"])
    return SimpleNamespace(get_replicas=lambda: [replica])


def test_records_are_collected_after_the_interruption_and_before_the_update(monkeypatch):
    events: list[str] = []

    def note(event, returned):
        return lambda *_: events.append(event) or returned

    one = object.__new__(SamTrainerSeparateAsync)
    one.standalone_checkpoint_manager = SimpleNamespace(
        abort_replicas=note("interrupted", None), update_weights=note("updated", {"changed": 0.5})
    )
    one.prev_step_profile = one._trains_head = False
    one.hybrid_rollout_config = SimpleNamespace(enable_switch=False)
    one.timing_raw, one.global_steps, one.total_training_steps = {}, 3, 9
    monkeypatch.setattr(SamTrainerSeparateAsync, "_drain", note("drained", {"sam/x": 2.0}))
    one.on_step_end()
    assert events == ["interrupted", "drained", "updated"]
    assert one._consume_sync_metrics() == {"changed": 0.5, "sam/x": 2.0}
    assert "update_weights" in one.timing_raw


def test_engines_on_both_kinds_of_devices_are_asked():
    one = object.__new__(SamTrainerSeparateAsync)
    one.llm_server_manager, one.standalone_server_manager = manager(0), manager(1)
    assert one._servers() == {0: "server 0", 1: "server 1"}
