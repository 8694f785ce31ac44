"""Options of LLM under other servers' names, and those that it does not have."""

from __future__ import annotations

import pytest

from lightserve.errors import OptionError
from lightserve.offline.options import known_options


def test_options_have_the_names_of_other_servers_too() -> None:
    given = {"model_dir": None, "tensor_parallel_size": 2, "pipeline_parallel_size": 3, "device": "cpu"}

    assert known_options(given) == {"model_dir": None, "tp": 2, "pp": 3, "device": "cpu"}


def test_a_json_object_may_be_a_dict() -> None:
    assert known_options({"speculative_config": {"method": "ngram"}}) == {"speculative_config": '{"method": "ngram"}'}


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(OptionError, match="tensor_paralel_size; did you mean tensor_parallel_size"):
        known_options({"tensor_paralel_size": 2})


def test_an_option_is_given_once() -> None:
    with pytest.raises(OptionError, match="tp and tensor_parallel_size are the same option; give one"):
        known_options({"tp": 2, "tensor_parallel_size": 4})
