"""The upstream names that we rely on, one row each.

A row says what must hold for a name of vLLM, vLLM-Ascend, verl or Megatron-Core, and why.
``test_upstream.py`` checks each row against the sources of each version.

A table maps a module to its names, and each name to the reason; ``module:name`` is a module with
one name.

* Brackets after a function have the arguments that we pass or that our override declares. The
  function must accept them in this order, and may require no others.
* Brackets after a class have its bases.
* Code after the reason must occur in the body, in any formatting.
"""

from dataclasses import dataclass

from sam_rollout.core.upstream import MADE_FOR

VLLM_CPU_INSTALLED = MADE_FOR["vllm"][-1]
SUPPORTED_VERSIONS = {
    **{package: tuple(releases) for package, releases in MADE_FOR.items()},
    "megatron": ("0.12", "0.16"),  # 0.12 with MindSpeed, 0.16 in tests/integration
}
# Releases that the plugin refuses; only the names that it wraps are checked.
PROBED_ASCEND = ("0.24", "0.25", "0.26")
# Releases that we have never run; all names are checked.
PROBED_VLLM = ("0.29", "0.30")
ASCEND_VERSIONS = (*SUPPORTED_VERSIONS["vllm_ascend"], *PROBED_ASCEND)

Reason = str | tuple[str, ...]
Table = dict[str, Reason | dict[str, Reason]]


@dataclass(frozen=True)
class Row:
    package: str  # import name: vllm, vllm_ascend, verl or megatron
    module: str  # below the package
    name: str  # function, variable, Class or Class.member
    why: str
    parameters: tuple[str, ...] | None = None
    contains: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    # Members that implementations must define.
    abstract: tuple[str, ...] | None = None
    versions: tuple[str, ...] = ()  # default: all supported and probed ones

    def supported_versions(self) -> tuple[str, ...]:
        probed = PROBED_VLLM if self.package == "vllm" else ()
        return self.versions or (*SUPPORTED_VERSIONS[self.package], *probed)


def rows(package: str, table: Table, versions: tuple[str, ...] = ()) -> list[Row]:
    found = []
    for place, names in table.items():
        module, _, alone = place.partition(":")
        for signature, reason in (names if isinstance(names, dict) else {alone: names}).items():
            why, *code = (reason,) if isinstance(reason, str) else reason
            name, brackets, inside = signature.removesuffix(")").partition("(")
            given = tuple(inside.split(", ")) if inside else ()
            is_class = "." not in name and name[0].isupper()
            found.append(
                Row(
                    package,
                    module,
                    name,
                    why,
                    parameters=given if brackets and not is_class else None,
                    contains=tuple(code),
                    bases=given if is_class else (),
                    versions=versions,
                )
            )
    return found


def members(owner: str, why: str, *names: str) -> dict[str, Reason]:
    """Return a table of members of one class with the same reason."""
    return {f"{owner}.{name}": why for name in names}


# fmt: off
VLLM_SAMPLERS: Table = {
    "v1.worker.gpu_model_runner": {
        "GPUModelRunner._sample(logits, spec_decode_metadata)": (
            "runner.sampler draws where there are no drafts, runner.rejection_sampler verifies",
            "self.sampler(logits=logits, sampling_metadata=sampling_metadata)",
            "self.rejection_sampler(spec_decode_metadata, draft_probs, logits, sampling_metadata)"),
        "GPUModelRunner.positions": "of every scheduled token; random numbers follow from it",
        "GPUModelRunner._prepare_inputs": (
            "without drafts the last scheduled token of each request is sampled from",
            "logits_indices = query_start_loc[1:] - 1"),
        "GPUModelRunner.query_start_loc": "where each request's scheduled tokens begin",
    },
    "v1.sample.sampler": {
        "Sampler.sample": (
            "what draws is the member topk_topp_sampler, after temperature and min-p",
            "self.topk_topp_sampler(logits, sampling_metadata.generators, "
            "sampling_metadata.top_k, sampling_metadata.top_p)"),
        "Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)":
            "log-probabilities and ranks as the engine returns them",
        "Sampler.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)":
            "the rules on logits of bonus rows",
    },
    "v1.sample.rejection_sampler": {
        "RejectionSampler.apply_logits_processors(logits, sampling_metadata, metadata)":
            "the rules on logits of draft rows",
        "RejectionSampler.forward(metadata, draft_probs, logits, sampling_metadata)":
            "our subclass is called the same way",
    },
    "v1.sample.logits_processor.builtin:"
    "MinTokensLogitsProcessor.apply_with_spec_decode(logits, num_draft_tokens)":
        "a row of a draft at a time, and of a bonus token as of one draft more",
    "v1.sample.ops.topk_topp_sampler:apply_top_k_top_p(logits, k, p)": (
        "the cuts of both our samplers; on GPUs by the function that it calls for many rows",
        "return apply_top_k_top_p_triton(logits, k, p)"),
    "v1.spec_decode.metadata": {
        "SpecDecodeMetadata.logits_indices": "the scheduled token of each row in a verify step",
        "SpecDecodeMetadata.cu_num_draft_tokens": "per request: rows of drafts, then the bonus row",
        "SpecDecodeMetadata.num_draft_tokens": "rows of each request, for engines led along texts",
    },
    "v1.engine.output_processor:OutputProcessor.process_outputs": (
        "tokens of a step are read first, then their log-probabilities, from the same output",
        "new_token_ids = engine_core_output.new_token_ids",
        "req_state.logprobs_processor.update_from_output(engine_core_output)"),
    "v1.engine.detokenizer:BaseIncrementalDetokenizer.update(new_token_ids, stop_terminated)":
        "looks for stop strings; we hand it one token at a time",
    "v1.engine.logprobs:LogprobsProcessor.update_from_output(output)": "cut like the tokens",
    "v1.outputs:LogprobsLists.slice_request(req_idx, num_positions)": "of one request, to cut them",
    "sampling_params:SamplingParams._validate_spec_decode": (
        "requests that we cannot verify are refused, by vLLM or by our wrapper",
        "self.min_p > _SAMPLING_EPS or self.logit_bias"),
    "v1.sample.logits_processor:build_logitsprocs": (
        "custom logits processors are refused under speculation",
        "raise ValueError(STR_SPEC_DEC_REJECTS_LOGITSPROCS)"),
    "v1.worker.gpu_input_batch:InputBatch.refresh_metadata": (
        "logits processors follow rows that join, move and leave",
        "self.logitsprocs.all",
        "logit_proc.update_state(batch_update)"),
}

VLLM_PROPOSER: Table = {
    "config.speculative": {
        "SpeculativeConfig.__post_init__": (
            "method='custom_class' is how our proposer gets in",
            "self.method == 'custom_class'"),
        "SpeculativeConfig.num_speculative_tokens": "upper bound of a draft",
    },
    "v1.spec_decode.custom_class_proposer:create_custom_proposer(vllm_config)": (
        "our class is made with the VllmConfig as its only argument",
        "user_class(vllm_config)",
        "backend = spec_config.model"),
    "v1.worker.gpu_model_runner": {
        "GPUModelRunner.__init__": (
            "the proposer is found as model_runner.drafter",
            "self.drafter = create_custom_proposer(self.vllm_config)"),
        "GPUModelRunner.propose_draft_token_ids": (
            "the arguments of SamProposer.propose: three positional, slot_mappings by name",
            "spec_config.method == 'custom_class'",
            "cast(Any, self.drafter).propose(sampled_token_ids, "
            "self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, "
            "slot_mappings=slot_mappings)"),
        "GPUModelRunner.take_draft_token_ids()": (
            "drafts are a list of token lists, empty where a row has none",
            "DraftTokenIds(req_ids, draft_token_ids)"),
        "GPUModelRunner.load_model": (
            "on accelerators load_model of a proposer is optional",
            "hasattr(self.drafter, 'load_model')",
            "self.drafter.load_model(self.model)"),
        "GPUModelRunner.requests": "tells ended requests from preempted ones, whose state is kept",
    },
    "v1.worker.cpu_model_runner:CPUModelRunner.load_model": (
        "on CPU load_model of a proposer is called whether it has one or not",
        "hasattr(self, 'drafter')",
        "self.drafter.load_model(self.model)"),
    "v1.worker.gpu_input_batch": {
        "InputBatch.req_ids": "rows of the batch are mapped to requests",
        "InputBatch.num_tokens_no_spec": "number of known tokens of each row",
        "InputBatch.token_ids_cpu": (
            "tokens of each row, read to catch up after skipped steps",
            "self.token_ids_cpu_tensor.numpy()"),
        "CachedRequestState.sampling_params": "extra_args carry a request's identity to the worker",
    },
    "distributed.parallel_state": {
        **dict.fromkeys(
            ("get_tp_group()", "get_pp_group()"), "drafting state is kept on the output rank only"),
        "GroupCoordinator.rank_in_group": "rank 0 of the tensor-parallel group is the output rank",
        "GroupCoordinator.is_last_rank": "the last pipeline stage samples",
    },
}

VLLM_LATE_BINDING: Table = {
    "config.vllm:VllmConfig.__post_init__": (
        "wrapped: our method joins the list; when vLLM asks the proposer, the wrapper can go",
        "self.speculative_config.method not in get_args(NgramGPUTypes)",
        "self.scheduler_config.async_scheduling = True"),
    "config.scheduler:SchedulerConfig.get_scheduler_cls": (
        "our scheduler is named in scheduler_cls",
        "resolve_obj_by_qualname(self.scheduler_cls)"),
    "v1.core.sched.async_scheduler": {
        "AsyncScheduler(Scheduler)": "base of our scheduler",
        "AsyncScheduler._update_after_schedule(scheduler_output)": (
            "overridden: a step is given as many places for drafts as we say",
            "request.spec_token_ids = self._spec_token_placeholders"),
    },
    "v1.core.sched.scheduler": {
        "Scheduler.update_from_output(scheduler_output, model_runner_output)": (
            "overridden: reads the worker's note; what was not accepted is given back",
            "request.num_computed_tokens -= num_rejected",
            "num_invalid_spec_tokens=scheduler_output.num_invalid_spec_tokens"),
        "Scheduler.make_spec_decoding_stats(spec_decoding_stats, num_draft_tokens, "
        "num_accepted_tokens, num_invalid_spec_tokens, request_id)": (
            "overridden: places without a draft are no drafts",
            "num_draft_tokens -= num_invalid_spec_tokens.get(request_id, 0)"),
    },
    "v1.core.sched.output": {
        **members(
            "SchedulerOutput", "replaced in the worker's copy of a step", "num_scheduled_tokens",
            "total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "scheduled_cached_reqs"),
        "SchedulerOutput.finished_req_ids": "what they sampled last is nobody's",
        "SchedulerOutput.has_structured_output_requests": "these get no drafts",
        "CachedRequestData.num_computed_tokens": "replaced in the worker's copy of a step",
        "CachedRequestData.resumed_req_ids": "their lengths are the scheduler's",
    },
    "v1.worker.gpu_model_runner": {
        "GPUModelRunner.execute_model(scheduler_output, intermediate_tensors)": (
            "wrapped: drafts are bound before a step is prepared",
            "self._update_states(scheduler_output)"),
        "GPUModelRunner.sample_tokens(grammar_output)": (
            "wrapped: what it returns is kept until its tokens have arrived",
            "= self.execute_model_state",
            "self.input_batch.prev_sampled_token_ids = None",
            "AsyncGPUModelRunnerOutput("),
        "GPUModelRunner._bookkeeping_sync(scheduler_output, sampler_output, logits, hidden_states, "
        "num_scheduled_tokens)": (
            "wrapped; it writes one placeholder a row, whatever was verified",
            "if self.input_batch.prev_sampled_token_ids is None:",
            "sampled_ids = [-1] if req_idx not in invalid_req_indices_set else None"),
        "GPUModelRunner._model_forward(input_ids, positions, intermediate_tensors, "
        "inputs_embeds)":
            "wrapped: drafts are written into the input right before it",
        "GPUModelRunner._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)": (
            "wrapped: tells where drafts belong in the input; it has read them too early",
            "draft_token_ids = self.input_ids.gpu[logits_indices]",
            "draft_token_ids[target_logits_indices + 1]"),
        "GPUModelRunner._copy_valid_sampled_token_count(next_token_ids, "
        "valid_sampled_tokens_count)": (
            "called with what a drafter on the device would tell",
            "self.valid_sampled_token_count_gpu = valid_sampled_tokens_count",
            "self.input_batch.prev_sampled_token_ids = next_token_ids.unsqueeze(1)"),
        "GPUModelRunner._prepare_inputs": (
            "puts positions right on the device",
            "update_num_computed_tokens_for_batch_change("),
        "GPUModelRunner.num_spec_tokens": "k",
        "GPUModelRunner.input_ids": "what the forward pass reads",
        "GPUModelRunner._get_draft_token_ids_cpu": (
            "asked for drafts of the device only where there are request ids for them",
            "self._draft_token_req_ids"),
        "GPUModelRunner._preprocess": (
            "embeds inputs other than text too early: such engines schedule synchronously",
            "self.supports_mm_inputs",
            "self.enable_prompt_embeds"),
        "GPUModelRunner._update_states": (
            "drafts that were not followed to their end count as accepted",
            "if req_state.prev_num_draft_len and self.use_async_scheduling:",
            "self.input_batch.num_computed_tokens_cpu[req_index] = num_computed_tokens"),
        "GPUModelRunner._prepare_input_ids": (
            "without sampled tokens on the device the host's arrays are what is computed",
            "if self.input_batch.prev_sampled_token_ids is None:",
            "if self._draft_token_ids is None or not spec_flattened_indices"),
        "AsyncGPUModelRunnerOutput.sampled_token_ids_cpu": "a step's tokens, once they arrived",
        "AsyncGPUModelRunnerOutput.async_copy_ready_event": "has happened when they did",
        "AsyncGPUModelRunnerOutput._invalid_req_indices": "rows that were not sampled",
        "AsyncGPUModelRunnerOutput._model_runner_output": "carries our note to the scheduler",
    },
    "v1.engine.core:EngineCore.step_with_batch_queue": (
        "one step ahead: a step is scheduled when the output of the last but one was processed",
        "len(batch_queue) < self.batch_queue_size",
        "self.scheduler.update_from_output(scheduler_output, model_output)"),
    "v1.request": {
        "Request.use_structured_output": "such requests get no places",
        "Request.spec_token_ids": "places of the next step",
    },
    "config.model": members(
        "ModelConfig", "schedules synchronously", "is_hybrid", "uses_mrope", "is_multimodal_model",
        "enable_prompt_embeds"),
    "v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.min_toks":
        "counts tokens on the host: no step is prepared ahead",
    "v1.worker.gpu_input_batch": {
        "InputBatch.prev_req_id_to_index": "rows whose input is on the device",
        "InputBatch.is_token_ids": "written with the tokens",
        "InputBatch.req_id_to_index": "rows of a batch that changed",
        "CachedRequestState.prev_num_draft_len": "set to 0 when drafts were followed to their end",
        "InputBatch.update_req_spec_token_ids": (
            "bound drafts are written behind the text",
            "request.prev_num_draft_len = num_spec_tokens"),
        "InputBatch.update_async_output_token_ids": (
            "asks for rows of the last step only where its tokens are kept",
            "if self.sampled_token_ids_cpu is None"),
    },
    "distributed.parallel_state:GroupCoordinator.broadcast_object(obj, src)":
        "drafts of the first rank reach the others before they prepare the step",
}

VLLM_ENGINE_DRAFTER: Table = {
    "v1.worker.gpu_model_runner": {
        "GPUModelRunner.propose_draft_token_ids(scheduler_output, sampled_token_ids, "
        "sampling_metadata, hidden_states, sample_hidden_states, aux_hidden_states, "
        "spec_decode_metadata, common_attn_metadata, slot_mappings)": (
            "wrapped: asked once a step, for as many tokens as its schedule says",
            "= scheduler_output.num_spec_tokens_to_schedule",
            "num_speculative_tokens=num_spec_tokens_to_schedule",
            "self._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)",
            "target_token_ids = self.input_ids.gpu[:total_num_tokens]"),
        "GPUModelRunner.sample_tokens(grammar_output)": (
            "wrapped: what it returns is booked; without room for the drafter it is not asked",
            "= self.execute_model_state",
            "self._draft_token_ids = self.propose_draft_token_ids(",
            "if input_fits_in_drafter:",
            # With asynchronous scheduling it proposes before the tokens are copied.
            "self.valid_sampled_token_count_gpu = None",
            "propose_draft_token_ids(sampled_token_ids)"),
        "AsyncGPUModelRunnerOutput.__init__": (
            "what was copied to the host before is there when what was sampled is",
            "default_stream = torch.cuda.current_stream()",
            "async_output_copy_stream.wait_stream(default_stream)",
            "self.async_copy_ready_event.record()"),
        "GPUModelRunner._build_attention_metadata": (
            "rows of drafts are those of the batch, whatever a graph is filled up with",
            "spec_decode_common_attn_metadata.unpadded(num_tokens, num_reqs)"),
        "GPUModelRunner.valid_sampled_token_count_gpu": "None if no drafter told what rows gained",
        "GPUModelRunner._copy_draft_token_ids_to_cpu(scheduler_output, zeros_only)": (
            "copies nothing where there is only a list",
            "if not torch.is_tensor(draft_token_ids):"),
        "GPUModelRunner._draft_token_req_ids": "whose drafts vLLM hands to its scheduler",
    },
    "v1.spec_decode.llm_base_proposer": {
        "SpecDecodeBaseProposer.propose": (
            "its first pass runs whatever is asked for",
            "if self.num_speculative_tokens == 0:"),
        "SpecDecodeBaseProposer.prepare_next_token_ids_padded(sampled_token_ids, requests, "
        "gpu_input_batch, discard_request_mask)":
            "reads what was sampled on the device, whatever the host's arrays hold",
        "SpecDecodeBaseProposer._greedy_sample(hidden_states)": (
            "replaced: the likeliest token, and how likely it is",
            "self.model.compute_logits(hidden_states).argmax(dim=-1)"),
        "SpecDecodeBaseProposer._maybe_share_embeddings(target_language_model)": (
            "wrapped: what has no embedding of its own takes the policy's",
            "if not self.model.has_own_embed_tokens:"),
    },
    "v1.core.sched.scheduler:Scheduler.schedule": (
        "tells how many tokens to draft with the step",
        "num_spec_tokens_to_schedule=num_spec_tokens_to_schedule"),
    "v1.worker.gpu_input_batch:InputBatch.update_async_spec_token_ids": (
        "drafts of the device are asked for only where rows of the last step are kept",
        "not self.prev_req_id_to_index"),
    "config.speculative:SpeculativeConfig.draft_load_config": "the drafter's own way to be loaded",
}

VLLM_DRAFTS_WITH_OUTPUT: Table = {
    "v1.engine.core": {
        "EngineCore.step": (
            "one step at a time: the next one is scheduled when this one is booked",
            "self.scheduler.update_from_output(scheduler_output, model_output)"),
        "EngineCore.post_step(model_executed)": (
            "wrapped: does nothing but ask for drafts",
            "draft_token_ids = self.model_executor.take_draft_token_ids()",
            "self.scheduler.update_draft_token_ids(draft_token_ids)"),
        "EngineCoreProc._process_engine_step": (
            "nothing is done to requests between the booking of a step and its drafts",
            "outputs, model_executed = self.step_fn()",
            "self.post_step(model_executed)"),
    },
    "v1.core.sched.scheduler": {
        "Scheduler.schedule": (
            "what is scheduled has no drafts any more: where no new ones come, nothing is cleared",
            "scheduled_spec_decode_tokens[request.request_id] = spec_token_ids",
            "request.spec_token_ids = []"),
        "Scheduler._preempt_request": (
            "what is preempted has no drafts any more",
            "request.spec_token_ids = []"),
        "Scheduler.update_draft_token_ids(draft_token_ids)": (
            "called when a step is booked: leaves out what has ended, and what a grammar forbids",
            "if request is None or request.is_finished():"),
    },
    "v1.outputs": {
        **members("DraftTokenIds", "made from a step's output", "req_ids", "draft_token_ids"),
        "ModelRunnerOutput.req_ids": "the rows that drafts belong to",
    },
    "v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens(grammar_output)": (
        "wrapped: drafts are made before the output is returned",
        "propose_draft_token_ids(valid_sampled_token_ids)",
        "req_ids=req_ids_output_copy",
        "return output"),
}

# Whether the chosen experts are returned.
VLLM_EXPERTS_024: Table = {
    "config.model:ModelConfig.enable_return_routed_experts": "schedules synchronously",
}
VLLM_EXPERTS: Table = {
    "config.aux_output:AuxOutputConfig.enable_return_routed_experts": "schedules synchronously",
    "config.vllm:VllmConfig.aux_output_config": "holds it",
}

# For sam_rollout/session/padding.py and SamProposer.
VLLM_GRAPHS: Table = {
    "v1.worker.gpu_model_runner:GPUModelRunner.cudagraph_dispatcher": "knows the graph of a step",
    "v1.cudagraph_dispatcher": {
        "CudagraphDispatcher.dispatch(num_tokens, uniform_decode)":
            "asked with a number of tokens, and whether all requests have k drafts",
        "CudagraphDispatcher.initialize_cudagraph_keys": (
            "full graphs of decode steps are for k + 1 tokens a request only",
            "x <= max_num_tokens and x >= uniform_decode_query_len"),
    },
    "config.compilation":
        members("CUDAGraphMode", "what the dispatcher returns", "NONE", "PIECEWISE", "FULL"),
    "v1.core.sched.scheduler": {
        "Scheduler.update_from_output": (
            "whatever was verified counts as a draft, filling included",
            "num_draft_tokens = len(scheduled_spec_token_ids)"),
        "Scheduler.schedule": (
            "drafts for which a step has no room are cut; no more are scheduled than we gave",
            "spec_token_ids = spec_token_ids[:num_scheduled_spec_tokens]"),
    },
}

VLLM_DATA_PARALLEL: Table = {
    "v1.worker.dp_utils": {
        "dist": "torch.distributed of this module, whose all_reduce the gates' reports travel with",
        "_run_ar": (
            "adds up an int32 tensor [fields, ranks]; reports are further rows of it",
            "dp_size, dtype=torch.int32",
            "dist.all_reduce(tensor, group=group)"),
    },
    "v1.worker.gpu_model_runner": {
        "GPUModelRunner._determine_batch_execution_and_padding": (
            "once before the forward pass of a step, of a dummy batch, too",
            "coordinate_batch_across_dp("),
        "GPUModelRunner._dummy_run": (
            "dummy batches take part",
            "self._determine_batch_execution_and_padding("),
    },
}

ASCEND_DATA_PARALLEL: Table = {
    "worker.model_runner_v1": {
        "dist": "as in vLLM's dp_utils",
        "NPUModelRunner._sync_metadata_across_dp": (
            "vllm-ascend's sum over ranks; reports are further rows of it",
            "self.dp_size, device=device_str, dtype=torch.int32",
            "dist.all_reduce(packed_tensor, group=group)"),
    },
}

VLLM_CONFIGURATION: Table = {
    "v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build": (
        "requests without drafts go on from a wrong state: hybrids have none until it changes",
        "non_spec_state_indices_tensor = block_table_tensor[:, 0]"),
    "config.vllm": {
        "VllmConfig.additional_config": "carries our settings into every engine process, in a dict",
        "VllmConfig.speculative_config": "None is how the drafter is absent",
    },
    "sampling_params": {
        "SamplingParams.extra_args": "carries identity (group, sibling, step, split, key)",
        "SamplingParams.from_optional": (
            "extra_args can be given where sampling parameters are made",
            "extra_args=extra_args"),
    },
    "config.model": {
        "ModelConfig.get_vocab_size": "tokens of a corpus and of other engines are checked",
        "ModelConfig.max_model_len": "likewise their length",
    },
    "config.parallel:ParallelConfig.worker_extension_cls": "worker methods of ours",
    "v1.engine.async_llm": {
        "AsyncLLM.collective_rpc(method, timeout, args, kwargs)": "reaches worker methods",
        "AsyncLLM.add_request": "wrapped in the server: the engine knows a request after it",
        "AsyncLLM.generate": ("calls it", "await self.add_request(request_id, "),
        "AsyncLLM.model_config": "bounds of what other nodes say their engines sampled",
        "AsyncLLM.logger_manager": "the stat logger's records are drained from the server process",
    },
    "plugins:DEFAULT_PLUGINS_GROUP": (
        "our entry point is loaded in every vLLM process", "'vllm.general_plugins'"),
}

VLLM_STATISTICS: Table = {
    "v1.metrics.loggers": {
        "StatLoggerBase.__init__(vllm_config, engine_index)": "how our stat logger is made",
        "StatLoggerBase.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)":
            "one call per engine step",
        "StatLoggerBase.log_engine_initialized()": "overridden",
        "StatLoggerBase.log()": "overridden",
        "StatLoggerManager.stat_loggers": "the list our logger is in",
    },
    "v1.metrics.stats": {
        **members(
            "SchedulerStats", "noted of an engine step", "num_running_reqs", "num_waiting_reqs",
            "spec_decoding_stats"),
        **members(
            "IterationStats", "noted of an engine step", "num_generation_tokens",
            "num_prompt_tokens", "num_preempted_reqs", "time_to_first_tokens_iter",
            "inter_token_latencies_iter", "finished_requests"),
    },
    "v1.spec_decode.metrics": members(
        "SpecDecodingStats", "acceptance", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
        "num_accepted_tokens_per_pos"),
}

# Draft trees (integrations/vllm/trees) on CPUs and GPUs.
VLLM_TREES: Table = {
    "v1.worker.gpu_model_runner": {
        "GPUModelRunner._prepare_inputs(scheduler_output, num_scheduled_tokens)": (
            "slots are worked out before the positions of a tree's tokens are put right",
            "self.input_batch.block_table.compute_slot_mapping("),
        "GPUModelRunner.propose_draft_token_ids(scheduler_output, sampled_token_ids, "
        "sampling_metadata, hidden_states, sample_hidden_states, aux_hidden_states, "
        "spec_decode_metadata, common_attn_metadata, slot_mappings)": (
            "wrapped: a drafter reads a request's accepted tokens first, which are moved there",
            "target_token_ids = self.input_ids.gpu[:total_num_tokens]",
            "target_positions = self._get_positions(total_num_tokens)",
            "[h[:total_num_tokens] for h in aux_hidden_states]",
            "target_hidden_states = hidden_states[:total_num_tokens]",
            "indices.append(offset + len(tokens) - 1)",
            "hidden_states = sample_hidden_states[indices]"),
        "GPUModelRunner.get_model()": "the layers of a model that drafts are not among its modules",
    },
    "v1.sample.rejection_sampler": {
        "RejectionSampler._combine_outputs_with_spec_tokens(output_token_ids, spec_token_ids)":
            "the text before each draft token, for penalties and bad words: a tree's path",
    },
}

# On CPUs.
VLLM_TREES_CPU: Table = {
    "v1.attention.backends.cpu_attn": {
        "CPUAttentionBackendImpl.forward": (
            "the kernel reads texts by pages and lengths that the metadata tells",
            "block_table=attn_metadata.block_table",
            "scheduler_metadata=attn_metadata.scheduler_metadata"),
        "CPUAttentionBackendImpl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)":
            "writes keys and values of paths to spare pages, and of accepted tokens to their place",
        "CPUAttentionMetadataBuilder.build": (
            "how the kernel's schedule of a step is made",
            "ops.cpu_attn_get_scheduler_metadata("),
    },
}

# On accelerators (split_attention.py).
VLLM_TREES_SPLIT: Table = {
    "config.compilation:CUDAGraphMode.has_full_cudagraphs()": "their attention cannot be replaced",
    "v1.worker.gpu_input_batch:InputBatch.num_computed_tokens_cpu": "each text's tokens so far",
}

# On GPUs (cuda_attention.py).
VLLM_TREES_CUDA: Table = {
    "v1.attention.backends.flash_attn": {
        "FlashAttentionBackend.get_kv_cache_shape": (
            "how keys and values lie in a layer's cache",
            "return (num_blocks, 2, block_size, num_kv_heads, head_size)"),
        "FlashAttentionBackend.forward_includes_kv_cache_update": (
            "what attends does not write the cache: it need not be called", "= False"),
        "FlashAttentionMetadata.block_table": "the pages of each text",
        "FlashAttentionImpl.forward(layer, query, key, value, kv_cache, attn_metadata, output)": (
            "replaced in steps with trees",
            "key_cache, value_cache = kv_cache.unbind(1)",
            "canonicalize_singleton_dim_strides(key_cache)"),
        "FlashAttentionImpl._forward_with_dcp": (
            "attends to a context in pages without a mask, and merges, as we do",
            "seqused_k=attn_metadata.dcp_context_kv_lens",
            "causal=False", "block_table=block_table", "return_softmax_lse=True",
            "fa_version=self.vllm_flash_attn_version", "merge_attn_states(output, "),
        "FlashAttentionImpl.batch_invariant_enabled": "then the kernel's work is not split",
    },
    "vllm_flash_attn.flash_attn_interface:"
    "flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, "
    "softmax_scale, causal, block_table, return_softmax_lse, num_splits, fa_version)": (
        "the context's part of attention, and its log-sum-exp",
        "softmax_lse [optional, if return_softmax_lse=True]: (nheads, total_q_seqlen)",
        "return (out, softmax_lse) if return_softmax_lse else out"),
    "v1.attention.ops.merge_attn_states:merge_attn_states(output, prefix_output, prefix_lse, "
    "suffix_output, suffix_lse)": "weighs two results, log-sum-exps are [heads, tokens]",
    "utils.torch_utils:canonicalize_singleton_dim_strides(t)": "strides that kernels take",
    "v1.worker.block_table:BlockTable.slot_mapping": "places in the cache of a step's tokens",
}

VLLM_CPU_WORKAROUNDS: Table = {
    "model_executor.layers.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)": (
        "patched: packing drops layer.weight, and the next weight sync has no parameter to load",
        "if remove_weight:",
        "layer.weight = torch.nn.Parameter(torch.empty(0"),
    "utils.cpu_triton_utils": {
        "_expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to, "
        "MAX_NUM_TOKENS)": (
            "patched: float output is written to an int64 copy",
            "_ensure_int64(output)"),
        "_rejection_random_sample_kernel_impl(output_token_ids, cu_num_draft_tokens, "
        "draft_token_ids, draft_probs, target_probs, bonus_token_ids, recovered_token_ids, "
        "uniform_probs, is_greedy, max_spec_len, vocab_size, NO_DRAFT_PROBS)":
            "patched: may accept placeholders",
    },
    "platforms.cpu:CpuPlatform.register_triton_kernel_overrides": (
        "takes both functions by name, where there is no Triton",
        "cpu_tl._expand_kernel_impl",
        "cpu_tl._rejection_random_sample_kernel_impl"),
    "triton_utils.dispatcher": {
        "register_kernels(overrides)": "replaces kernels, taken before or not",
        "_registry": "tells whether they were taken before",
    },
}

VLLM_SECOND_RUNNER: Table = {
    "config.vllm": {
        "VllmConfig._get_v2_model_runner_unsupported_features": (
            "our method is taken off this list",
            "'custom_class'",
            "unsupported.append(f\"speculative method '{speculative_config.method}'\")"),
        "VllmConfig.use_v2_model_runner": (
            "VLLM_USE_V2_MODEL_RUNNER=1 means the second runner",
            "use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER"),
    },
    "v1.worker.gpu.spec_decode:init_speculator(vllm_config, device)": "wrapped: makes ours",
    "v1.worker.gpu.model_runner": {
        "GPUModelRunner.speculator": "ours",
        "GPUModelRunner.req_states": "texts and lengths, by slot; tells the second runner",
        "GPUModelRunner.sampler": "made before we are bound",
        "GPUModelRunner.rejection_sampler": "made before we are bound",
        "GPUModelRunner.execute_model": (
            "requests that ended are forgotten before new ones join",
            "self.finish_requests(scheduler_output)",
            "self.add_requests(scheduler_output)"),
        "GPUModelRunner.finish_requests(scheduler_output)": "wrapped",
        "GPUModelRunner.add_requests(scheduler_output)": (
            "wrapped; a request that was preempted joins again, its text with it",
            "for new_req_data in scheduler_output.scheduled_new_reqs"),
        "GPUModelRunner.sample_tokens": (
            "calls us when texts and lengths hold what was sampled, and keeps drafts by slot",
            "self.postprocess_sampled(input_batch.idx_mapping",
            "self.speculator.propose(input_batch, attn_metadata, slot_mappings_by_layer, "
            "spec_hidden_states, aux_hidden_states, num_sampled, num_rejected",
            "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens"),
        "GPUModelRunner.take_draft_token_ids()": "replaced: tells how many drafts a request has",
    },
    "v1.worker.gpu.states": {
        "RequestState.all_token_ids": "texts",
        "RequestState.total_len": "their lengths",
        "RequestState.req_id_to_index": "slots",
    },
    "v1.worker.gpu.buffer_utils": {
        "StagedWriteTensor._uva_buf": "holds the host's view of texts",
        "StagedWriteTensor.gpu": "the device's",
        "UvaBuffer.np": "the host's view",
    },
    "v1.worker.gpu.input_batch": {
        "InputBatch.req_ids": "requests in row order",
        "InputBatch.num_reqs": "their number",
        "InputBatch.idx_mapping_np": "their slots",
    },
    "v1.worker.gpu.sample.sampler": {
        "Sampler.sample": (
            "what draws is replaced; cuts are its business",
            "self._sample_random(processed_logits, expanded_idx_mapping, idx_mapping_np, pos, "
            "top_k, top_p"),
        "Sampler.apply_sampling_params(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, "
        "pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np)": "logits of verify steps",
        "Sampler.sampling_states": "temperatures, by slot",
    },
    "v1.worker.gpu.spec_decode.rejection_sampler": {
        "RejectionSampler._verify(logits, draft_logits, draft_sampled, pos, cu_num_logits, "
        "idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos, "
        "seq_lens_upper_bound_np)": (
            "replaced",
            "return (processed_logits, sampled, num_sampled)"),
        "RejectionSampler.num_speculative_steps": "k",
    },
    "v1.core.sched.output": {
        "NewRequestData.req_id": "kept until the request ends",
        "NewRequestData.sampling_params": "the identity, and whether it is a control",
        "NewRequestData.prompt_token_ids": "the identity of requests that carry none",
    },
}

# vllm-ascend has no branch for drafters of plug-ins.
VLLM_ASCEND_WRAPPED: Table = {
    "spec_decode:get_spec_decode_method(method, vllm_config, device, runner)": (
        "passed by for custom_class, which it refuses; when it has it, the plugin is not needed",
        "raise ValueError(f'Unknown speculative decoding method: {method}')"),
    "worker.model_runner_v1": {
        "NPUModelRunner(GPUModelRunner)": "the class that is wrapped",
        "NPUModelRunner.__init__(vllm_config, device)": (
            "wrapped: our samplers replace those made here, which are told no logprobs_mode",
            "self.sampler = AscendSampler()"),
        "NPUModelRunner._set_up_drafter": (
            "on the last pipeline stage alone there is a drafter and something to verify with",
            "self.drafter = self._get_drafter()"),
        "NPUModelRunner._get_drafter()": (
            "wrapped: where the proposer is made",
            "get_spec_decode_method(self.speculative_config.method"),
        "NPUModelRunner.load_model": (
            "called on every drafter",
            "self.drafter.load_model(self.model)"),
        "NPUModelRunner._dummy_run": (
            "called on every drafter",
            "self.drafter.dummy_run(num_tokens="),
        "NPUModelRunner.propose_draft_token_ids(valid_sampled_token_ids, sampling_metadata, "
        "scheduler_output, spec_decode_metadata, spec_decode_common_attn_metadata, positions, "
        "num_scheduled_tokens, hidden_states, aux_hidden_states, sample_hidden_states, "
        "target_model_batch_desc)": (
            "wrapped for our proposer; other proposers are told apart by class",
            "isinstance(self.drafter, AscendNgramProposer)"),
    },
}

VLLM_ASCEND: Table = {
    "worker.model_runner_v1": {
        "NPUModelRunner.rejection_sampler": (
            "made again with the sampler that heeds logprobs_mode, and replaced by ours",
            "AscendRejectionSampler(self.sampler)"),
        "NPUModelRunner.sample_tokens": (
            "a drafter without a model is asked after bookkeeping, with lists",
            "propose_draft_token_ids(valid_sampled_token_ids)"),
        "NPUModelRunner._determine_batch_execution_and_padding": (
            "decode graphs serve steps in which every request has k + 1 tokens",
            "max_num_scheduled_tokens == self.uniform_decode_query_len",
            "self.cudagraph_dispatcher.dispatch("),
    },
    "compilation.acl_graph:set_graph_params(aclgraph_capture_sizes)": (
        "kept by tokens alone: graphs for 1 and for k + 1 tokens a request would collide",
        "{size: [] for size in aclgraph_capture_sizes}"),
    "sample.sampler:AscendSampler.__init__(logprobs_mode)": "takes logprobs_mode if it is given",
    "sample.rejection_sampler": {
        "AscendRejectionSampler.__init__(sampler)": "made again with another sampler",
        "AscendRejectionSampler.apply_penalties(logits, sampling_metadata, metadata, "
        "repeat_indices, output_token_ids)": (
            "overridden: without Triton it takes rows of drafts for rows of requests",
            "return Sampler.apply_penalties(logits, sampling_metadata, output_token_ids)"),
    },
}

# Draft trees on NPUs (integrations/vllm_ascend/trees.py).
VLLM_ASCEND_TREES: Table = {
    "attention.attention_v1": {
        "AscendAttentionBackend.get_kv_cache_shape": (
            "how keys and values lie in a layer's cache",
            "return (2, num_blocks, block_size, num_kv_heads, head_size)"),
        "AscendAttentionMetadataBuilder.__init__": (
            "requests compute at most 16 tokens in a verify step",
            "assert self.decode_threshold <= 16"),
        "AscendMetadata.block_tables": "the pages of each text",
        "AscendAttentionBackendImpl.forward(layer, query, key, value, kv_cache, attn_metadata, "
        "output)": ("wrapped: it also writes the cache", "= self.reshape_and_cache("),
    },
    "attention.context_parallel.attention_cp:AscendAttentionCPImpl._forward_decode_pcp_dcp": (
        "calls the vendor's operator with pages, and takes its log-sum-exp, as we do",
        "self.key_cache.view(self.key_cache.shape[0], self.key_cache.shape[1], -1)",
        "input_layerout = 'BSND'", "'softmax_lse_flag': True",
        "npu_fused_infer_attention_score(query, k_nope, value, **common_kwargs)",
        "attn_lse.transpose(1, 2).reshape(-1, attn_lse.shape[1], 1)"),
    "attention.context_parallel.common_cp:_npu_attn_out_lse_update": (
        "weighs two results in float32, as we do", "attn_out_mask.to(torch.float32)",
        "torch_npu.npu_attention_update(attn_lse, attn_output, update_type)"),
    "worker.model_runner_v1": {
        "NPUModelRunner._prepare_inputs(scheduler_output, num_scheduled_tokens)": (
            "wrapped: slots are worked out before the positions of a tree's tokens are put right",
            "self.input_batch.block_table.compute_slot_mapping("),
        "NPUModelRunner.get_model()": "the layers of a model that drafts are not among its modules",
    },
    "worker.block_table:BlockTable.slot_mapping": "places in the cache of a step's tokens",
}

VLLM_ASCEND_CHANGED: Table = {
    "worker.model_runner_v1:NPUModelRunner.propose_draft_token_ids": (
        "the scheduler says how many to draft, which ours would have to be told there",
        "scheduler_output.num_spec_tokens_to_schedule"),
}

VERL_ROLLOUT: Table = {
    "workers.rollout.replica": {
        "RolloutReplicaRegistry.register(name, loader)": "registers the rollout sam_vllm",
        **members(
            "TokenOutput", "what generate returns", "token_ids", "log_probs", "routed_experts",
            "stop_reason", "num_preempted"),
    },
    "workers.rollout.base:_ROLLOUT_REGISTRY": (
        "private: (name, 'async') -> class path of the training side's adapter",
        "('vllm', 'async')"),
    "workers.rollout.vllm_rollout.vllm_async_server": {
        "vLLMReplica.__init__(replica_rank, config, model_config, gpus_per_node, "
        "is_reward_model, is_teacher_model, name_suffix)": (
            "overridden to set server_class",
            "self.server_class = ray.remote(vLLMHttpServer)"),
        "vLLMReplica._get_server_name_prefix()": "overridden: how the training side finds it",
        "vLLMReplica.launch_servers": (
            "the driver finds servers by their names, to ask for progress",
            "f'{prefix}server_{self.replica_rank}_{node_rank}{self.name_suffix}'"),
        "vLLMHttpServer._get_worker_extension_cls()": "overridden",
        "vLLMHttpServer.run_server(args)": (
            "overridden: starts the engine, which our drafter is bound to afterwards",
            "AsyncLLM.from_vllm_config"),
        "vLLMHttpServer.launch_server(master_address, master_port, dp_rpc_port)": (
            "passes worker_extension_cls on",
            "'worker_extension_cls': self._get_worker_extension_cls()"),
        "vLLMHttpServer.generate(prompt_ids, sampling_params, request_id)": (
            "overridden: adds extra_args and records; leaves vLLM's parameters but for max_tokens",
            "sampling_params = SamplingParams(max_tokens=max_tokens, **sampling_params)",
            "rejected = await self._park_until_admitted(request_id)",
            "stop_reason = 'aborted'",
            "extra_fields = {'global_steps': self.global_steps}",
            "self._admitting -= 1"),
        "vLLMHttpServer._park_until_admitted(request_id)": (
            "private, overridden: requests wait in it until generation goes on",
            "await self._resume_event.wait()"),
        "vLLMHttpServer.abort_all_requests": (
            "overridden: the engine's clock stops", "while self._admitting > 0:",
            "self.engine.pause_generation("),
        "vLLMHttpServer.collective_rpc(method, timeout, args, kwargs)": "reaches worker methods",
    },
    "workers.rollout.llm_server": {
        "LLMServerClient.generate(request_id, prompt_ids, sampling_params)":
            "sampling_params travel unchanged from the agent loop to the server",
        "FullyAsyncLLMServerClient(LLMServerClient)":
            "our client stands before it and behind it in the order of resolution",
        "FullyAsyncLLMServerClient.generate(request_id, prompt_ids, sampling_params)": (
            "asks anew for what follows the response so far, until it is not aborted",
            "output = await super().generate(",
            "prompt_ids=prompt_ids + final_output.token_ids",
            "if output.stop_reason not in ('aborted', 'abort')"),
    },
}

VERL_TRAINER: Table = {
    "trainer.ppo.v1.trainer_base": {
        "register_trainer(name)": "makes our trainer selectable",
        "get_trainer_cls(name)": "how it is found again",
        "PPOTrainer._validate()": "overridden: validation traffic is recorded apart",
        "PPOTrainer.prepare_step()": "overridden: submits a round instead of a training batch",
        "PPOTrainer._add_prompts_to_generate(num_prompts)": "submits a round; refills",
        "PPOTrainer._next_train_batch(num_prompts)": "the order in which prompts are taken",
        "PPOTrainer._submit_batch_to_rollout(batch)": "overridden: notes the order of prompts",
        "PPOTrainer._build_replay_buffer()": "makes our sampler from custom_sampler.{path,name}",
        "PPOTrainer._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)":
            "overridden: the last place where all metrics of a step are known",
        "PPOTrainer.on_validate_begin()": "overridden: verl's loggers are there and not yet used",
        "PPOTrainer.on_train_begin()": "overridden: likewise, without validation before training",
        "PPOTrainer.fit(agent_loop_manager)": (
            "overridden: the wandb run is made before verl's loggers, which are then guarded",
            "self.logger = Tracking(",
            "self.validation_generations_logger = ",
            "self.dapo_filtered_reward_logger = ",
            "default_backend=self.config.trainer.logger"),
        "PPOTrainer._rollout_server_managers()": "private: the managers of all replicas",
        "PPOTrainer._reissue_inflight_prompts(partition_id)": (
            "overridden: an asynchronous trainer's buffer takes up the groups of a checkpoint",
            "status') in ('pending', 'running')"),
        "PPOTrainer.step(metrics, timing_raw)": (
            "averages the metrics of a step's batches, so ours come with the last one",
            "for trigger_idx in range(self.parameter_sync_step)",
            "metrics_aggregator.add_step_metrics("),
        "PPOTrainer._consume_sync_metrics()": (
            "private: what we put into _pending_sync_metrics is logged with the step",
            "getattr(self, '_pending_sync_metrics', None)"),
    },
    "trainer.ppo.v1.trainer_sync": {
        "PPOTrainerSync(PPOTrainer)": "base of our trainer",
        "PPOTrainerSync.on_init_end()": "overridden: weight sync, then our check of the engines",
        "PPOTrainerSync.on_sample_end()": "overridden: drains records into _pending_sync_metrics",
        "PPOTrainerSync.on_step_end()": "overridden: ends the step's drafting state",
    },
    "trainer.ppo.v1.trainer_separate_async": {
        "PPOTrainerSeparateAsync(PPOTrainer)": "base of our trainer with separate engines",
        "PPOTrainerSeparateAsync._setup()": (
            "makes the separate engines' managers; a bug of verl's makes hybrid engines needed",
            "self.standalone_server_manager:",
            "self.standalone_checkpoint_manager =",
            "flush=True"),
        "PPOTrainerSeparateAsync.get_llm_client()": (
            "overridden: our client counts tokens by weights",
            "client_cls=FullyAsyncLLMServerClient"),
        "PPOTrainerSeparateAsync.on_step_end()": (
            "overridden: interrupts responses, drains their records, adds their metrics",
            "self._pending_sync_metrics = dict(",
            "self.standalone_checkpoint_manager.update_weights(self.global_steps)"),
    },
    "trainer.ppo.v1.trainer_colocate_async": {
        "PPOTrainerColocateAsync(PPOTrainer)": "base of our asynchronous trainer",
        "PPOTrainerColocateAsync.get_llm_client()": (
            "overridden: our client counts tokens by weights",
            "client_cls=FullyAsyncLLMServerClient"),
        "PPOTrainerColocateAsync.on_sample_end()": (
            "overridden: interrupts responses, then drains their records",
            "self.checkpoint_manager.abort_replicas()"),
    },
    "utils.tracking": {
        "Tracking.__init__": (
            "wandb.init without reinit returns the run that is there; loggers are replaced by name",
            "wandb.init(project=project_name,",
            "self.logger['wandb'] = wandb"),
        "Tracking.log(data, step, backend)": (
            "the guard of wandb takes the same arguments",
            "logger_instance.log(data=data, step=step)"),
        "_TensorboardAdapter.__init__": (
            "pictures are added to its writer",
            "self.writer = SummaryWriter("),
    },
    "trainer.main_ppo": {
        "TaskRunnerV1": (
            "subclassed through __ray_metadata__.modified_class; a Ray actor class",
            "@ray.remote"),
        "TaskRunnerV1.run(config)": (
            "overridden: imports our trainer where it is looked up",
            "get_trainer_cls(config.trainer.v1.trainer_mode)"),
        "TaskRunnerV1.init_agent_loop_manager()": (
            "overridden: waits until the agent loop workers are up",
            "self.agent_loop_manager = agent_loop_manager_cls.create"),
        "run_ppo(config, task_runner_class)": "the recipe hands over here",
    },
    "trainer.constants_ppo:get_ppo_ray_runtime_env(config)": "environment of Ray's workers",
}

VERL_HEAD_TRAINING: Table = {
    "trainer.ppo.v1.trainer_base": {
        "PPOTrainer._init_resource_pool_mgr()": (
            "overridden: our worker takes the place of verl's",
            "self.role_worker_mapping[role] = ray.remote(ActorRolloutRefWorker)"),
        "PPOTrainer.on_step_begin()": "overridden: the step's time so far",
        "PPOTrainer._compute_old_log_prob(batch, metrics)": (
            "overridden: afterwards the head learns; the policy's weights are still those",
            "self.actor_rollout_wg.compute_log_prob(batch)"),
        "PPOTrainer._save_checkpoint()": (
            "the head is saved below the policy's folder",
            "self.actor_rollout_wg.save_checkpoint("),
    },
    "workers.engine_workers": {
        "ActorRolloutRefWorker(Worker, DistProfilerExtension)": "subclassed",
        "ActorRolloutRefWorker.init_model()": (
            "overridden: the head is loaded beside the policy",
            "self.rollout = rollout_cls(",
            "self.actor = self.actor_worker_cls("),
        "ActorRolloutRefWorker.compute_log_prob(data)": (
            "overridden: hidden states are kept",
            "self.actor.infer_batch(data)"),
        "ActorRolloutRefWorker.save_checkpoint(local_path, hdfs_path, global_step, "
        "max_ckpt_to_keep)": "overridden",
        "ActorRolloutRefWorker.load_checkpoint(local_path, hdfs_path, del_local_after_load)":
            "overridden",
        "ActorRolloutRefWorker.update_weights": (
            "the policy's weights, and the head's behind them, go through our adapter",
            "await self.rollout.update_weights(per_tensor_param"),
    },
    "workers.engine.fsdp.transformer_impl": {
        "FSDPEngine.forward_backward_batch": (
            "calls forward_step, which is wrapped, for every micro-batch",
            "self.forward_step(micro_batch, loss_function=loss_function, "
            "forward_only=forward_only)"),
        "FSDPEngineWithLMHead.forward_step(micro_batch, loss_function, forward_only)": (
            "wrapped: within it, hooks on the policy's layers see the whole micro-batch",
            "raw_output = self.module("),
        "FSDPEngineWithLMHead.prepare_model_inputs": (
            "texts are packed into one row, of which Ulysses takes a part, or padded on the right",
            "input_ids_rmpad, position_ids_rmpad, pad_size = ulysses_pad_and_slice_inputs(",
            "input_ids = torch.nested.to_padded_tensor("),
        "FSDPEngine.get_data_parallel_rank()": "processes that share texts draw equal windows",
    },
    "workers.engine.megatron.transformer_impl": {
        "MegatronEngine.forward_backward_batch": (
            "calls forward_step, which is wrapped, for every chunk and micro-batch",
            "self.forward_step, logits_processor_func=loss_function",
            "model=self.module"),
        "MegatronEngineWithLMHead.forward_step(batch_iter, model, logits_processor_func, "
        "postprocess_micro_batch_func)": (
            "wrapped: within it, hooks on the policy's layers see the whole micro-batch",
            "batch: TensorDict = next(batch_iter)"),
        "MegatronEngine.eval_mode()": "brings offloaded matrices back for a while",
        "MegatronEngine.get_data_parallel_rank()": "processes that share texts draw equal windows",
        "MegatronEngine.param_dtype": "of the policy's two matrices",
    },
    "utils.megatron_utils": {"unwrap_model(model)": "what is below DDP and Float16Module"},
    "models.mcore.model_forward:gptmodel_forward_model_engine": (
        "how texts were packed is seen by a hook, which is given keywords",
        "packed_seq_params=packed_seq_params,"),
    "models.mcore.model_forward_fused:fused_forward_model_engine":
        ("the same", "packed_seq_params=packed_seq_params,"),
    "utils.megatron.pipeline_parallel:make_batch_generator(batches, vpp_size)": (
        "every chunk of a process gets the same micro-batches in the same order",
        "batch_generator = [batches] * vpp_size"),
    "models.mcore.util": {
        "preprocess_thd_engine": (
            "which tokens lie in which process of context parallelism, texts packed",
            "torch.arange(half_seqlen * cp_rank, half_seqlen * (cp_rank + 1)",
            "remain_start = seqlen_padded_i - half_seqlen * (cp_rank + 1)"),
        "preprocess_bshd_engine": (
            "the same, texts side by side",
            "first_start = cp_rank * chunk_len",
            "second_start = (2 * cp_size - cp_rank - 1) * chunk_len"),
    },
    "workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights(weights)": (
        "overridden: more tensors are sent behind the policy's",
        "await sender.async_send_weights(weights)"),
    "workers.rollout.vllm_rollout.utils": {
        "vLLMColocateWorkerExtension.update_weights_from_ipc": (
            "overridden: what is received goes through _update_weights",
            "self._update_weights("),
        "vLLMColocateWorkerExtension._update_weights(weights, peft_config, base_sync_done)":
            "overridden: the head's tensors are taken out of a bucket",
    },
}

# Hidden states and matrices of a policy that Megatron divides.
MEGATRON: Table = {
    "core.parallel_state": {
        "get_context_parallel_group()": "processes that share a text's tokens",
        "get_model_parallel_group()": "those that share layers and matrices",
        "get_tensor_model_parallel_group()": "those that share a layer",
    },
    "core.models.gpt.gpt_model": {
        "GPTModel.pre_process": "whether a chunk has the embeddings",
        "GPTModel.post_process": "whether it has the output matrix",
        "GPTModel.embedding": "its output is the state after no layer",
        "GPTModel.decoder": "has the layers",
        "GPTModel.output_layer": "has the output matrix",
        "GPTModel.share_embeddings_and_output_weights": "there is one matrix",
    },
    "core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.word_embeddings":
        "has the embeddings",
    "core.transformer.transformer_block": {
        "TransformerBlock.layers": "a chunk's",
        "TransformerBlock.final_layernorm": "its output is what the output matrix is applied to",
    },
    "core.transformer.transformer_layer:TransformerLayer.layer_number": "from 1 over all chunks",
    "core.packed_seq_params:PackedSeqParams.cu_seqlens_q_padded": "where padded texts begin",
    "core.model_parallel_config:ModelParallelConfig.sequence_parallel":
        "between layers a text's tokens lie apart on processes of tensor parallelism, too",
}

VERL_REPLAY_BUFFER: Table = {
    "trainer.ppo.v1.replay_buffer": {
        "ReplayBuffer.__init__(trainer_mode, trainer_config, max_off_policy_threshold, "
        "max_off_policy_strategy, sampler_kwargs, poll_interval, refill_fn, "
        "filter_groups_metric, train_batch_size, gen_batch_size, max_inflight_gen_batches, "
        "sync_refill_failed_groups)":
            "poll_interval has no configuration key",
        "ReplayBuffer.sample(global_steps, partition_id, batch_size)": "waits for the responses",
        "ReplayBuffer._select_prompt_uids(partition_id, sampleable_keys, batch_size)":
            "overridden: which groups are trained on must not depend on timing",
        "ReplayBuffer._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)":
            "overridden: responses in the order of prompts and siblings",
        "ReplayBuffer._wait_for_next_poll(partition_id, last_debug_time)": "waits, and logs",
        "ReplayBuffer._clear_groups(partition_id, uids)": "filtered groups leave the buffer",
        "ReplayBuffer._sync_metadata_from_transfer_queue()": "one poll",
        "ReplayBuffer._dapo_filtered_keys(partition_id)": "groups without a learning signal",
    },
}

VERL_AGENT_LOOP: Table = {
    "trainer.ppo.v1.agent_loop_tq": {
        "AgentLoopWorkerTQ(AgentLoopWorker)": (
            "subclassed through __ray_metadata__.modified_class; a Ray actor class",
            "@ray.remote"),
        "AgentLoopManagerTQ.__init__": (
            "overridden to set agent_loop_workers_class",
            "self.agent_loop_workers_class = AgentLoopWorkerTQ"),
    },
    "experimental.agent_loop.agent_loop:"
    "AgentLoopWorker._run_agent_loop(sampling_params, trajectory, agent_name, trace)":
        "overridden: gives each response its identity",
}

VLLM_DEATHS: Table = {
    "v1.engine.core_client": {
        "AsyncMPClient._call_utility_async(method, engine)": (
            "wrapped: a call that waits ends when its engine dies", "return await future"),
        "MPClient.ensure_alive()": (
            "says that it has", "if self.resources.engine_dead:", "raise EngineDeadError()"),
    },
    "v1.engine.core:EngineCoreProc.run_engine_core": (
        "its last words are kept",
        "logger.exception('EngineCore failed to start.')",
        "logger.exception('EngineCore encountered a fatal error.')"),
    "v1.executor.multiproc_executor:WorkerProc.worker_main": (
        "its last words are kept", "logger.exception('WorkerProc failed to start.')"),
}
BATCH_INVARIANT = {
    "init_batch_invariance": (
        "what one variable switches on in a worker",
        "if envs.VLLM_BATCH_INVARIANT:", "enable_batch_invariant_mode()"),
    "_batch_invariant_MODE": "private: whether it is on",
}
ATTENTION_BACKENDS = {
    f"v1.attention.backends.{module}:{name}.supports_batch_invariance": (
        "one of the backends that may be asked for", "return True")
    for module, name in {
        "flash_attn": "FlashAttentionBackend", "mla.flashattn_mla": "FlashAttnMLABackend",
        "flex_attention": "FlexAttentionBackend", "triton_attn": "TritonAttentionBackend",
        "mla.triton_mla": "TritonMLABackend",
    }.items()
}
VLLM_BATCH_INVARIANT_024: Table = {"model_executor.layers.batch_invariant": BATCH_INVARIANT}
VLLM_BATCH_INVARIANT: Table = {"model_executor.determinism.batch_invariant": BATCH_INVARIANT}
VLLM_ASCEND_BATCH_INVARIANT: Table = {
    "batch_invariant": {
        "init_batch_invariance": (
            "what one variable switches on in a worker, where there are such operators",
            "if envs.VLLM_BATCH_INVARIANT:", "if HAS_TRITON or HAS_ASCENDC_BATCH_INVARIANT:"),
        "_batch_invariant_LIB": "private: set once it is on",
    },
}
VLLM_TIES: Table = {
    "model_executor.models.utils": {
        "AutoWeightsLoader._check_skipped_aliases(autoloaded_weights)": (
            "asked once for all buckets of a weight sync instead of once for each",
            "self._skipped_aliases"),
        "AutoWeightsLoader.load_weights": (
            "asks it at the end of every call", "self._check_skipped_aliases(autoloaded_weights)"),
    },
}
VERL_DEATHS: Table = {
    "workers.rollout.vllm_rollout.bucketed_weight_transfer": {
        "BucketedWeightSender._init_socket()": "overridden: a second socket, for failures",
        "BucketedWeightSender.async_send_weights": (
            "waits on the first without a limit", "self.socket.send_pyobj(", "self.socket.recv()"),
    },
    "workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights": (
        "makes the sender by its name in this module", "BucketedWeightSender("),
    "workers.rollout.vllm_rollout.utils": {
        "vLLMColocateWorkerExtension.update_weights_from_ipc": "overridden: tells the sender",
        "vLLMColocateWorkerExtension._get_zmq_handle()": "names the first socket",
    },
    "trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._run_prompt": (
        "logs every error of a response; only the first of a kind is let through",
        "logger.error("),
    "experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score(outputs, kwargs)":
        "overridden: refuses an unusable reward",
}

VLLM_GRAMMARS: Table = {
    "v1.structured_output:StructuredOutputManager._get_constraint_start":
        "a grammar can begin in the middle of a verify step: its requests may have drafts",
}

VLLM_LATE_BINDING_BY_NUMBER: Table = {
    "v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": (
        "the number of places is the scheduler output's",
        "[-1] * scheduler_output.num_spec_tokens_to_schedule"),
    "v1.core.sched.output:SchedulerOutput.num_spec_tokens_to_schedule":
        "set by our scheduler: the next step's places, then this step's passes",
}

VLLM_ASCEND_LATE_BINDING: Table = {
    "worker.model_runner_v1": {
        "NPUModelRunner.execute_model(scheduler_output, intermediate_tensors)": (
            "wrapped: binds drafts before a step is prepared; a list of drafts copies no step",
            "self._draft_token_ids is None",
            "self._update_states(scheduler_output)",
            "self._prepare_inputs(scheduler_output, num_scheduled_tokens_np)"),
        "NPUModelRunner._prepare_inputs": (
            "waits for sampled tokens behind places that are not read yet: none prepared ahead",
            "if self._needs_seq_lens_cpu_sync and async_spec_decode_active:",
            "self._correct_optimistic_seq_lens_cpu(num_reqs)",
            "self._prepare_input_ids(scheduler_output, num_reqs, total_num_scheduled_tokens, "
            "cu_num_tokens)"),
        "NPUModelRunner._correct_optimistic_seq_lens_cpu(num_reqs)": (
            "likewise",
            "self.valid_sampled_token_count_event.synchronize()"),
        "NPUModelRunner._build_attention_metadata": (
            "attention is told lengths that are on the host",
            "_seq_lens_cpu=self.optimistic_seq_lens_cpu[:num_reqs_padded]"),
        "NPUModelRunner._model_forward(num_tokens_padded, input_ids, positions, "
        "intermediate_tensors, inputs_embeds)":
            "wrapped: tells when a step is launched",
        "NPUModelRunner._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens, "
        "num_pcp_pads)":
            "wrapped with the others",
        "NPUModelRunner.sample_tokens(grammar_output)": (
            "wrapped: what it returns is kept until its tokens have arrived",
            "= self.execute_model_state",
            "self.valid_sampled_token_count_gpu = None",
            "AsyncGPUModelRunnerOutput("),
        "NPUModelRunner._bookkeeping_sync(scheduler_output, sampler_output, logits, hidden_states, "
        "num_scheduled_tokens, spec_decode_metadata)": (
            "wrapped: keeps tokens on the device only without a drafter; one placeholder a row",
            "if self.num_spec_tokens <= 0:",
            "self.input_batch.prev_sampled_token_ids = sampled_token_ids",
            "sampled_ids = [-1] if req_idx not in invalid_req_indices_set else None"),
        "NPUModelRunner._copy_draft_token_ids_to_cpu": (
            "names the requests of a step with grammars, whose drafts the scheduler asks for",
            "self._draft_token_req_ids = self.input_batch.req_ids.copy()"),
    },
    "platform:NPUPlatform.check_and_update_config": (
        "workers with other runners schedule synchronously",
        "parallel_config.worker_cls = 'vllm_ascend.worker.worker.NPUWorker'"),
}

# Only for the releases of drafts_with_output.py.
VLLM_ASKS_FOR_DRAFTS: Table = {
    "v1.engine.core:EngineCore.post_step": (
        "does nothing else",
        "if self.check_for_draft_tokens and (not self.async_scheduling) and model_executed:"),
}

VLLM_ASKS_FOR_DRAFTS_023: Table = {
    "v1.engine.core:EngineCore.post_step": (
        "does nothing else",
        "if not self.async_scheduling and self.use_spec_decode and model_executed:"),
}

VLLM_ASCEND_ENGINE_DRAFTER: Table = {
    "worker.model_runner_v1": {
        "NPUModelRunner.propose_draft_token_ids": (
            "wrapped: a drafter with passes is asked without a number of them",
            "draft_token_ids = self.drafter._propose(",
            "sampling_metadata=sampling_metadata"),
        "NPUModelRunner.sample_tokens(grammar_output)": (
            "wrapped: bookkeeping comes first, and a list of drafts is not copied",
            "self._draft_token_ids = self.propose_draft_token_ids(sampled_token_ids, "
            "self.input_batch.sampling_metadata, scheduler_output, spec_decode_metadata,",
            "propose_draft_token_ids(sampler_output.sampled_token_ids)"),
        "NPUModelRunner._copy_draft_token_ids_to_cpu": (
            "names the requests of what it does not copy",
            "self._draft_token_req_ids = self.input_batch.req_ids.copy()",
            "if not torch.is_tensor(draft_token_ids):"),
    },
    "spec_decode.llm_base_proposer": {
        "AscendSpecDecodeBaseProposer(SpecDecodeBaseProposer)": "the class that loads drafters",
        "AscendSpecDecodeBaseProposer.__init__": (
            "passes that are captured are another object than the method",
            "self._runnable = self._run_merged_draft"),
        "AscendSpecDecodeBaseProposer.get_model()": "its compute_logits is wrapped while it drafts",
        "AscendSpecDecodeBaseProposer._propose": (
            "a number of passes that is set for a step holds in all of it; a head is of type llama",
            "isinstance(self.get_model(), (Eagle3LlamaForCausalLM,",
            "for draft_index in range(1, self.num_speculative_tokens):"),
        "AscendSpecDecodeBaseProposer._run_merged_draft": (
            "likewise; each pass takes the likeliest token of what compute_logits returns",
            "logits = self.model.compute_logits(sample_hidden_states)",
            "draft_token_ids = logits.argmax(dim=-1)",
            "if self.num_speculative_tokens == 1 or self.parallel_drafting:",
            "for draft_index in range(self.num_speculative_tokens - 1):"),
        "AscendSpecDecodeBaseProposer._maybe_share_embeddings(target_language_model)": (
            "wrapped: the head is asked whether it has an embedding of its own",
            "if not self.model.has_own_embed_tokens:",
            "self.model.model.embed_tokens = target_embed_tokens"),
        "AscendSpecDecodeBaseProposer._maybe_share_lm_head(model)": (
            "wrapped: leaves an EAGLE-3 head without an output layer; if not, the wrapper can go",
            "if self.method in ('eagle', 'dflash'):"),
    },
}

VERL_PLATFORM: Table = {
    "plugin.platform.platform_manager:PlatformRegistry.register(platform)": "the CPU platform",
    "utils.distributed:initialize_global_process_group_ray(timeout_second, backend)":
        "patched on CPU: the backend string cpu:gloo,cpu:gloo is refused by torch",
}
# fmt: on

ABSTRACT = [
    Row(
        "vllm",
        "v1.worker.gpu.spec_decode.speculator",
        "BaseSpeculator",
        "what a drafter of the second runner must define",
        abstract=("capture", "init_cudagraph_manager", "propose"),
        versions=(VLLM_CPU_INSTALLED,),
    ),
    Row(
        "vllm",
        "v1.metrics.loggers",
        "StatLoggerBase",
        "what a stat logger must define",
        abstract=("__init__", "record", "log_engine_initialized"),
    ),
    Row(
        "verl",
        "plugin.platform.platform_base",
        "PlatformBase",
        "what the CPU platform must define",
        abstract=(
            "communication_backend_name", "cudart", "current_device", "device_count",
            "device_module", "device_name", "empty_cache", "get_device_capability", "is_available",
            "is_ipc_supported", "manual_seed", "manual_seed_all", "nvtx_range", "profiler_start",
            "profiler_stop", "ray_noset_envvars", "ray_resource_name", "set_allocator_settings",
            "set_device", "synchronize", "vendor_name", "visible_devices_envvar",
        ),
    ),
]  # fmt: skip

SINCE_024 = ("0.24", *PROBED_VLLM, VLLM_CPU_INSTALLED)
CONTRACT = [
    *rows("vllm", VLLM_SAMPLERS),
    *rows("vllm", VLLM_PROPOSER),
    *rows("vllm", VLLM_LATE_BINDING),
    *rows("vllm", VLLM_LATE_BINDING_BY_NUMBER, SINCE_024),
    *rows("vllm_ascend", VLLM_ASCEND_LATE_BINDING),
    *rows("vllm", VLLM_DRAFTS_WITH_OUTPUT),
    *rows("vllm", VLLM_GRAMMARS, ("0.30", VLLM_CPU_INSTALLED)),
    *rows("vllm", VLLM_ENGINE_DRAFTER, SINCE_024),
    *rows("vllm", VLLM_ASKS_FOR_DRAFTS, SINCE_024),
    *rows("vllm", VLLM_ASKS_FOR_DRAFTS_023, ("0.23",)),
    *rows("vllm_ascend", VLLM_ASCEND_ENGINE_DRAFTER),
    *rows("vllm", VLLM_EXPERTS_024, ("0.23", "0.24", *PROBED_VLLM)),
    *rows("vllm", VLLM_EXPERTS, (VLLM_CPU_INSTALLED,)),
    *rows("vllm", VLLM_GRAPHS),
    *rows("vllm", VLLM_DATA_PARALLEL),
    *rows("vllm_ascend", ASCEND_DATA_PARALLEL),
    *rows("vllm", VLLM_CONFIGURATION),
    *rows("vllm", VLLM_STATISTICS),
    *rows("vllm", VLLM_CPU_WORKAROUNDS, (VLLM_CPU_INSTALLED,)),
    *rows("vllm", VLLM_TREES, SINCE_024),
    *rows("vllm", VLLM_TREES_CPU, (*PROBED_VLLM, VLLM_CPU_INSTALLED)),
    *rows("vllm", VLLM_TREES_SPLIT, ("0.23", "0.24")),
    *rows("vllm", VLLM_TREES_CUDA, ("0.24",)),
    *rows("vllm", VLLM_SECOND_RUNNER, (VLLM_CPU_INSTALLED,)),
    *rows("vllm_ascend", VLLM_ASCEND_WRAPPED, ASCEND_VERSIONS),
    *rows("vllm_ascend", VLLM_ASCEND),
    *rows("vllm_ascend", VLLM_ASCEND_TREES),
    *rows("vllm_ascend", VLLM_ASCEND_CHANGED, PROBED_ASCEND),
    *rows("verl", VERL_ROLLOUT),
    *rows("verl", VERL_TRAINER),
    *rows("verl", VERL_HEAD_TRAINING),
    *rows("megatron", MEGATRON),
    *rows("verl", VERL_REPLAY_BUFFER),
    *rows("verl", VERL_AGENT_LOOP),
    *rows("verl", VERL_DEATHS),
    *rows("vllm", VLLM_DEATHS),
    *rows("vllm", VLLM_TIES, (*PROBED_VLLM, VLLM_CPU_INSTALLED)),
    *rows("vllm", ATTENTION_BACKENDS),
    *rows("vllm", VLLM_BATCH_INVARIANT_024, ("0.23", "0.24")),
    *rows("vllm", VLLM_BATCH_INVARIANT, (*PROBED_VLLM, VLLM_CPU_INSTALLED)),
    *rows("vllm_ascend", VLLM_ASCEND_BATCH_INVARIANT),
    *rows("verl", VERL_PLATFORM),
    *ABSTRACT,
]
