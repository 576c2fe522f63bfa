"""Found first on PYTHONPATH by every Python that a recorded or planned command starts.

It waits for ``import torch`` in processes that are ranks, and leaves all others alone. A ``sitecustomize`` that
stood on the path before keeps working: it is run too.
"""

import os
import sys


def _run_the_next_sitecustomize() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _activate_when_torch_arrives() -> None:
    wanted = "HEADWAY_RECORD" in os.environ or "HEADWAY_PLAN" in os.environ
    if not wanted or "RANK" not in os.environ:
        return
    try:
        import wrapt

        from headway.integrations import activate
    except ImportError as failure:
        print(
            f"headway: {sys.executable} cannot import headway ({failure}); install it there",
            file=sys.stderr,
        )
        return
    wrapt.register_post_import_hook(activate.on_torch_import, "torch")


_run_the_next_sitecustomize()
_activate_when_torch_arrives()
