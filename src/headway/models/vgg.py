"""VGG-16 (arXiv 1409.1556), configuration D without normalisation: most of its parameters are in one dense layer."""

from __future__ import annotations

from headway.models.convolutional import ConvolutionalBuilder, Feature
from headway.models.table import LayerTable

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def vgg16(samples: int = 32) -> LayerTable:
    """VGG-16 for a thousand classes and images of 224 x 224."""
    net = ConvolutionalBuilder(samples)
    x, index = Feature(3, 224, 224), 0
    for channels, depth in _STAGES:
        for _ in range(depth):
            x = net.cut(
                net.activation(net.convolution(f"features.{index}", x, channels, 3, padding=1, bias=True))
            )
            index += 2  # an activation follows
        x = net.cut(net.pool(x, 2, stride=2))
        index += 1
    for name, inputs, outputs in (("0", x.numel, 4096), ("3", 4096, 4096), ("6", 4096, 1000)):
        net.linear(f"classifier.{name}", inputs, outputs)
    return net.table("VGG-16", f"{samples} images of 224 x 224")
