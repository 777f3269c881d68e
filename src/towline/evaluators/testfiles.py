"""Which files of a repository are tests: those that judge the work, and that the work must not decide."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from fnmatch import fnmatchcase

PATTERNS = (
    "tests/*",
    "test/*",
    "*/tests/*",
    "*/test/*",
    "__tests__/*",
    "*/__tests__/*",
    "test_*.py",
    "*/test_*.py",
    "*_test.py",
    "*_test.go",
    "conftest.py",
    "*/conftest.py",
    "*.test.[jt]s",
    "*.test.[jt]sx",
    "*.spec.[jt]s",
    "*.spec.[jt]sx",
    "pytest.ini",
    "sitecustomize.py",
    "*/sitecustomize.py",
    "usercustomize.py",
    "*/usercustomize.py",
)
"""Shell patterns of paths relative to the repository; `*` also matches `/`."""
COMPILED = ("*.pyc", "*.pyo", "__pycache__/*", "*/__pycache__/*")
"""What could stand in the place of a test without being one by its name."""


class TestFiles:
    """Says of a path whether it is a test's: by pattern, or since the verifier brings a file of that name itself."""

    __test__ = False

    def __init__(self, patterns: Iterable[str], named: Iterable[str] = ()):
        self.patterns = (*patterns, *COMPILED)
        self.named = frozenset(map(posixpath.normpath, named))
        # Neither a file where the verifier needs a folder, nor anything below what the verifier has as a file.
        self._above = {
            "/".join(name.split("/")[:depth]) for name in self.named for depth in range(1, name.count("/") + 1)
        }

    def __call__(self, path: str) -> bool:
        path = posixpath.normpath(path)
        parts = path.split("/")
        under = any("/".join(parts[:depth]) in self.named for depth in range(1, len(parts) + 1))
        folder = f"{path}/"
        return (
            under
            or path in self._above
            or any(fnmatchcase(path, pattern) or fnmatchcase(folder, pattern) for pattern in self.patterns)
        )
