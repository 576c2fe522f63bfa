"""Counting transformers: each call adds a layer to the table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headway.models.table import FLOAT_BYTES, Layer, Parameter, Work

MASK_BYTES = 1  # what dropout keeps of an element


@dataclass
class TransformerBuilder:
    """Collects layers for a batch of ``samples`` sequences of ``length`` words."""

    samples: int
    length: int
    width: int
    heads: int
    layers: list[Layer] = field(default_factory=list)

    @property
    def words(self) -> int:
        """How many words a batch has."""
        return self.samples * self.length

    def embedding(self, name: str, rows: int) -> None:
        """Rows that are looked up for every word."""
        moved = 3.0 * self.words * self.width * FLOAT_BYTES  # rows read, written and added to the others
        self._add(name, (Parameter("weight", (rows, self.width)),), Work(self.words * self.width, moved, 2))

    def norm(self, name: str) -> None:
        """Layer norm with the dropout and the residual before it."""
        parameters = (Parameter("weight", (self.width,)), Parameter("bias", (self.width,)))
        elements = self.words * self.width
        kept_bytes = elements * (FLOAT_BYTES + MASK_BYTES)
        self._add(
            name, parameters, Work(8.0 * elements, 8.0 * elements * FLOAT_BYTES, 3, kept_bytes, kept_bytes)
        )

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        rows: int,
        after: Work | None = None,
        shares_input: bool = False,
    ) -> None:
        """A dense layer on ``rows`` vectors, and the parameterless work that follows it.

        What it ``shares_input`` with keeps that for backward.
        """
        parameters = (Parameter("weight", (outputs, inputs)), Parameter("bias", (outputs,)))
        moved = float(rows * (inputs + outputs) + inputs * outputs) * FLOAT_BYTES
        kept_bytes = 0 if shares_input else rows * inputs * FLOAT_BYTES
        self._add(
            name, parameters, Work(2.0 * rows * inputs * outputs, moved, 1, kept_bytes) + (after or Work())
        )

    def tied_linear(self, name: str, outputs: int, tied: str, after: Work, *, bias: bool = True) -> None:
        """A dense layer on all words whose weight is the parameter ``tied`` of another layer."""
        moved = float(self.words * (self.width + outputs) + self.width * outputs) * FLOAT_BYTES
        kept_bytes = self.words * self.width * FLOAT_BYTES
        work = Work(2.0 * self.words * self.width * outputs, moved, 1, kept_bytes) + after
        own = (Parameter("bias", (outputs,)),) if bias else ()
        self.layers.append(Layer(name, own, work, (tied,)))

    def cut(self) -> None:
        """A stage of a pipeline may end here: a vector for every word is all that later layers need."""
        self.layers[-1] = replace(self.layers[-1], cut_bytes=float(self.words * self.width * FLOAT_BYTES))

    def elementwise(self, elements: float, passes: int, kernels: int, *, in_single: bool = False) -> Work:
        """So many passes over so many elements, which are kept, ``in_single`` precision even if it is mixed."""
        kept_bytes = elements * FLOAT_BYTES
        return Work(
            passes * elements, passes * kept_bytes, kernels, kept_bytes, kept_bytes if in_single else 0.0
        )  # fmt: skip

    def attention(self) -> Work:
        """Scores, scaling, mask, softmax, dropout and the weighted sum.

        Kept are query, key, value, and the scores behind softmax, behind dropout, and its mask.
        """
        scores = float(self.samples * self.heads * self.length**2)
        products = Work(
            4.0 * self.words * self.length * self.width,
            4.0 * self.words * self.width * FLOAT_BYTES,
            2,
            3.0 * self.words * self.width * FLOAT_BYTES + scores * (FLOAT_BYTES + MASK_BYTES),
            scores * MASK_BYTES,
        )
        return products + self.elementwise(scores, 8, 4, in_single=True)

    def _add(self, name: str, parameters: tuple[Parameter, ...], work: Work) -> None:
        self.layers.append(Layer(name, parameters, work))
