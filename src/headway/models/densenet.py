"""DenseNet-201 (arXiv 1608.06993): every layer of a block reads the outputs of all layers before it."""

from __future__ import annotations

from headway.models.convolutional import ConvolutionalBuilder, Feature
from headway.models.table import LayerTable

_DENSENET_DEPTHS = (6, 12, 48, 32)
_GROWTH = 32
_BOTTLENECK = 4


def densenet201(samples: int = 32) -> LayerTable:
    """DenseNet-201 for a thousand classes and images of 224 x 224."""
    net = ConvolutionalBuilder(samples)
    x = net.convolution("features.conv0", Feature(3, 224, 224), 64, 7, stride=2, padding=3)
    x = net.pool(net.norm("features.norm0", x), 3, stride=2, padding=1)
    for block, depth in enumerate(_DENSENET_DEPTHS, start=1):
        for layer in range(1, depth + 1):
            x = _dense_layer(net, f"features.denseblock{block}.denselayer{layer}", x)
        if block < len(_DENSENET_DEPTHS):
            x = _transition(net, f"features.transition{block}", x)
    net.linear("classifier", net.pool_all(net.norm("features.norm5", x)), 1000)
    return net.table("DenseNet-201", f"{samples} images of 224 x 224")


def _dense_layer(net: ConvolutionalBuilder, name: str, inputs: Feature) -> Feature:
    x = net.convolution(f"{name}.conv1", net.norm(f"{name}.norm1", inputs), _BOTTLENECK * _GROWTH, 1)
    x = net.convolution(f"{name}.conv2", net.norm(f"{name}.norm2", x), _GROWTH, 3, padding=1)
    return net.concatenate(inputs, x)


def _transition(net: ConvolutionalBuilder, name: str, inputs: Feature) -> Feature:
    x = net.convolution(f"{name}.conv", net.norm(f"{name}.norm", inputs), inputs.channels // 2, 1)
    return net.pool(x, 2, stride=2, average=True)
