"""Extends verl's vLLM server to check the drafter, record steps and share texts."""

import argparse
import asyncio
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from sam_rollout.config import SamConfig
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.integrations.verl.draft_proof import DraftProof, candidates
from sam_rollout.integrations.verl.drafter_probe import DrafterProbe, needs_probe
from sam_rollout.integrations.verl.failures import DeadPartError, describe
from sam_rollout.integrations.verl.interruptions import INTERRUPTED, continued
from sam_rollout.integrations.verl.registered_names import ROLLOUT_NAME
from sam_rollout.integrations.verl.replica_records import (
    FinishedRequest,
    Place,
    ReplicaRecords,
    join_records,
)
from sam_rollout.integrations.verl.sharing import TextSharing
from sam_rollout.integrations.vllm.drafting.startup_check import check_drafters, check_samplers
from sam_rollout.integrations.vllm.engine_settings import settings_of
from sam_rollout.integrations.vllm.scheduling.request_rules import keep_rules_with_drafts
from sam_rollout.integrations.vllm.serving.dead_engine import (
    CAUSE_ENV,
    answer_or_die,
    cause_of_death,
)
from sam_rollout.integrations.vllm.serving.engine_group import (
    EngineRecorders,
    ask_engines,
    engine_count,
)
from sam_rollout.telemetry.progress import EngineProgress, total
from sam_rollout.telemetry.proof import Compared

WARM_UP_TOKENS = 16
ABORTED_WITHIN_S = 5.0  # longest wait for the last outputs of aborted requests
# Arguments of `generate` that add images or other data to a prompt's tokens.
MEDIA = ("image_data", "video_data", "audio_data", "mm_processor_kwargs", "kv_transfer_params")
ENGINE_THREADS_ENV = "SAM_ENGINE_OMP_NUM_THREADS"


def sleep_level(deepest: int, sam: SamConfig) -> int:
    """Return the deepest sleep level that an engine may use.

    Level 2 drops all weights. A sync of the policy's weights does not restore the weights of a
    drafting model.
    """
    return min(deepest, 1) if sam.drafts_with_model and sam.sources.model.path else deepest


class SamHttpServer(vLLMHttpServer):
    """The vLLM server of one rollout replica."""

    _failed_call = ""  # the error of the training side's last failed call
    _probe: DrafterProbe | None = None  # checks a drafting model before the first response
    _sharing: TextSharing | None = None

    def _get_worker_extension_cls(self) -> str:
        return "sam_rollout.integrations.verl.worker_extension.SamColocateWorkerExtension"

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine with the number of threads that the device profile sets.

        Raises:
            DeadPartError: The engine died; the message names the cause.
        """
        # The engine reads OMP_NUM_THREADS when it starts; the trainer has its own thread count.
        if threads := os.environ.get(ENGINE_THREADS_ENV):
            os.environ["OMP_NUM_THREADS"] = threads
        answer_or_die()  # needed if our entry points are not installed
        with tempfile.NamedTemporaryFile(prefix="sam-engine-", suffix=".txt") as file:
            os.environ[CAUSE_ENV] = file.name  # a dying engine creates this file again
        try:
            await super().launch_server(*args, **kwargs)
        except Exception as error:
            if Path(os.environ[CAUSE_ENV]).exists():
                raise DeadPartError(self._engine_died()) from error
            raise

    def _engine_died(self) -> str:
        return f"the engine of replica {self.replica_rank} died: {cause_of_death()}"

    async def trouble(self) -> str:
        """Return the error that killed the engine or failed a call from the trainer; "" if none."""
        engine = getattr(self, "engine", None)
        if engine is not None and engine.errored:
            return self._engine_died()
        return self._failed_call

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """Call the engine's workers for the training side; keep the error if the call fails."""
        try:
            await super().collective_rpc(method, *args, **kwargs)
        except Exception as error:
            self._failed_call = f"replica {self.replica_rank} failed in {method}: {describe(error)}"
            raise

    async def run_server(self, args: argparse.Namespace) -> None:
        """Start the engine, check its drafter and sampler, and attach the step recorder."""
        keep_rules_with_drafts()  # needed if our entry points are not installed
        await super().run_server(args)
        self._settings = settings = settings_of(self.engine.vllm_config)
        bound = await ask_engines(self.engine, "sam_bind")
        reports = [report for workers in bound for report in workers]
        # These lines are printed, not logged, because log levels must not hide them.
        print(check_drafters(reports, settings.sam), flush=True)
        print(check_samplers(reports, settings.sampler), flush=True)
        await asyncio.gather(*(self._warm_up(engine) for engine in range(len(bound))))
        self._finished: list[FinishedRequest] = []
        self.engine.add_request = self._landing_noted(self.engine.add_request)
        self._under_way: dict[object, RequestIdentity | None] = {}  # identities of running requests
        self._admitted_s: dict[str, float] = {}  # times at which requests were admitted
        self._landing: set[str] = set()  # ids of admitted requests on their way to the engine
        self._interrupted: list[RequestIdentity | None] = []  # emptied by `drain_records`
        self._recorders = EngineRecorders(len(bound))
        self._proof = DraftProof(self.engine, settings.sampler, self._recorders)
        if needs_probe(settings.sam):
            self._probe = DrafterProbe(self.engine, settings.sam, self._recorders)
        await ask_engines(self.engine, "sam_drain")  # drops the warm-up's records
        self.engine.logger_manager.stat_loggers.append(self._recorders)

    async def _warm_up(self, engine: int) -> None:
        """Run one short request, so that lazy initialisation does not count as rollout time."""
        sampling = SamplingParams(temperature=1.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        prompt = TokensPrompt(prompt_token_ids=[1, 2, 3] * 5)
        warm_up = self.engine.generate(
            prompt, sampling, request_id=f"sam-warm-up-{engine}", data_parallel_rank=engine
        )
        async for _ in warm_up:
            pass

    def _resolve_sleep_level(self) -> int:
        return sleep_level(super()._resolve_sleep_level(), self._settings.sam)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """Generate one response, and record its identity and times.

        Raises:
            StartUpError: The drafting model does not predict the policy's tokens.
            DeadPartError: The engine died.
        """
        if self._probe is not None:
            await self._probe.passed(prompt_ids)
        extra_args = sampling_params.get("extra_args") or {}
        identity = RequestIdentity.from_extra_args(extra_args)
        resumed = identity.resumed(len(prompt_ids)) if identity else 0
        # With this setting, vLLM sends one output per response, at the response's end. By default,
        # vLLM sends an output after every step, and each output has all tokens so far.
        one_output = {"output_kind": RequestOutputKind.FINAL_ONLY}
        sampling_params = continued(sampling_params, resumed) | one_output
        call = object()  # ids are not unique: with full_determinism, parallel requests share an id
        self._under_way[call] = identity
        start_s = time.time()
        try:
            shown = self._sharing.running(identity) if self._sharing and identity else nullcontext()
            with shown:
                output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        except EngineDeadError as error:
            raise DeadPartError(self._engine_died()) from error
        finally:
            del self._under_way[call]
            self._landing.discard(request_id)
            start_s = self._admitted_s.pop(request_id, start_s)
        if output.stop_reason == INTERRUPTED:
            self._interrupted.append(identity)
            if not output.token_ids:
                return output
        self._finished.append(
            FinishedRequest(
                request_id=request_id,
                identity=identity,
                prompt_ids=list(prompt_ids),
                response_ids=list(output.token_ids),
                start_s=start_s,
                end_s=time.time(),
                finish_reason=str(output.stop_reason),
                resumed_tokens=resumed,
                weights=output.extra_fields.get("global_steps"),
                sampling=None if any(kwargs.get(n) is not None for n in MEDIA) else sampling_params,
            )
        )
        return output

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        """Wait, as verl does, while generation is interrupted; then start to time the request."""
        rejected = await super()._park_until_admitted(request_id)
        self._admitted_s[request_id] = time.time()
        if rejected is None:
            self._landing.add(request_id)
        self._recorders.work_arrived()
        return rejected

    @property
    def _admitting(self) -> int:
        """Number of admitted requests on their way to the engine.

        Before verl interrupts requests, it waits up to 60 s for this number to be 0. verl itself
        counts a request until its first output. Our requests have only one output, at their end.
        With its own count, verl would therefore wait until requests have ended.
        """
        return len(self._landing)

    @_admitting.setter
    def _admitting(self, count: int) -> None:
        pass  # verl's own count is not used

    def _landing_noted(self, add_request: Callable[..., Any]) -> Callable[..., Any]:
        """Return `add_request`, wrapped so that requests leave `_landing` when the call ends."""

        @functools.wraps(add_request)
        async def add(request_id: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return await add_request(request_id, *args, **kwargs)
            finally:
                self._landing.discard(request_id)

        return add

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Interrupt all requests as verl does, and stop timing steps until new requests come."""
        aborted = await super().abort_all_requests(*args, **kwargs)
        if self.node_rank != 0:
            return aborted  # The engine belongs to the replica's first server.
        # The trainer collects the records next. Wait until they include all sampled tokens.
        deadline = time.monotonic() + ABORTED_WITHIN_S
        while self._admitted_s and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._recorders.paused()
        return aborted

    async def share_texts(self, servers: Mapping[int, Any]) -> None:
        engines = engine_count(self.engine)
        self._sharing = TextSharing(self.replica_rank, servers, engines, self._exchange_texts)
        await self._sharing.start()

    async def hear_texts(self, replica: int, runs: list[tuple] | None, pieces: list[tuple]) -> None:
        """Receive another server's running groups and sampled texts; see `TextSharing.hear`."""
        if self._sharing is not None:
            self._sharing.hear(replica, runs, pieces)

    async def _exchange_texts(self, pieces: Sequence[list[tuple]]) -> list[list[tuple]]:
        arguments = [(f"{self.replica_rank}.{engine}", one) for engine, one in enumerate(pieces)]
        answers = await ask_engines(self.engine, "sam_exchange_texts", arguments)
        return [[piece for worker in workers for piece in worker] for workers in answers]

    async def progress(self) -> EngineProgress:
        """Return this replica's progress, without waiting for its engines."""
        recorders = getattr(self, "_recorders", None)
        if recorders is None:
            return EngineProgress()  # the server is starting
        engines = [recorder.progress() for recorder in recorders.recorders]
        return total([*engines, EngineProgress(finished=len(self._finished))])

    async def drain_records(
        self, step: int, split: str, keep: bool = False
    ) -> list[ReplicaRecords]:
        """Return each engine's new records; `keep` lets `check_drafts` sample requests again."""
        asked_s = time.monotonic()
        going_on = [*self._interrupted, *self._under_way.values()]
        self._interrupted = []
        known = [dataclasses.asdict(one) for one in going_on if one is not None]
        answers = await ask_engines(
            self.engine, "sam_drain", [(known,)] * engine_count(self.engine)
        )
        finished, self._finished = self._finished, []
        shares = self._recorders.share_out(finished)
        first, traced = self.replica_rank * len(answers), self._settings.record_traces
        places = [Place(step, split, first + index) for index in range(len(answers))]
        engines = zip(places, self._recorders.recorders, answers, shares, strict=True)
        records = [
            join_records(place, recorder, workers, asked_s, share, traced=traced)
            for place, recorder, workers, share in engines
        ]
        self._proof.candidates = candidates(shares, records) if keep else []
        # If an engine's counters are empty, the sentinel assumes that the engine has no draft
        # session. So the counters of sharing are added only to an engine that has other counters.
        counting = next((one for one in records if one.drafter_counters), None)
        if self._sharing is not None and counting is not None:
            counting.drafter_counters |= self._sharing.take_counters()
        return records

    async def check_drafts(self, count: int, seed: int) -> list[Compared]:
        """Sample some of the last collected requests again, without drafts, and compare texts.

        `count` is the largest number of requests to sample again.

        Raises:
            RuntimeError: Requests are running, and would lose their drafts.
        """
        if self._under_way:
            raise RuntimeError(f"{len(self._under_way)} requests are under way")
        return await self._proof.compare(count, seed)


class SamReplica(vLLMReplica):
    """verl's rollout replica with our server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SamHttpServer)

    def _get_server_name_prefix(self) -> str:
        # The training side's adapter finds the server by the name "<rollout name>_server_...".
        return f"{ROLLOUT_NAME}_"
