"""BERT (arXiv 1810.04805) as it is pre-trained: masked words and next sentence, the word embedding tied to the output.

The vocabulary is padded from 30,522 to 30,528, a multiple of 8, as is usual for the sake of GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.models.table import FLOAT_BYTES, Layer, LayerTable, Parameter, Work

_VOCABULARY, _POSITIONS, _SEGMENTS = 30_528, 512, 2
_WORDS = "bert.embeddings.word_embeddings"


def bert_base(samples: int = 64, length: int = 64) -> LayerTable:
    """BERT-Base: 12 layers of width 768 with 12 heads, sequences of ``length`` words."""
    return _bert("BERT-Base", _Transformer(samples, length, width=768, heads=12), depth=12)


def bert_large(samples: int = 32, length: int = 64) -> LayerTable:
    """BERT-Large: 24 layers of width 1024 with 16 heads, sequences of ``length`` words."""
    return _bert("BERT-Large", _Transformer(samples, length, width=1024, heads=16), depth=24)


@dataclass
class _Transformer:
    samples: int
    length: int
    width: int
    heads: int
    layers: list[Layer] = field(default_factory=list)

    @property
    def words(self) -> int:
        return self.samples * self.length

    def embedding(self, name: str, rows: int) -> None:
        moved = 3.0 * self.words * self.width * FLOAT_BYTES  # rows read, written and added to the others
        self._add(name, (Parameter("weight", (rows, self.width)),), Work(self.words * self.width, moved, 2))

    def norm(self, name: str) -> None:
        """Layer norm with the dropout and the residual before it."""
        parameters = (Parameter("weight", (self.width,)), Parameter("bias", (self.width,)))
        elements = self.words * self.width
        self._add(name, parameters, Work(8.0 * elements, 8.0 * elements * FLOAT_BYTES, 3))

    def linear(self, name: str, inputs: int, outputs: int, *, rows: int, after: Work | None = None) -> None:
        """A dense layer on ``rows`` vectors, and the parameterless work that follows it."""
        parameters = (Parameter("weight", (outputs, inputs)), Parameter("bias", (outputs,)))
        moved = float(rows * (inputs + outputs) + inputs * outputs) * FLOAT_BYTES
        self._add(name, parameters, Work(2.0 * rows * inputs * outputs, moved, 1) + (after or Work()))

    def tied_linear(self, name: str, outputs: int, tied: str, after: Work) -> None:
        moved = float(self.words * (self.width + outputs) + self.width * outputs) * FLOAT_BYTES
        work = Work(2.0 * self.words * self.width * outputs, moved, 1) + after
        self.layers.append(Layer(name, (Parameter("bias", (outputs,)),), work, (tied,)))

    def elementwise(self, elements: float, passes: int, kernels: int) -> Work:
        return Work(passes * elements, passes * elements * FLOAT_BYTES, kernels)

    def attention(self) -> Work:
        """Scores, scaling, mask, softmax, dropout and the weighted sum."""
        scores = float(self.samples * self.heads * self.length**2)
        products = Work(
            4.0 * self.words * self.length * self.width, 4.0 * self.words * self.width * FLOAT_BYTES, 2
        )
        return products + self.elementwise(scores, 8, 4)

    def _add(self, name: str, parameters: tuple[Parameter, ...], work: Work) -> None:
        self.layers.append(Layer(name, parameters, work))


def _bert(name: str, net: _Transformer, depth: int) -> LayerTable:
    width, words, inner = net.width, net.words, 4 * net.width
    net.embedding(_WORDS, _VOCABULARY)
    net.embedding("bert.embeddings.position_embeddings", _POSITIONS)
    net.embedding("bert.embeddings.token_type_embeddings", _SEGMENTS)
    net.norm("bert.embeddings.LayerNorm")
    for index in range(depth):
        layer = f"bert.encoder.layer.{index}"
        net.linear(f"{layer}.attention.self.query", width, width, rows=words)
        net.linear(f"{layer}.attention.self.key", width, width, rows=words)
        net.linear(f"{layer}.attention.self.value", width, width, rows=words, after=net.attention())
        net.linear(f"{layer}.attention.output.dense", width, width, rows=words)
        net.norm(f"{layer}.attention.output.LayerNorm")
        gelu = net.elementwise(words * inner, 2, 1)
        net.linear(f"{layer}.intermediate.dense", width, inner, rows=words, after=gelu)
        net.linear(f"{layer}.output.dense", inner, width, rows=words)
        net.norm(f"{layer}.output.LayerNorm")
    net.linear("bert.pooler.dense", width, width, rows=net.samples)
    gelu = net.elementwise(words * width, 2, 1)
    net.linear("cls.predictions.transform.dense", width, width, rows=words, after=gelu)
    net.norm("cls.predictions.transform.LayerNorm")
    loss = net.elementwise(words * _VOCABULARY, 3, 2)
    net.tied_linear("cls.predictions.decoder", _VOCABULARY, f"{_WORDS}.weight", loss)
    net.linear("cls.seq_relationship", width, 2, rows=net.samples)
    return LayerTable(name, f"{net.samples} sequences of {net.length} words", net.samples, tuple(net.layers))
