"""Why a plan is faster: a waterfall of its choices, the bottleneck that it leaves, and what would go further."""

from headway.optimization.explanation.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
