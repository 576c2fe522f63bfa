"""The reference of plan files, from their types: ``python -m tests.plan.reference > docs/plan-files.md``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headway.cluster import (
    AlgorithmCost,
    Cluster,
    CodecCost,
    Host,
    MessageCost,
    NcclModel,
    PassSlowdown,
    ServerHost,
    SlowPath,
    Traffic,
)
from headway.collectives.selection import SizeClass
from headway.compression.cast import Cast
from headway.compression.codec import Codec
from headway.compression.registry import SHIPPED as CODECS
from headway.passes.base import Pass
from headway.passes.registry import SHIPPED as SHIPPED_PASSES
from headway.plan.plan import Plan, PlannedModel, Prediction
from headway.strategies.base import Strategy
from headway.strategies.registry import SHIPPED, plugins

HEAD = """# Plan files

<!-- Written by `python -m tests.plan.reference`; a test compares it with the types. -->

A plan is one YAML file: `headway optimize` writes it, `headway run --plan` and `headway.parallelize` carry it out, and
`headway replay --plan` predicts it. It can be written by hand. Unknown keys are refused, and so is a plan for another
model, or for another number of workers unless it adapts.

    format: 2
    mesh: {data: 4}
    parallel:
      data:
        ddp: {bucket_cap_mb: 8.0}
    model: {parameters: 62, size_bytes: 51200000, fingerprint: 0123456789abcdef}

The strategy of a dimension acts on the groups of ranks that differ in that dimension alone: with
`{pipeline: 2, data: 2}`, the strategy of `data` acts on ranks 0 and 1, and on ranks 2 and 3. The only
supported combination of dimensions is a pipeline whose stages are trained with `ddp` or `decoupled`; others are
refused.

Plans that said `decoupled` with `tune`, `adapt` or `begin_as` are read as plans of `adaptive`, and mean the same.
Plans of format 1 (`strategy` and `world_size` instead of `mesh` and `parallel`) are read as plans of one dimension.
"""

STRATEGIES = """## Strategies

Below the name of a dimension is the name of one strategy, and below that are its options.
"""

CODECS_HEAD = """### Codecs

How buckets are compressed: entries of `wire`, named by `codec`. [Compressed gradients](compression.md) explains
them. Other packages may add codecs under the entry point group `headway.codecs`.
"""

PASSES = """## Passes

The name of one pass, with its options below it. [Passes](passes.md) explains them. Other packages may add passes
under the entry point group `headway.passes`.
"""

# The name of each type in the column of values, and the anchor of the section that describes it.
SECTIONS: dict[type, tuple[str, str]] = {
    Strategy: ("strategy", "strategies"),
    Pass: ("pass", "passes"),
    PlannedModel: ("model", "model"),
    Prediction: ("prediction", "prediction"),
    Codec: ("codec", "codecs"),
    Cast: ("cast", "cast"),
    SizeClass: ("size class", "size-class"),
    Cluster: ("cluster", "cluster"),
    Host: ("host", "host"),
    ServerHost: ("host without workers", "server-host"),
    AlgorithmCost: ("algorithm cost", "algorithm-cost"),
    MessageCost: ("message cost", "message-cost"),
    CodecCost: ("codec cost", "codec-cost"),
    PassSlowdown: ("pass slowdown", "pass-slowdown"),
    NcclModel: ("NCCL model", "nccl-model"),
    Traffic: ("traffic", "traffic"),
    SlowPath: ("path", "path"),
}
OF_CLUSTERS = (
    Host,
    ServerHost,
    AlgorithmCost,
    MessageCost,
    CodecCost,
    PassSlowdown,
    NcclModel,
    Traffic,
    SlowPath,
)
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "min_length": "length at least"}
LIMITS |= {"max_length": "length at most"}


def page() -> str:
    """The page as Markdown, with the strategies and passes that ship with Headway."""
    parts = [HEAD, *_section("The plan", Plan)]
    parts += [*_section("`model`", PlannedModel), *_section("`prediction`", Prediction), STRATEGIES]
    for name in list(plugins())[: len(SHIPPED)]:
        policy = plugins()[name].policy
        parts += _section(f"`{name}`, along `{policy.dimension}`", policy, level=3)
    parts += _section("Size class", SizeClass, level=3)
    parts.append(CODECS_HEAD)
    for codec in CODECS:
        parts += _section(f"`{codec.name}`", codec, level=4)
    parts.append(PASSES)
    for name, kind in SHIPPED_PASSES.items():
        parts += _section(f"`{name}`", kind, level=3)
    parts += _section("`cluster`", Cluster)
    for schema in OF_CLUSTERS:
        parts += _section(SECTIONS[schema][0].capitalize(), schema, level=3)
    return "\n".join(parts)


def _section(title: str, model: type, level: int = 2) -> Iterator[str]:
    yield f"{'#' * level} {title}\n"
    yield f"{_one_line(inspect.getdoc(model) or '')}\n"
    yield "| field | value | default | meaning |\n|---|---|---|---|"
    meanings = _attribute_docstrings(model)
    for name, field in _fields(model).items():
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {_one_line(meanings.get(name, ''))} |"
    yield ""


def _attribute_docstrings(model: type) -> dict[str, str]:
    """The string below each field. Parsed here, since pydantic would do so at every import of the class."""
    (parsed,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(parsed, ast.ClassDef)
    return {
        field.target.id: str(ast.literal_eval(text.value))
        for field, text in pairwise(parsed.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _fields(model: type) -> Mapping[str, FieldInfo]:
    if issubclass(model, BaseModel):
        return model.model_fields
    assert dataclasses.is_dataclass(model)
    kinds = get_type_hints(model)
    return {
        field.name: FieldInfo(
            annotation=kinds[field.name],
            default=PydanticUndefined if field.default is MISSING else field.default,
        )
        for field in dataclasses.fields(model)
    }


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation) + "".join(
        f", {limit}" for limit in map(_limit, field.metadata) if limit
    )


def _type_name(kind: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    arguments = [argument for argument in get_args(kind) if argument is not Ellipsis]
    origin = getattr(kind, "__origin__", None)
    if kind in names:
        return names[kind]
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type_name(arguments[0])} to {_type_name(arguments[1])}"
    if arguments and all(isinstance(argument, str | int) for argument in arguments):  # a literal
        return " or ".join(f"`{argument}`" for argument in arguments)
    if hasattr(kind, "__metadata__"):
        return _type_name(arguments[0])
    if arguments:
        return " or ".join(_type_name(argument) for argument in arguments)
    name, anchor = SECTIONS[kind]
    return f"[{name}](#{anchor})"


def _limit(constraint: Any) -> str:
    for attribute, words in LIMITS.items():
        if (value := getattr(constraint, attribute, None)) is not None:
            return f"{words} {int(value):,}" if value == int(value) else f"{words} {value:g}"
    return ""


def _default(field: FieldInfo) -> str:
    if isinstance(made := field.get_default(call_default_factory=True), Strategy):
        return f"`{json.dumps({made.name: made.model_dump(mode='json', exclude_defaults=True)})}`"
    if field.default is PydanticUndefined:
        return "required"
    plain = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(plain)}`"


if __name__ == "__main__":
    print(page(), end="")
