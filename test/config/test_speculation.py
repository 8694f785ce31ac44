"""--speculative_config: what it takes, and what the errors say."""

from __future__ import annotations

import pytest

from lightserve.config import WorkerConfig
from lightserve.config.parse import parse_server
from lightserve.config.speculation import SpeculativeConfig
from lightserve.errors import OptionError


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ('{"method": "ngram"}', SpeculativeConfig()),
        (
            '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5, "prompt_lookup_min": 3}',
            SpeculativeConfig("ngram", 7, 5, 3),
        ),
        ('{"method": "eagle3", "model": "m"}', SpeculativeConfig("eagle3", 3, model="m")),
        ('{"method": "mtp", "num_speculative_tokens": 1}', SpeculativeConfig("mtp", 1)),
        ('{"method": "dflash", "model": "m"}', SpeculativeConfig("dflash", 32, model="m")),
        ('{"method": "draft_model", "model": "m"}', SpeculativeConfig("draft_model", 3, model="m")),
        ('{"method": "auto"}', SpeculativeConfig("auto")),
        ("auto", SpeculativeConfig("auto")),
        (
            '{"method": "suffix", "suffix_decoding_max_cached_requests": 9}',
            SpeculativeConfig("suffix", suffix_decoding_max_cached_requests=9),
        ),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": 0}', SpeculativeConfig("suffix", 4, 4, 3, 0)),
        ('{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', SpeculativeConfig("mtp", 2)),
        ('{"method": "deepseek_mtp"}', SpeculativeConfig("mtp", 3)),
        ('{"method": "ngram_gpu"}', SpeculativeConfig()),
        ('{"method": "ngram", "prompt_lookup_max": 1}', SpeculativeConfig(prompt_lookup_max=1, prompt_lookup_min=1)),
        ('{"method": "ngram", "prompt_lookup_min": 9}', SpeculativeConfig(prompt_lookup_max=9, prompt_lookup_min=9)),
        (
            '{"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.79}',
            SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_length=2.79),
        ),
    ],
)
@pytest.mark.parametrize("flag", ["--speculative_config", "--speculative-config"])
def test_the_fields_are_those_of_vllm(text: str, config: SpeculativeConfig, flag: str) -> None:
    assert parse_server([flag, text]).worker.speculation == config


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "2"],
        ["--speculative_config.method=mtp", "--speculative_config.num_speculative_tokens=2"],
        ["--spec-method", "mtp", "--spec-tokens", "2"],
        ["--spec-tokens=2", "--speculative_config", '{"method": "mtp", "num_speculative_tokens": 5}'],
    ],
    ids=" ".join,
)
def test_fields_may_be_flags_as_in_vllm(argv: list[str]) -> None:
    config = parse_server(["--port", "8001", *argv, "--tp", "2"])

    assert config.worker.speculation == SpeculativeConfig("mtp", 2)
    assert (config.http.port, config.worker.tp) == (8001, 2)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--spec-method"], "--spec-method: its value is missing"),
        (["--spec-tokens", "2", "--speculative_config", "auto"], "speculative_config='auto' has no fields"),
        (["--speculative-config.methods", "ngram"], "there is no method"),
    ],
)
def test_a_wrong_flag_of_a_field_is_an_error(argv: list[str], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse_server(argv)


def test_without_the_flag_there_are_no_drafts() -> None:
    assert parse_server([]).worker.speculation is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"method": "medusa"}', "the method 'medusa' is not supported; supported: .*, mtp, dflash, draft_model, auto"),
        ('{"method": "eagle3"}', 'the method eagle3 needs "model"'),
        ('{"method": "draft_model"}', 'the method draft_model needs "model": the folder or the name of a smaller'),
        ('{"method": "dflash"}', 'the method dflash needs "model": the folder or the name of a drafter'),
        ('{"method": "eagle3", "model": ""}', 'the method eagle3 needs "model"'),
        (
            '{"method": "eagle3", "model": "m", "prompt_lookup_max": 3}',
            "prompt_lookup_max is a field of the method ngram",
        ),
        ('{"method": "mtp", "model": "m"}', "model is a field of the method eagle3, not of mtp"),
        ('{"method": "eagle3", "model": 3}', "model"),
        ('{"method": "auto", "num_speculative_tokens": 3}', "the method auto has no other fields"),
        ("{}", "there is no method; supported: .*, mtp, dflash, draft_model, auto"),
        ('{"method": ["ngram"]}', r"the method \['ngram'\] is not supported"),
        ("ngram", "it is not JSON"),
        ("[]", "it must be a JSON object"),
        ('{"method": "ngram", "num_speculative_token": 3}', "did you mean num_speculative_tokens?"),
        ('{"method": "ngram", "model": "m"}', "model is a field of the method eagle3, not of ngram"),
        ('{"method": "ngram", "head": "m"}', "there is no field 'head'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', ">= 1.*num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "<= 32.*num_speculative_tokens"),
        ('{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}', r"prompt_lookup_min \(4\) is more"),
        ('{"method": "ngram", "suffix_decoding_max_cached_requests": 9}', 'needs the method "suffix"'),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": -1}', ">= 0.*suffix_decoding"),
        ('{"method": "mtp", "draft_tensor_parallel_size": 1}', "draft_tensor_parallel_size is not needed: .*leave it"),
        ('{"method": "ngram", "disable_by_batch_size": 9}', "disable_by_batch_size is not needed"),
        ('{"method": "ngram", "rejection_sample_method": "block"}', "'block'.*rejection_sample_method"),
        ('{"method": "ngram", "rejection_sample_method": "synthetic"}', "synthetic_acceptance_length from 1 to 5"),
        ('{"method": "ngram", "synthetic_acceptance_length": 2}', 'needs rejection_sample_method "synthetic"'),
        (
            '{"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5.5}',
            "synthetic_acceptance_length is 5.5; .* from 1 to 5 tokens",
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_may_be_there(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        WorkerConfig(speculative_config=text)


def test_drafts_have_to_fit_into_a_step() -> None:
    with pytest.raises(OptionError, match="num_speculative_tokens is 4, and a step has at most 4 tokens"):
        WorkerConfig(speculative_config='{"method": "ngram"}', batch_max_tokens=4)
