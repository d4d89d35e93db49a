"""Contains classes that vLLM's worker processes import by name in tests of several engines."""

from typing import Any

from sam_rollout.config import GateConfig
from sam_rollout.gating import make_gate
from sam_rollout.integrations.vllm.worker import SamWorkerExtension
from tests.integration.cpu_experts import add_missing_parts

EXTENSION = "tests.integration.group_probe.GroupProbe"

add_missing_parts()


class GroupProbe(SamWorkerExtension):
    def use_gate(self, config: dict[str, Any]) -> None:
        drafter = self.model_runner.drafter
        drafter.session.gate = make_gate(
            GateConfig.from_mapping(config),
            drafter._limits._replace(k=drafter.config.max_draft_tokens),
            drafter.exchange,
        )
        self._budgets: dict[int, tuple[int, int]] = {}
        self._drafts: dict[int, int] = {}
        decide, gate = drafter.session.gate.next_budget, drafter.session.gate

        def next_budget(step: Any, **options: bool) -> int:
            budget = decide(step, **options)
            self._budgets[drafter.exchange.received()[0]] = len(step.verified.sampled), budget
            return budget

        gate.next_budget = next_budget
        runner = self.model_runner
        execute = type(runner).execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = scheduler_output.scheduled_spec_decode_tokens.values()
            if scheduler_output.total_num_scheduled_tokens:
                self._drafts[drafter.exchange.received()[0]] = max(map(len, drafts), default=0)
            return execute(runner, scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def notes(self) -> dict[str, dict[int, Any]]:
        return {"budgets": self._budgets, "drafts": self._drafts}
