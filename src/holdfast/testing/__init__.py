"""Test suites for plug-ins: what Holdfast's own stores must do, for those who write others.

``StoreConformance`` is for stores. It needs pytest; ``docs/stores.md`` shows it at work.
"""

from holdfast.errors import MissingPackageError

try:
    import pytest
except ImportError as missing:
    raise MissingPackageError("holdfast.testing needs pytest: pip install pytest", install="pytest") from missing

# So that a failure shows the values.
pytest.register_assert_rewrite("holdfast.testing.store_conformance", "holdfast.testing.fast_methods")

from holdfast.testing.store_conformance import StoreConformance  # noqa: E402

__all__ = ["StoreConformance"]
