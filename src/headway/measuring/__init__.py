"""Measures machines (links, collectives, codecs) and the effects of passes."""
