"""verl's vLLM server with the drafter checked, bound and recorded.

The server is used for the baseline too: what differs between two sides of a comparison is the
engine's ``speculative_config``, nothing in the way they are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity, group_of
from sam_rollout.integrations.verl.failures import DeadPartError, describe
from sam_rollout.integrations.verl.names import ROLLOUT_NAME
from sam_rollout.integrations.verl.sharing import TextSharing, find_name
from sam_rollout.integrations.vllm.dead_engine import CAUSE_ENV, answer_or_die, cause_of_death
from sam_rollout.integrations.vllm.engine_group import (
    EngineRecorders,
    ask_engines,
    engine_count,
)
from sam_rollout.integrations.vllm.request_rules import keep_rules_with_drafts
from sam_rollout.integrations.vllm.settings import ADDITIONAL_CONFIG_KEY, EngineSettings
from sam_rollout.integrations.vllm.startup_check import (
    PROBE_TOKENS,
    DeadDrafterError,
    check_alive,
    check_drafters,
    check_samplers,
)
from sam_rollout.integrations.vllm.step_recorder import EngineStepRecorder, on_this_clock
from sam_rollout.sources.model import IN_TEXT
from sam_rollout.telemetry.control import EXTRA_ARGS_KEY as CONTROL_KEY
from sam_rollout.telemetry.progress import EngineProgress, total
from sam_rollout.telemetry.records import (
    RequestRecord,
    RequestTotals,
    TraceRecord,
    table_of,
)

WARM_UP_TOKENS = 16
ENGINE_THREADS_ENV = "SAM_ENGINE_OMP_NUM_THREADS"
# Of a response's extra fields: its id here, by which the trainer finds its counts.
REQUEST_ID_FIELD = "sam_request_id"


@dataclass
class ReplicaRecords:
    """What one engine recorded since the last drain.

    Under data parallelism a server has several; `replica` numbers all engines of the rollout.
    """

    replica: int
    engine_steps: pa.Table
    requests: pa.Table
    request_ids: list[str]  # of the rows of `requests`
    traces: pa.Table | None
    drafter_counters: dict[str, float]


@dataclass
class _FinishedRequest:
    request_id: str
    identity: RequestIdentity | None
    prompt_ids: list[int]
    response_ids: list[int]
    start_s: float
    end_s: float
    finish_reason: str
    control: bool

    def who_and_when(self) -> dict[str, Any]:
        """The columns that a request's record and its trace share."""
        return {
            "group": self.identity.group if self.identity else group_of(self.prompt_ids),
            "sibling": self.identity.sibling if self.identity else 0,
            "start_s": self.start_s,
            "end_s": self.end_s,
        }

    def trace(self, place: dict[str, Any]) -> TraceRecord:
        """The tokens themselves."""
        return TraceRecord(
            **place,
            **self.who_and_when(),
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
        )


def worker_extension(device: str) -> str:
    """Name the class to mix into the engine's workers on a device of verl's."""
    if device == "npu":
        module = "sam_rollout.integrations.verl.worker_extension_ascend"
        return f"{module}.SamColocateAscendWorkerExtension"
    return "sam_rollout.integrations.verl.worker_extension.SamColocateWorkerExtension"


class SamHttpServer(vLLMHttpServer):
    """vLLM server of one rollout replica."""

    _failed_call = ""  # of the training side's
    _to_probe = False  # a model that drafts, before the first response
    _dead: DeadDrafterError | None = None  # what the probe found
    _sharing: TextSharing | None = None

    def _get_worker_extension_cls(self) -> str:
        return worker_extension(get_device_name())

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine with as many threads as its device profile gives it."""
        # Read by the engine's process when it starts; the trainer on the same cores has its own.
        if threads := os.environ.get(ENGINE_THREADS_ENV):
            os.environ["OMP_NUM_THREADS"] = threads
        answer_or_die()  # where entry points are not installed
        with tempfile.NamedTemporaryFile(prefix="sam-engine-", suffix=".txt") as file:
            os.environ[CAUSE_ENV] = file.name  # made anew by an engine that dies
        try:
            await super().launch_server(*args, **kwargs)
        except Exception as error:
            if Path(os.environ[CAUSE_ENV]).exists():
                raise DeadPartError(self._engine_died()) from error
            raise

    def _engine_died(self) -> str:
        return f"the engine of replica {self.replica_rank} died: {cause_of_death()}"

    async def trouble(self) -> str:
        """What ended this replica's engine, or a weight sync; empty while all is well."""
        engine = getattr(self, "engine", None)
        if engine is not None and engine.errored:
            return self._engine_died()
        return self._failed_call

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """Call the engine's workers for the training side, and remember if that fails."""
        try:
            await super().collective_rpc(method, *args, **kwargs)
        except Exception as error:
            self._failed_call = f"replica {self.replica_rank} failed in {method}: {describe(error)}"
            raise

    def _read_settings(self) -> EngineSettings:
        engine_kwargs = self.config.engine_kwargs[self._get_engine_kwargs_key()]
        return EngineSettings.from_mapping(
            engine_kwargs["additional_config"][ADDITIONAL_CONFIG_KEY]
        )

    async def run_server(self, args: argparse.Namespace) -> None:
        """Start the engine, refuse to go on with a wrong drafter, attach the step recorder."""
        keep_rules_with_drafts()  # where entry points are not installed
        await super().run_server(args)
        self._settings = settings = self._read_settings()
        bound = await ask_engines(self.engine, "sam_bind")
        reports = [report for workers in bound for report in workers]
        # Printed, not logged: the proof belongs in every log, whatever its level.
        print(check_drafters(reports, settings.sam), flush=True)
        print(check_samplers(reports, settings.sampler), flush=True)
        await asyncio.gather(*(self._warm_up(engine) for engine in range(len(bound))))
        self._finished: list[_FinishedRequest] = []
        model = settings.sam.sources.model
        # A head that the run trains may know nothing yet.
        certain = model.method not in IN_TEXT and not model.trains
        self._to_probe = settings.sam.drafts_with_model and certain
        self._probing = asyncio.Lock()
        self._recorders = EngineRecorders(len(bound))
        await ask_engines(self.engine, "sam_drain")  # the warm-up is nobody's rollout
        if self.engine.logger_manager is None:
            raise RuntimeError(
                "rollout.disable_log_stats=True leaves no per-step statistics to record: "
                "set actor_rollout_ref.rollout.disable_log_stats=False"
            )
        self.engine.logger_manager.stat_loggers.append(self._recorders)

    async def _warm_up(self, engine: int) -> None:
        """Run one short request, so that lazy initialisation does not count as rollout time.

        The periodic prompt makes a drafter draft, and so warms verification, too.
        """
        sampling = SamplingParams(temperature=1.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        prompt = TokensPrompt(prompt_token_ids=[1, 2, 3] * 5)
        warm_up = self.engine.generate(
            prompt, sampling, request_id=f"sam-warm-up-{engine}", data_parallel_rank=engine
        )
        async for _ in warm_up:
            pass

    async def _probe(self, prompt_ids: list[int]) -> None:
        """Before the first response: refuse to go on with a model that drafts and knows nothing.

        Not earlier: the engine begins with random weights, and is sent the policy's.
        """
        async with self._probing:
            if not self._to_probe:
                return
            if self._dead is not None:
                raise self._dead
            engines = engine_count(self.engine)
            await ask_engines(self.engine, "sam_probe", [(True,)] * engines)
            drafter = self.engine.vllm_config.speculative_config.draft_model_config
            longest = min(
                model.max_model_len for model in (self.engine.model_config, drafter) if model
            )
            # With room for what is sampled and drafted.
            room = longest - PROBE_TOKENS - self._settings.sam.max_draft_tokens
            prompt = TokensPrompt(prompt_token_ids=prompt_ids[:room])
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=PROBE_TOKENS,
                ignore_eos=True,
                extra_args={CONTROL_KEY: True},
            )
            for engine in range(engines):
                async for _ in self.engine.generate(
                    prompt, sampling, request_id=f"sam-probe-{engine}", data_parallel_rank=engine
                ):
                    pass
            answers = await ask_engines(self.engine, "sam_probe", [(False,)] * engines)
            try:
                for workers in answers:
                    print(check_alive(workers, self._settings.sam), flush=True)
            except DeadDrafterError as error:
                self._dead = error
                raise
            await ask_engines(self.engine, "sam_drain")  # nobody's rollout, as the warm-up
            for recorder in self._recorders.recorders:
                recorder.drain(step=0, split=TRAIN_SPLIT, replica=0, session_steps=None)
            self._to_probe = False

    def _resolve_sleep_level(self) -> int:
        """At most 1 with a model that drafts: nobody sends its weights again, as of verl's MTP."""
        level = super()._resolve_sleep_level()
        sam = self._read_settings().sam
        return min(level, 1) if sam.drafts_with_model and sam.sources.model.path else level

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **kwargs: Any,
    ) -> TokenOutput:
        """Generate one response and note who it was and how long it took."""
        if self._to_probe:
            await self._probe(prompt_ids)
        extra_args = sampling_params.get("extra_args") or {}
        identity = RequestIdentity.from_extra_args(extra_args)
        control = self._is_control(identity)
        start_s = time.time()
        self._recorders.work_arrived()
        # verl reads the last output only; without this every token of every request is handed
        # over with all before it, which keeps a core busy.
        sampling_params = {
            **sampling_params,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "extra_args": {**extra_args, CONTROL_KEY: control},
        }
        try:
            with self._sharing.running(identity) if self._sharing else contextlib.nullcontext():
                output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        except EngineDeadError as error:
            raise DeadPartError(self._engine_died()) from error
        if self._sharing is not None:
            self._sharing.ended(identity, prompt_ids, output.token_ids)
        self._finished.append(
            _FinishedRequest(
                request_id=request_id,
                identity=identity,
                prompt_ids=list(prompt_ids),
                response_ids=list(output.token_ids),
                start_s=start_s,
                end_s=time.time(),
                finish_reason=str(output.stop_reason),
                control=control,
            )
        )
        output.extra_fields[REQUEST_ID_FIELD] = request_id
        return output

    def _is_control(self, identity: RequestIdentity | None) -> bool:
        """Whether a request is sampled without drafts; of training traffic only."""
        control = self._settings.control
        if control is None or identity is None or identity.split != TRAIN_SPLIT:
            return False
        return control.is_control(
            step=identity.step, group=identity.group, replica=self.replica_rank
        )

    async def share_texts(self, servers: Mapping[int, Any]) -> None:
        """Tell the servers of all replicas from now on what this one samples, and hear of theirs.

        Args:
            servers: Replica -> its server, this one among them.
        """
        engines = engine_count(self.engine)
        sam = self._settings.sam
        keeps = bool(sam.sources.prompt.earlier_steps and sam.texts.path)
        folder = await asyncio.to_thread(find_name, Path(sam.texts.path)) if keeps else ""
        self._sharing = TextSharing(
            self.replica_rank, servers, engines, self._exchange_texts, folder
        )
        await self._sharing.start()

    async def hear_texts(
        self, replica: int, folder: str, runs: list[tuple] | None, pieces: list[tuple]
    ) -> None:
        """Another server says what runs there and what it sampled; see `TextSharing.hear`."""
        if self._sharing is not None:
            self._sharing.hear(replica, folder, runs, pieces)

    async def _exchange_texts(self, pieces: Sequence[list[tuple]]) -> list[list[tuple]]:
        """Hand every engine its pieces; return what each has sampled since."""
        arguments = [(f"{self.replica_rank}.{engine}", one) for engine, one in enumerate(pieces)]
        answers = await ask_engines(self.engine, "sam_exchange_texts", arguments)
        # One rank's drafts are used; the others have no texts.
        return [[piece for worker in workers for piece in worker] for workers in answers]

    async def progress(self) -> EngineProgress:
        """Where this replica's rollout stands; changes nothing and waits for nobody."""
        recorders = getattr(self, "_recorders", None)
        if recorders is None:
            return EngineProgress()  # still starting
        engines = [recorder.progress() for recorder in recorders.recorders]
        return total([*engines, EngineProgress(finished=len(self._finished))])

    async def drain_records(self, step: int, split: str) -> list[ReplicaRecords]:
        """Hand over everything recorded since the last call, engine by engine.

        Args:
            step: Training step the records are filed under.
            split: ``"train"`` or ``"val"``.
        """
        asked_s = time.monotonic()
        answers = await ask_engines(self.engine, "sam_drain")
        finished, self._finished = self._finished, []
        shares = self._recorders.share_out(finished)
        first = self.replica_rank * len(answers)
        records = [
            self._records(
                {"step": step, "split": split, "replica": first + index},
                recorder,
                workers,
                asked_s,
                share,
            )
            for index, (recorder, workers, share) in enumerate(
                zip(self._recorders.recorders, answers, shares, strict=True)
            )
        ]
        # An engine without counters has no session, which the trainer is to notice.
        telling = next((one for one in records if one.drafter_counters), None)
        if self._sharing is not None and telling is not None:
            telling.drafter_counters |= self._sharing.take_counters()
        return records

    def _records(
        self,
        place: dict[str, Any],
        recorder: EngineStepRecorder,
        workers: list[dict | None],
        asked_s: float,
        finished: list[_FinishedRequest],
    ) -> ReplicaRecords:
        """Join what an engine's workers, its recorder and the server know.

        Args:
            place: Columns of every record: step, split and replica.
        """
        # One rank's drafts are used; the others have no session.
        session = next((part for part in workers if part), None)
        engine_steps = recorder.drain(
            **place, session_steps=on_this_clock(session, asked_s) if session else None
        )
        traces = None
        if self._settings.record_traces:
            traces = table_of(TraceRecord, (request.trace(place) for request in finished))
        return ReplicaRecords(
            replica=place["replica"],
            engine_steps=engine_steps,
            requests=self._request_table(finished, session, place),
            request_ids=[request.request_id for request in finished],
            traces=traces,
            drafter_counters=session["counters"] if session else {},
        )

    def _request_table(
        self, finished: list[_FinishedRequest], session: dict | None, place: dict[str, Any]
    ) -> pa.Table:
        # vLLM appends "-" and eight random characters to the id it was given.
        totals = {
            request_id.rpartition("-")[0] or request_id: RequestTotals(*counts)
            for request_id, counts in (session["requests"] if session else {}).items()
        }
        return table_of(
            RequestRecord,
            (
                RequestRecord(
                    **place,
                    prompt_tokens=len(request.prompt_ids),
                    response_tokens=len(request.response_ids),
                    finish_reason=request.finish_reason,
                    control=request.control,
                    **request.who_and_when(),
                    **totals.get(request.request_id, RequestTotals())._asdict(),
                )
                for request in finished
            ),
        )


class SamReplica(vLLMReplica):
    """A rollout replica whose server is ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SamHttpServer)

    def _get_server_name_prefix(self) -> str:
        # The training side's adapter looks the server up by "<rollout name>_server_...".
        return f"{ROLLOUT_NAME}_"
