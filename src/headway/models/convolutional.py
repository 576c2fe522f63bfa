"""Convolutional networks as tables of layers: VGG, ResNet, DenseNet, Inception."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headway.models.table import FLOAT_BYTES, Layer, LayerTable, Parameter, Work

PLACE_BYTES = 8  # of an element in its window


@dataclass(frozen=True, slots=True)
class Feature:
    """One sample's feature map."""

    channels: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.channels * self.height * self.width


@dataclass
class ConvolutionalBuilder:
    """Collects layers for a batch of ``samples`` images.

    What backward will need is kept once, however many layers need it: one ``Feature`` object is one piece of memory.
    """

    samples: int
    layers: list[Layer] = field(default_factory=list)
    _kept: list[Feature] = field(default_factory=list)

    def convolution(
        self,
        name: str,
        inputs: Feature,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        *,
        bias: bool = False,
    ) -> Feature:
        """A convolution."""
        kernel_height, kernel_width = _pair(kernel)
        output = _slide(inputs, channels, (kernel_height, kernel_width), stride, _pair(padding))
        weight = Parameter("weight", (channels, inputs.channels, kernel_height, kernel_width))
        flops = 2.0 * self.samples * output.height * output.width * weight.numel
        parameters = (weight, Parameter("bias", (channels,))) if bias else (weight,)
        self._add(name, parameters, flops, self._bytes(inputs) + self._bytes(output))
        self._keep(inputs)
        return output

    def activation(self, inputs: Feature) -> Feature:
        """A ReLU in place, counted with the layer before it."""
        self._extend(2 * self._bytes(inputs))
        self._keep(inputs)
        return inputs

    def norm(self, name: str, inputs: Feature, *, activation: bool = True) -> Feature:
        """Batch norm, which reads its input twice (statistics, then normalising), and a ReLU in place."""
        parameters = (Parameter("weight", (inputs.channels,)), Parameter("bias", (inputs.channels,)))
        passes, kernels = (5, 3) if activation else (3, 2)
        self._add(name, parameters, 4.0 * self.samples * inputs.numel, passes * self._bytes(inputs), kernels)
        self._keep(inputs)
        output = replace(inputs)
        if activation:
            self._keep(output)
        return output

    def linear(self, name: str, inputs: int, outputs: int) -> None:
        """A dense layer with bias on one vector per sample."""
        parameters = (Parameter("weight", (outputs, inputs)), Parameter("bias", (outputs,)))
        moved = self.samples * (inputs + outputs) * FLOAT_BYTES
        self._add(name, parameters, 2.0 * self.samples * inputs * outputs, moved)

    def pool(
        self, inputs: Feature, kernel: int, stride: int = 1, padding: int = 0, *, average: bool = False
    ) -> Feature:
        """Pooling, counted with the layer before it. Max pooling also saves the indices."""
        output = _slide(inputs, inputs.channels, (kernel, kernel), stride, (padding, padding))
        self._extend(self._bytes(inputs) + self._bytes(output))
        self._keep(inputs)
        if not average:
            places_bytes = float(self.samples * output.numel * PLACE_BYTES)
            self._work(Work(kept_bytes=places_bytes, single_bytes=places_bytes))
        return output

    def pool_all(self, inputs: Feature) -> int:
        """Average over space, counted with the layer before it. Returns the number of channels."""
        self._extend(self._bytes(inputs))
        return inputs.channels

    def concatenate(self, *features: Feature) -> Feature:
        """Copy feature maps into one, counted with the layer before it."""
        joined = Feature(sum(f.channels for f in features), features[0].height, features[0].width)
        self._extend(2 * self._bytes(joined))
        return joined

    def add(self, inputs: Feature) -> Feature:
        """Add a residual and apply a ReLU, counted with the layer before it."""
        self._extend(5 * self._bytes(inputs), kernels=2)
        output = replace(inputs)
        self._keep(output)
        return output

    def cut(self, feature: Feature) -> Feature:
        """Allow a pipeline stage to end here: later layers only need ``feature``."""
        self.layers[-1] = replace(self.layers[-1], cut_bytes=self._bytes(feature))
        return feature

    def table(self, name: str, batch: str) -> LayerTable:
        """The collected layers as a table."""
        return LayerTable(name, batch, self.samples, tuple(self.layers))

    def _bytes(self, feature: Feature) -> float:
        return float(self.samples * feature.numel * FLOAT_BYTES)

    def _add(
        self,
        name: str,
        parameters: tuple[Parameter, ...],
        flops: float,
        activation_bytes: float,
        kernels: int = 1,
    ) -> None:
        moved = activation_bytes + sum(p.numel for p in parameters) * FLOAT_BYTES
        self.layers.append(Layer(name, parameters, Work(flops, moved, kernels)))

    def _keep(self, feature: Feature) -> None:
        if not any(feature is kept for kept in self._kept):
            self._kept.append(feature)
            self._work(Work(kept_bytes=self._bytes(feature)))

    def _extend(self, moved_bytes: float, kernels: int = 1) -> None:
        self._work(Work(0.0, moved_bytes, kernels))

    def _work(self, more: Work) -> None:
        last = self.layers[-1]
        work = last.work + more
        self.layers[-1] = replace(last, work=work)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _slide(
    inputs: Feature, channels: int, kernel: tuple[int, int], stride: int, padding: tuple[int, int]
) -> Feature:
    height = (inputs.height + 2 * padding[0] - kernel[0]) // stride + 1
    width = (inputs.width + 2 * padding[1] - kernel[1]) // stride + 1
    return Feature(channels, height, width)


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
