"""GPT-2 (Radford et al., 2019), the small model of 124 million parameters, its output tied to the word embedding."""

from __future__ import annotations

from headway.models.table import LayerTable
from headway.models.transformer import TransformerBuilder

_GPT2_VOCABULARY, _GPT2_POSITIONS = 50_257, 1024
_GPT2_WORDS = "transformer.wte"
_DEPTH, _WIDTH, _HEADS = 12, 768, 12


def gpt2(samples: int = 8, length: int = 1024) -> LayerTable:
    """GPT-2 on ``samples`` sequences of ``length`` words."""
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
