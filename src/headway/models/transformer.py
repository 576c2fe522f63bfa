"""Transformers as tables of layers: BERT and GPT-2."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headway.models.table import FLOAT_BYTES, Layer, LayerTable, Parameter, Work

MASK_BYTES = 1  # what dropout keeps of an element


@dataclass
class TransformerBuilder:
    """Collects layers for a batch of ``samples`` sequences of ``length`` tokens."""

    samples: int
    length: int
    width: int
    heads: int
    layers: list[Layer] = field(default_factory=list)

    @property
    def words(self) -> int:
        """The number of tokens in a batch."""
        return self.samples * self.length

    def embedding(self, name: str, rows: int) -> None:
        """An embedding: looks up a row for every token."""
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
        """A dense layer on all tokens whose weight is the parameter ``tied`` of another layer."""
        moved = float(self.words * (self.width + outputs) + self.width * outputs) * FLOAT_BYTES
        kept_bytes = self.words * self.width * FLOAT_BYTES
        work = Work(2.0 * self.words * self.width * outputs, moved, 1, kept_bytes) + after
        bias_parameter = (Parameter("bias", (outputs,)),) if bias else ()
        self.layers.append(Layer(name, bias_parameter, work, (tied,)))

    def cut(self) -> None:
        """Allow a pipeline stage to end here: later layers only need one vector per token."""
        self.layers[-1] = replace(self.layers[-1], cut_bytes=float(self.words * self.width * FLOAT_BYTES))

    def elementwise(self, elements: float, passes: int, kernels: int, *, in_single: bool = False) -> Work:
        """Passes over elements that are saved for backward; ``in_single`` stays in single precision."""
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


_BERT_VOCABULARY, _BERT_POSITIONS, _BERT_SEGMENTS = 30_528, 512, 2
_BERT_WORDS = "bert.embeddings.word_embeddings"


# BERT (arXiv 1810.04805) as it is pre-trained: masked words and next sentence, the word embedding tied to the output.
#
# The vocabulary is padded from 30,522 to 30,528, a multiple of 8, as is usual for the sake of GEMMs.


def bert_base(samples: int = 64, length: int = 64) -> LayerTable:
    """BERT-Base: 12 layers of width 768 with 12 heads, sequences of ``length`` tokens."""
    return _bert("BERT-Base", TransformerBuilder(samples, length, width=768, heads=12), depth=12)


def bert_large(samples: int = 32, length: int = 64) -> LayerTable:
    """BERT-Large: 24 layers of width 1024 with 16 heads, sequences of ``length`` tokens."""
    return _bert("BERT-Large", TransformerBuilder(samples, length, width=1024, heads=16), depth=24)


def _bert(name: str, net: TransformerBuilder, depth: int) -> LayerTable:
    width, words, inner = net.width, net.words, 4 * net.width
    net.embedding(_BERT_WORDS, _BERT_VOCABULARY)
    net.embedding("bert.embeddings.position_embeddings", _BERT_POSITIONS)
    net.embedding("bert.embeddings.token_type_embeddings", _BERT_SEGMENTS)
    net.norm("bert.embeddings.LayerNorm")
    for index in range(depth):
        layer = f"bert.encoder.layer.{index}"
        net.linear(f"{layer}.attention.self.query", width, width, rows=words)
        net.linear(f"{layer}.attention.self.key", width, width, rows=words, shares_input=True)
        net.linear(
            f"{layer}.attention.self.value",
            width,
            width,
            rows=words,
            after=net.attention(),
            shares_input=True,
        )
        net.linear(f"{layer}.attention.output.dense", width, width, rows=words)
        net.norm(f"{layer}.attention.output.LayerNorm")
        gelu = net.elementwise(words * inner, 2, 1)
        net.linear(f"{layer}.intermediate.dense", width, inner, rows=words, after=gelu)
        net.linear(f"{layer}.output.dense", inner, width, rows=words)
        net.norm(f"{layer}.output.LayerNorm")
        net.cut()
    net.linear("bert.pooler.dense", width, width, rows=net.samples)
    gelu = net.elementwise(words * width, 2, 1)
    net.linear("cls.predictions.transform.dense", width, width, rows=words, after=gelu)
    net.norm("cls.predictions.transform.LayerNorm")
    loss = net.elementwise(words * _BERT_VOCABULARY, 3, 2, in_single=True)
    net.tied_linear("cls.predictions.decoder", _BERT_VOCABULARY, f"{_BERT_WORDS}.weight", loss)
    net.linear("cls.seq_relationship", width, 2, rows=net.samples)
    return LayerTable(name, f"{net.samples} sequences of {net.length} words", net.samples, tuple(net.layers))


_GPT2_VOCABULARY, _GPT2_POSITIONS = 50_257, 1024
_GPT2_WORDS = "transformer.wte"
_DEPTH, _WIDTH, _HEADS = 12, 768, 12


def gpt2(samples: int = 8, length: int = 1024) -> LayerTable:
    """GPT-2 on ``samples`` sequences of ``length`` tokens."""
    net = TransformerBuilder(samples, length, width=_WIDTH, heads=_HEADS)
    inner = 4 * _WIDTH
    net.embedding(_GPT2_WORDS, _GPT2_VOCABULARY)
    net.embedding("transformer.wpe", _GPT2_POSITIONS)
    net.cut()
    for index in range(_DEPTH):
        layer = f"transformer.h.{index}"
        net.norm(f"{layer}.ln_1")
        net.linear(f"{layer}.attn.c_attn", _WIDTH, 3 * _WIDTH, rows=net.words, after=net.attention())
        net.linear(f"{layer}.attn.c_proj", _WIDTH, _WIDTH, rows=net.words)
        net.norm(f"{layer}.ln_2")
        gelu = net.elementwise(net.words * inner, 2, 1)
        net.linear(f"{layer}.mlp.c_fc", _WIDTH, inner, rows=net.words, after=gelu)
        net.linear(f"{layer}.mlp.c_proj", inner, _WIDTH, rows=net.words)
        net.cut()
    net.norm("transformer.ln_f")
    loss = net.elementwise(net.words * _GPT2_VOCABULARY, 3, 2, in_single=True)
    net.tied_linear("lm_head", _GPT2_VOCABULARY, f"{_GPT2_WORDS}.weight", loss, bias=False)
    return LayerTable("GPT-2", f"{samples} sequences of {length} words", samples, tuple(net.layers))
