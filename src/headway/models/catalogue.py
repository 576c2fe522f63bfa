"""Lists the bundled model tables by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from headway.models.convolutional import densenet201, inception_v4, resnet50, vgg16
from headway.models.table import LayerTable
from headway.models.transformer import bert_base, bert_large, gpt2

PUBLISHED: Mapping[str, Callable[..., LayerTable]] = MappingProxyType(
    {
        "resnet50": resnet50,
        "densenet201": densenet201,
        "inception-v4": partial(inception_v4, pixels=224),
        "bert-base": bert_base,
        "bert-large": bert_large,
    }
)
"""Functions that make tables, by default for the batch of DeAR's evaluation (arXiv 2302.12445; images of 224 x 224)."""

MODELS: Mapping[str, Callable[..., LayerTable]] = MappingProxyType(
    {**PUBLISHED, "vgg16": vgg16, "gpt2": gpt2}
)
"""All models; pass ``samples=`` for another batch."""
