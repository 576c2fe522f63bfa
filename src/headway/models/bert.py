"""BERT (arXiv 1810.04805) as it is pre-trained: masked words and next sentence, the word embedding tied to the output.

The vocabulary is padded from 30,522 to 30,528, a multiple of 8, as is usual for the sake of GEMMs.
"""

from __future__ import annotations

from headway.models.table import LayerTable
from headway.models.transformer import TransformerBuilder

_BERT_VOCABULARY, _BERT_POSITIONS, _BERT_SEGMENTS = 30_528, 512, 2
_BERT_WORDS = "bert.embeddings.word_embeddings"


def bert_base(samples: int = 64, length: int = 64) -> LayerTable:
    """BERT-Base: 12 layers of width 768 with 12 heads, sequences of ``length`` words."""
    return _bert("BERT-Base", TransformerBuilder(samples, length, width=768, heads=12), depth=12)


def bert_large(samples: int = 32, length: int = 64) -> LayerTable:
    """BERT-Large: 24 layers of width 1024 with 16 heads, sequences of ``length`` words."""
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
