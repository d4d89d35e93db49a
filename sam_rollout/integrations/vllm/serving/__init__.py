"""The front-end process of an engine: records of its steps, weight syncs, a dead engine."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = (
    "v1.engine.core_client:AsyncMPClient._call_utility_async",
    "model_executor.models.utils:AutoWeightsLoader._check_skipped_aliases",
)
