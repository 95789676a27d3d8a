"""SCONE: n-gram embedding layers for language models (arXiv 2502.01637).

The library. It knows nothing of Ray, HTTP or MLflow; `pipelines` and `serve` build on it.
"""

from scone.version import VERSION

__all__ = ["VERSION"]
