"""Names of flags and metrics in the last release. They still work, unlisted, and go with the next one."""

FLAGS: dict[str, tuple[str, ...]] = {  # by flag
    "min_remote_prefill_tokens": ("min_split_tokens",),
    "stream_log": ("journal",),
    "stream_log_ttl": ("journal_ttl",),
    "pinned_prefixes": ("static_prompts",),
}
METRICS: dict[str, str] = {  # by former name
    "kv_split_given_up_tokens_total": "kv_transfer_given_up_tokens_total",
    "kv_split_received_tokens_total": "kv_transfer_received_tokens_total",
    "kv_split_recomputed_tokens_total": "kv_transfer_recomputed_tokens_total",
    "kv_split_requests_waiting": "kv_transfer_requests_waiting",
    "kv_split_sent_tokens_total": "kv_transfer_sent_tokens_total",
    "kv_split_waited_tokens_total": "kv_transfer_waited_tokens_total",
    "kv_split_relieved_tokens_total": "kv_transfer_local_prefill_tokens_total",
    "kv_tier_gated_tokens_total": "kv_tier_recomputed_tokens_total",
    "journal_streams_lost_total": "resumable_streams_lost_total",
    "journal_streams_resumed_total": "resumable_streams_resumed_total",
    "journal_streams_taken_over_total": "resumable_streams_taken_over_total",
}
