"""Image processors of transformers that need torchvision, with Pillow in its place: all but the resizing is theirs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_utils import SizeDict

OF_TORCHVISION = ("torchvision", "image_processing_backends")  # modules that are not imported
DECORATORS = ("auto_docstring",)  # which read the source of the module


class PillowBackend:
    """What a processor inherits from the class with torchvision."""

    rescale_factor = 1 / 255

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __call__(self, images: Sequence[Image.Image], return_tensors: str = "pt", **kwargs: Any) -> Any:
        given = {name: getattr(self, name) for name in dir(type(self)) if not name.startswith("_")}
        options = {name: value for name, value in {**given, **vars(self)}.items() if not callable(value)}
        options["size"] = SizeDict(**options["size"])
        tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
        process: Any = getattr(self, "_preprocess")  # noqa: B009  # of the processor
        return process(tensors, **{**options, **kwargs, "return_tensors": return_tensors, "disable_grouping": True})

    def resize(self, image: Tensor, size: Any, resample: int, antialias: bool = True) -> Tensor:
        pictures = image.flatten(0, -4) if image.dim() > 3 else image[None]
        shape, how = (size.width, size.height), Image.Resampling(resample)
        out = [Image.fromarray(each.permute(1, 2, 0).numpy()).resize(shape, how) for each in pictures]
        found = torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in out])
        return found.view(*image.shape[:-2], size.height, size.width)

    def pad(self, image: Tensor, pad_size: Any) -> Tensor:
        height, width = image.shape[-2:]
        return torch.nn.functional.pad(image, (0, pad_size.width - width, 0, pad_size.height - height))

    def normalize(self, image: Tensor, *colors: Sequence[float]) -> Tensor:
        mean, std = (torch.tensor(values, dtype=image.dtype)[:, None, None] for values in colors)
        return (image - mean) / std

    def rescale_and_normalize(
        self, image: Tensor, do_rescale: bool, factor: float, do_normalize: bool, *colors: Sequence[float]
    ) -> Tensor:
        mean, std = (torch.tensor(values)[:, None, None] for values in colors)
        return (image.float() * factor - mean) / std


class PillowFunctions:
    """Those of torchvision that processors call."""

    @staticmethod
    def pad(image: Tensor, padding: Sequence[int], fill: Sequence[int]) -> Tensor:
        left, top, right, bottom = padding
        assert not any(fill)
        return torch.nn.functional.pad(image, (left, right, top, bottom))


class _Loader(SourceFileLoader):
    """Of a module without what needs torchvision."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        tree = ast.parse(data)
        tree.body = [node for node in tree.body if not _imports_torchvision(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                node.decorator_list = [each for each in node.decorator_list if ast.unparse(each) not in DECORATORS]
        return super().source_to_code(tree, path, _optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        """Not that of a cache."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_processor(name: str, class_name: str) -> Any:
    """``name``: of the model's folder, which has a module of this processor."""
    found = find_spec(f"transformers.models.{name}")
    assert found is not None
    assert found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / f"image_processing_{name}.py"
    full_name = f"transformers.models.{name}.image_processing_{name}_with_pillow"
    spec = spec_from_file_location(full_name, path, loader=_Loader(full_name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    module.TorchvisionBackend, module.tvF = PillowBackend, PillowFunctions
    spec.loader.exec_module(module)
    return getattr(module, class_name)


def _imports_torchvision(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OF_TORCHVISION)
