"""Options of the router."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.config.option import FlagGroup, check_options, option

MAX_DEBUG_REQUESTS = 100_000  # some 100 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of the router."""

    router_policy: str = option(
        "priority",
        "order in which waiting requests are admitted; or a class of yours, as my.module:Class",
        "scheduling_policy",
        group=FlagGroup.SCHEDULING,
        choices_from="lightserve.router.policy:PolicyNames",
    )
    router_token_ratio: float = option(
        0.85,
        "share of the KV pool that may be filled by estimated output lengths; 0: reserve the maximum of every request",
        group=FlagGroup.SCHEDULING,
        at_least=0,
    )
    chunked_prefill_size: int | None = option(
        None,
        "prompt tokens in a step that also decodes; grows with the number of decoding and waiting requests; "
        "default: depends on the device",
        "long_prefill_token_threshold",
        group=FlagGroup.COMPUTATION,
        at_least=1,
    )
    itl_target_ms: float | None = option(
        None,
        "longest time between two tokens of a stream while prompts are computed; prompts have their first token sooner "
        "if it is long; default: depends on the device and the number of streams",
        group=FlagGroup.COMPUTATION,
        at_least=1,
    )
    disable_chunked_prefill: bool = option(False, "compute every prompt in a single step", group=FlagGroup.COMPUTATION)
    disable_dynamic_prompt_cache: bool = option(
        False,
        "disable the prefix cache: requests share no prefixes",
        "no_enable_prefix_caching",
        group=FlagGroup.COMPUTATION,
    )
    pinned_prefixes: str | None = option(
        None,
        "JSON or YAML file of prompts by name; each stays in the prefix cache, and a request's task_id names one",
        group=FlagGroup.SCHEDULING,
    )
    request_timeout: float = option(
        0.0, "seconds after which a request ends with an error; 0: never", group=FlagGroup.SCHEDULING, at_least=0
    )
    max_queue_size: int = option(
        2048,
        "maximum number of waiting requests; further ones get status 429",
        "max_queued_requests",
        group=FlagGroup.SCHEDULING,
        at_least=1,
    )
    max_queue_tokens: int = option(
        256 * 1024 * 1024,
        "maximum prompt tokens of all waiting requests; further requests get status 429",
        group=FlagGroup.SCHEDULING,
        at_least=1,
    )
    max_queue_media_gb: float = option(
        4.0,
        "GB of the files of images and sounds of all requests that wait or run; further ones get status 429",
        group=FlagGroup.SCHEDULING,
        at_least=0,
    )
    eos_id: list[int] = option(
        [], "token ids that end a response; default: from the model's files", group=FlagGroup.MODEL_FILES
    )
    debug_requests: int = option(
        256,
        "number of requests whose timeline GET /debug/requests shows, the latest ones; 0: none",
        group=FlagGroup.OBSERVABILITY,
        at_least=0,
        at_most=MAX_DEBUG_REQUESTS,
    )
    log_stats_interval: float = option(
        10.0,
        "seconds between throughput log lines while requests run; 0: none",
        group=FlagGroup.OBSERVABILITY,
        at_least=0,
    )

    def __post_init__(self) -> None:
        check_options(self)
