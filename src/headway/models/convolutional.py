"""Counting convolutional networks: each call adds a layer to the table and gives the shape of its output."""

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
        """A dense layer with bias on one vector a sample."""
        parameters = (Parameter("weight", (outputs, inputs)), Parameter("bias", (outputs,)))
        moved = self.samples * (inputs + outputs) * FLOAT_BYTES
        self._add(name, parameters, 2.0 * self.samples * inputs * outputs, moved)

    def pool(
        self, inputs: Feature, kernel: int, stride: int = 1, padding: int = 0, *, average: bool = False
    ) -> Feature:
        """Pooling, counted with the layer before it. That of the largest keeps where each was."""
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
        """A stage of a pipeline may end here: ``feature`` is all that later layers need."""
        self.layers[-1] = replace(self.layers[-1], cut_bytes=self._bytes(feature))
        return feature

    def table(self, name: str, batch: str) -> LayerTable:
        """Everything collected."""
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
        if not any(feature is other for other in self._kept):
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
