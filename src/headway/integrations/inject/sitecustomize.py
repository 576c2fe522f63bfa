"""Found first on PYTHONPATH by every Python that a recorded or planned command starts.

It waits for ``import torch`` and does nothing in processes that do not import it. The ``sitecustomize`` that it hides
is run too.
"""

import os
import sys


def _run_the_next_sitecustomize() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    entries = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", entries)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


class _WhenTorchIsImported:
    """A meta path finder that waits for ``import torch``, then hooks the end of that import."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> object:
        if name != "torch":
            return None
        sys.meta_path.remove(_WhenTorchIsImported)  # type: ignore[arg-type]
        try:
            import wrapt

            from headway.integrations import activate
        except Exception as failure:  # an old Python may fail to parse it
            _say_why_not(failure)
            return None
        from importlib.util import find_spec

        wrapt.register_post_import_hook(activate.on_torch_import, "torch")
        return find_spec(name)  # with the hook in place by now


def _say_why_not(failure: Exception) -> None:
    """Write a report as ``headway.integrations.reports`` would, which cannot be imported here."""
    import json

    blind = f"{sys.executable} cannot import headway ({failure})"
    for folder in os.environ.get("HEADWAY_REPORTS", "").split(os.pathsep):
        path = os.path.join(folder, f"process-{os.getpid()}-blind")
        try:
            with open(f"{path}.writing", "w") as file:
                json.dump({"pid": os.getpid(), "blind": blind}, file)
            os.rename(f"{path}.writing", f"{path}.json")
        except OSError:
            sys.stderr.write(f"headway: {blind}\n")


_run_the_next_sitecustomize()
if any(name in os.environ for name in ("HEADWAY_RECORD", "HEADWAY_PLAN", "HEADWAY_TIME")):
    sys.meta_path.insert(0, _WhenTorchIsImported)  # type: ignore[arg-type]
