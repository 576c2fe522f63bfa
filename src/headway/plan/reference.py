"""The reference of plan files, from their types: ``python -m headway.plan.reference > docs/plan-files.md``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headway.plan.plan import Plan, PlannedModel, Prediction
from headway.strategies.registry import SHIPPED, plugins

HEAD = """# Plan files

<!-- Written by `python -m headway.plan.reference`; a test holds it against the types. -->

A plan is one YAML file: what `headway optimize` writes, `headway run --plan` and `headway.parallelize` carry out, and
`headway replay --plan` predicts. It can be written by hand. What is not described here is refused, and so is a plan for
another model or another number of workers.

    format: 2
    mesh: {data: 4}
    parallel:
      data:
        ddp: {bucket_cap_mb: 8.0}
    model: {parameters: 62, size_bytes: 51200000, fingerprint: 0123456789abcdef}

The strategy of a dimension acts on the groups of ranks that differ in that dimension alone: in `{pipeline: 2, data: 2}`
on ranks 0 and 1, and 2 and 3, along `data`. What shares work along several dimensions is read, and refused by all that
would carry it out, as nothing does yet.

Plans of format 1 (`strategy` and `world_size` in the place of `mesh` and `parallel`) are read as plans of one
dimension.
"""

STRATEGIES = """## Strategies

Below the name of a dimension stands the name of one strategy, and below that its options.
"""

PASSES = """## Passes

Headway brings none yet. Other packages may, under the entry point group `headway.passes`.
"""

ANCHORS = {"Strategy": "strategies", "Pass": "passes", "PlannedModel": "model", "Prediction": "prediction"}
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "max_length": "length at most"}


def page() -> str:
    """The whole page, as Markdown; of strategies and passes those that come with Headway."""
    parts = [HEAD, *_section("The plan", Plan)]
    parts += [*_section("`model`", PlannedModel), *_section("`prediction`", Prediction), STRATEGIES]
    for name in list(plugins())[: len(SHIPPED)]:
        policy = plugins()[name].policy
        parts += _section(f"`{name}`, along `{policy.dimension}`", policy, level=3)
    return "\n".join([*parts, PASSES])


def _section(title: str, model: type[BaseModel], level: int = 2) -> Iterator[str]:
    yield f"{'#' * level} {title}\n"
    yield f"{_one_line(inspect.getdoc(model) or '')}\n"
    yield "| field | value | default | meaning |\n|---|---|---|---|"
    for name, field in model.model_fields.items():
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {_one_line(field.description or '')} |"
    yield ""


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation) + "".join(f", {said}" for said in map(_limit, field.metadata) if said)


def _type_name(kind: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    arguments = [each for each in get_args(kind) if each is not Ellipsis]
    origin = getattr(kind, "__origin__", None)
    if kind in names:
        return names[kind]
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type_name(arguments[0])} to {_type_name(arguments[1])}"
    if arguments and all(isinstance(each, str | int) for each in arguments):  # a literal
        return " or ".join(f"`{each}`" for each in arguments)
    if hasattr(kind, "__metadata__"):
        return _type_name(arguments[0])
    if arguments:
        return " or ".join(_type_name(each) for each in arguments)
    name = kind.__name__.lower()
    return f"[{name}](#{ANCHORS[kind.__name__]})" if kind.__name__ in ANCHORS else name


def _limit(constraint: Any) -> str:
    for attribute, said in LIMITS.items():
        if getattr(constraint, attribute, None) is not None:
            return f"{said} {getattr(constraint, attribute)}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    plain = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(plain)}`"


if __name__ == "__main__":
    print(page(), end="")
