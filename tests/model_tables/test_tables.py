from __future__ import annotations

import pytest

from headway.models.catalogue import MODELS
from headway.models.convolutional import inception_v4
from headway.models.table import LayerTable, Work

# Modules that own parameters, tensors, scalars: as counted from the published models (field notes of the project).
COUNTS = {
    "resnet50": (107, 161, 25_557_032),
    "densenet201": (402, 604, 20_013_928),
    "inception-v4": (299, 449, 42_679_816),
    "bert-base": (105, 206, 110_111_042),
    "bert-large": (201, 398, 336_232_258),
}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "resnet50": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer4.2.conv2.weight": (512, 512, 3, 3),
        "fc.weight": (1000, 2048),
    },
    "densenet201": {
        "features.conv0.weight": (64, 3, 7, 7),
        "features.denseblock4.denselayer32.norm1.weight": (1888,),
        "features.denseblock4.denselayer32.conv2.weight": (32, 128, 3, 3),
        "features.transition3.conv.weight": (896, 1792, 1, 1),
        "classifier.weight": (1000, 1920),
    },
    "inception-v4": {
        "features.0.conv.weight": (32, 3, 3, 3),
        "features.11.branch2.4.conv.weight": (256, 224, 1, 7),
        "features.21.branch2_3b.conv.weight": (256, 512, 3, 1),
        "last_linear.weight": (1000, 1536),
    },
    "bert-base": {
        "bert.embeddings.word_embeddings.weight": (30_528, 768),
        "bert.encoder.layer.11.intermediate.dense.weight": (3072, 768),
        "cls.predictions.decoder.bias": (30_528,),
    },
    "bert-large": {
        "bert.embeddings.word_embeddings.weight": (30_528, 1024),
        "bert.encoder.layer.23.output.dense.weight": (1024, 4096),
        "cls.seq_relationship.weight": (2, 1024),
    },
}
# Multiply-accumulates of a forward of one sample, in units of 1e9, as published for these input sizes.
PUBLISHED_GMACS = {"resnet50": 4.1, "densenet201": 4.3, "inception-v4": 12.3}


def table(name: str) -> LayerTable:
    return MODELS[name]()


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_published_models(name: str) -> None:
    model = table(name)
    assert (len(model.layers), len(model.parameters), model.parameter_count) == COUNTS[name]
    assert all(layer.parameters for layer in model.layers)


@pytest.mark.parametrize("name", COUNTS)
def test_shapes(name: str) -> None:
    parameters = table(name).parameters
    assert {key: parameters[key].shape for key in SHAPES[name]} == SHAPES[name]


@pytest.mark.parametrize("name", PUBLISHED_GMACS)
def test_operations_are_those_published(name: str) -> None:
    model = inception_v4() if name == "inception-v4" else table(name)
    assert model.work.flops / model.samples / 2e9 == pytest.approx(PUBLISHED_GMACS[name], rel=0.02)


def test_the_spec_knows_both_orders() -> None:
    model = table("bert-base")
    spec = model.spec
    assert spec.size_bytes == 4 * model.parameter_count
    assert spec.forward_order[0] == "bert.embeddings.word_embeddings"
    assert spec.ready_order[0] == "cls.seq_relationship.bias"
    assert set(spec.by_name) == set(model.parameters)


def test_the_word_embedding_is_tied() -> None:
    tied = [layer for layer in table("bert-large").layers if layer.tied]
    assert [(layer.name, layer.tied) for layer in tied] == [
        ("cls.predictions.decoder", ("bert.embeddings.word_embeddings.weight",))
    ]


@pytest.mark.parametrize("name", COUNTS)
def test_every_layer_works(name: str) -> None:
    for layer in table(name).layers:
        assert min(layer.work.flops, layer.work.moved_bytes, layer.work.kernels) > 0


def test_work_adds_up() -> None:
    assert Work(1, 2, 3) + Work(10, 20, 30) == Work(11, 22, 33)
