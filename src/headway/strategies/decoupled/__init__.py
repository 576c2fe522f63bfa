"""The decoupled all-reduce: reduce-scatter under backward, all-gather under the next forward."""
