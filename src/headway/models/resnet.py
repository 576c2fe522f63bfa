"""ResNet-50 (arXiv 1512.03385), with the stride in the 3 x 3 convolutions, as it is trained today."""

from __future__ import annotations

from headway.models.convolutional import ConvolutionalBuilder, Feature
from headway.models.table import LayerTable

_RESNET_DEPTHS = (3, 4, 6, 3)
_EXPANSION = 4


def resnet50(samples: int = 64) -> LayerTable:
    """ResNet-50 for a thousand classes and images of 224 x 224."""
    net = ConvolutionalBuilder(samples)
    feature = net.norm("bn1", net.convolution("conv1", Feature(3, 224, 224), 64, 7, stride=2, padding=3))
    feature = net.pool(feature, 3, stride=2, padding=1)
    for stage, depth in enumerate(_RESNET_DEPTHS):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            feature = net.cut(_bottleneck(net, f"layer{stage + 1}.{block}", feature, 64 << stage, stride))
    net.linear("fc", net.pool_all(feature), 1000)
    return net.table("ResNet-50", f"{samples} images of 224 x 224")


def _bottleneck(net: ConvolutionalBuilder, name: str, inputs: Feature, width: int, stride: int) -> Feature:
    """1 x 1 to ``width``, 3 x 3, 1 x 1 to four times ``width``, and a projection where the shape changes."""
    x = net.norm(f"{name}.bn1", net.convolution(f"{name}.conv1", inputs, width, 1))
    x = net.norm(f"{name}.bn2", net.convolution(f"{name}.conv2", x, width, 3, stride=stride, padding=1))
    x = net.convolution(f"{name}.conv3", x, _EXPANSION * width, 1)
    net.norm(f"{name}.bn3", x, activation=False)
    if inputs != x:
        short = net.convolution(f"{name}.downsample.0", inputs, x.channels, 1, stride=stride)
        net.norm(f"{name}.downsample.1", short, activation=False)
    return net.add(x)
