"""Layer 1: what must be communicated. A strategy is a folder: policy.py, runtime.py, dataflow.py."""
