"""Inception-v4 (arXiv 1602.07261) in the form whose ported weights everybody uses: 42,679,816 parameters."""

from __future__ import annotations

from headway.models.convolutional import ConvolutionalBuilder, Feature
from headway.models.table import LayerTable

Kernel = tuple[int, int]
Step = tuple[int, Kernel]  # output channels and kernel of one unit of a branch

_1x1, _3x3, _1x7, _7x1, _1x3, _3x1 = (1, 1), (3, 3), (1, 7), (7, 1), (1, 3), (3, 1)


class _Inception:
    """Convolution, norm and ReLU as a unit, and branches of such units that keep height and width."""

    def __init__(self, net: ConvolutionalBuilder) -> None:
        self.net = net

    def unit(
        self, name: str, inputs: Feature, channels: int, kernel: Kernel, *, stride: int = 1, same: bool = True
    ) -> Feature:
        padding = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
        x = self.net.convolution(f"{name}.conv", inputs, channels, kernel, stride, padding)
        return self.net.norm(f"{name}.bn", x)

    def branch(self, name: str, x: Feature, *steps: Step) -> Feature:
        for index, (channels, kernel) in enumerate(steps):
            x = self.unit(name if len(steps) == 1 else f"{name}.{index}", x, channels, kernel)
        return x

    def pooled(self, name: str, inputs: Feature, channels: int) -> Feature:
        return self.unit(f"{name}.1", self.net.pool(inputs, 3, padding=1, average=True), channels, _1x1)

    def shrink(self, name: str, x: Feature, channels: int) -> Feature:
        return self.unit(name, x, channels, _3x3, stride=2, same=False)


def inception_v4(samples: int = 64, pixels: int = 299) -> LayerTable:
    """Inception-v4 for a thousand classes and images of ``pixels`` x ``pixels``."""
    net = ConvolutionalBuilder(samples)
    parts = _Inception(net)
    x = _stem(parts, Feature(3, pixels, pixels))
    for index in range(6, 10):
        x = _block_a(parts, f"features.{index}", x)
    x = _reduction_a(parts, "features.10", x)
    for index in range(11, 18):
        x = _block_b(parts, f"features.{index}", x)
    x = _reduction_b(parts, "features.18", x)
    for index in range(19, 22):
        x = _block_c(parts, f"features.{index}", x)
    net.linear("last_linear", net.pool_all(x), 1000)
    return net.table("Inception-v4", f"{samples} images of {pixels} x {pixels}")


def _stem(parts: _Inception, x: Feature) -> Feature:
    net = parts.net
    x = parts.shrink("features.0", x, 32)
    x = parts.unit("features.1", x, 32, _3x3, same=False)
    x = parts.unit("features.2", x, 64, _3x3)
    x = net.concatenate(net.pool(x, 3, stride=2), parts.shrink("features.3.conv", x, 96))
    short = parts.unit("features.4.branch0.0", x, 64, _1x1)
    short = parts.unit("features.4.branch0.1", short, 96, _3x3, same=False)
    long = x
    for index, (channels, kernel) in enumerate(((64, _1x1), (64, _1x7), (64, _7x1))):
        long = parts.unit(f"features.4.branch1.{index}", long, channels, kernel)
    x = net.concatenate(short, parts.unit("features.4.branch1.3", long, 96, _3x3, same=False))
    return net.concatenate(parts.shrink("features.5.conv", x, 192), net.pool(x, 3, stride=2))


def _block_a(parts: _Inception, name: str, x: Feature) -> Feature:
    return parts.net.concatenate(
        parts.branch(f"{name}.branch0", x, (96, _1x1)),
        parts.branch(f"{name}.branch1", x, (64, _1x1), (96, _3x3)),
        parts.branch(f"{name}.branch2", x, (64, _1x1), (96, _3x3), (96, _3x3)),
        parts.pooled(f"{name}.branch3", x, 96),
    )


def _reduction_a(parts: _Inception, name: str, x: Feature) -> Feature:
    direct = parts.shrink(f"{name}.branch0", x, 384)
    long = parts.branch(f"{name}.branch1", x, (192, _1x1), (224, _3x3))
    long = parts.shrink(f"{name}.branch1.2", long, 256)
    return parts.net.concatenate(direct, long, parts.net.pool(x, 3, stride=2))


def _block_b(parts: _Inception, name: str, x: Feature) -> Feature:
    return parts.net.concatenate(
        parts.branch(f"{name}.branch0", x, (384, _1x1)),
        parts.branch(f"{name}.branch1", x, (192, _1x1), (224, _1x7), (256, _7x1)),
        parts.branch(f"{name}.branch2", x, (192, _1x1), (192, _7x1), (224, _1x7), (224, _7x1), (256, _1x7)),
        parts.pooled(f"{name}.branch3", x, 128),
    )


def _reduction_b(parts: _Inception, name: str, x: Feature) -> Feature:
    short = parts.unit(f"{name}.branch0.0", x, 192, _1x1)
    short = parts.shrink(f"{name}.branch0.1", short, 192)
    long = parts.branch(f"{name}.branch1", x, (256, _1x1), (256, _1x7), (320, _7x1))
    long = parts.shrink(f"{name}.branch1.3", long, 320)
    return parts.net.concatenate(short, long, parts.net.pool(x, 3, stride=2))


def _block_c(parts: _Inception, name: str, x: Feature) -> Feature:
    direct = parts.unit(f"{name}.branch0", x, 256, _1x1)
    middle = parts.unit(f"{name}.branch1_0", x, 384, _1x1)
    split = [
        parts.unit(f"{name}.branch1_1a", middle, 256, _1x3),
        parts.unit(f"{name}.branch1_1b", middle, 256, _3x1),
    ]
    deep = x
    for index, (channels, kernel) in enumerate(((384, _1x1), (448, _3x1), (512, _1x3))):
        deep = parts.unit(f"{name}.branch2_{index}", deep, channels, kernel)
    split += [
        parts.unit(f"{name}.branch2_3a", deep, 256, _1x3),
        parts.unit(f"{name}.branch2_3b", deep, 256, _3x1),
    ]
    return parts.net.concatenate(direct, *split, parts.pooled(f"{name}.branch3", x, 256))
