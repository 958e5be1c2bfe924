"""Test suites for plug-ins: what Holdfast's own stores must do, for those who write others.

``StoreConformance`` is for stores, and ``RootConformance`` for what holds the stores of a run. They need pytest;
``docs/stores.md`` shows them at work.
"""

from holdfast.errors import MissingPackageError

try:
    import pytest
except ImportError as missing:
    raise MissingPackageError("holdfast.testing needs pytest: pip install pytest", install="pytest") from missing

# So that a failure shows the values.
pytest.register_assert_rewrite(
    "holdfast.testing._store_conformance", "holdfast.testing._store_conformance", "holdfast.testing._root_conformance"
)

from holdfast.testing._root_conformance import RootConformance  # noqa: E402
from holdfast.testing._store_conformance import StoreConformance  # noqa: E402

__all__ = ["RootConformance", "StoreConformance"]
