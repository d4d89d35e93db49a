from types import SimpleNamespace


def scheduler(
    running: int = 1, waiting: int = 0, accepted: tuple[int, ...] | None = None
) -> SimpleNamespace:
    """Return statistics of a step with two drafts; `accepted[i]` were right at position i."""
    spec = None
    if accepted is not None:
        spec = SimpleNamespace(
            num_drafts=2,
            num_draft_tokens=2 * len(accepted),
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=list(accepted),
        )
    return SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, spec_decoding_stats=spec
    )


def progress(
    joining: int = 0, decoding: int = 1, tokens: int = 1, finished: tuple[str, ...] = ()
) -> SimpleNamespace:
    return SimpleNamespace(
        time_to_first_tokens_iter=[0.1] * joining,
        inter_token_latencies_iter=[0.1] * decoding,
        num_preempted_reqs=0,
        num_prompt_tokens=7 * joining,
        num_generation_tokens=tokens,
        finished_requests=[SimpleNamespace(request_id=name) for name in finished],
    )
