"""Models of other packages are found by their entry points."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError
from lightserve.models import registry
from lightserve.models.registry import get_model_class, read_model_config
from test.models.session import Session
from test.models.tiny import build_hf, build_model, checkpoint_of

PACKAGES = {"biased_llama": "BiasedLlama", "broken": "NoSuchClass", "old": "OldLlama", "unversioned": "Unversioned"}


class BiasedLlama(bm.TpPartBaseModel):
    """What another package would contain."""

    api_version = bm.API_VERSION

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), qkv_bias=True, o_bias=True, ffn_bias=True)


class OldLlama(BiasedLlama):
    api_version = 0


class Unversioned(bm.TpPartBaseModel):
    pass


@pytest.fixture(autouse=True)
def other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that register models, as pip would have installed them."""
    found = [EntryPoint(name, f"{__name__}:{value}", registry.ENTRY_POINTS) for name, value in PACKAGES.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "lightserve.models" else [])


def test_a_model_of_another_package_runs() -> None:
    hf = build_hf("llama-biased")
    config = hf.config.to_dict() | {"model_type": "biased_llama"}

    model = build_model(config, checkpoint_of(hf))

    assert type(model) is BiasedLlama
    assert Session(model).step({0: [1, 2, 3]}).isfinite().all()


def test_a_class_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ModelFilesError, match=r"model_type 'broken': .*:NoSuchClass cannot be imported"):
        get_model_class("broken")


@pytest.mark.parametrize(("name", "version"), [("old", "0"), ("unversioned", "None")])
def test_a_model_for_another_version_of_the_classes_is_refused(name: str, version: str) -> None:
    with pytest.raises(
        ModelFilesError, match=rf"'{name}': .* for version {version} of .*basemodel, and this is version"
    ):
        get_model_class(name)


def test_the_operator_replaces_the_model_type() -> None:
    config = build_hf("llama-gqa").config.to_dict() | {"model_type": "unknown"}

    assert read_model_config(config, "llama").model_type == "llama"
    with pytest.raises(ModelFilesError, match=r"model_type 'unknown' is not supported; `lightserve models` lists"):
        read_model_config(config, None)
