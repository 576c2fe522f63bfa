"""The models there are tables of, by the name the command line and benchmarks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from headway.models.bert import bert_base, bert_large
from headway.models.densenet import densenet201
from headway.models.gpt2 import gpt2
from headway.models.inception import inception_v4
from headway.models.resnet import resnet50
from headway.models.table import LayerTable
from headway.models.vgg import vgg16

PUBLISHED: Mapping[str, Callable[..., LayerTable]] = MappingProxyType(
    {
        "resnet50": resnet50,
        "densenet201": densenet201,
        "inception-v4": partial(inception_v4, pixels=224),
        "bert-base": bert_base,
        "bert-large": bert_large,
    }
)
"""Each makes its table for the batch of DeAR's evaluation (arXiv 2302.12445), whose images are all of 224 x 224."""

MODELS: Mapping[str, Callable[..., LayerTable]] = MappingProxyType(
    {**PUBLISHED, "vgg16": vgg16, "gpt2": gpt2}
)
"""All of them; ``samples=`` makes the table for another batch."""
