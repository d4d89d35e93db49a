"""The front-end process of an engine: records of its steps, weight syncs, a dead engine."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = (
    "v1.engine.core_client:AsyncMPClient._call_utility_async",
    "model_executor.models.utils:AutoWeightsLoader._check_skipped_aliases",
)
