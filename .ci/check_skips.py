"""Fail when a pytest run skipped a test that is not named: check_skips.py JUNIT_XML ALLOWED.

ALLOWED has one pattern a line (shell wildcards, against `path/test_file.py::test_name`), then the reason.
"""

import fnmatch
import sys
import xml.etree.ElementTree as ElementTree  # of a file that our own pytest has just written
from pathlib import Path


def skipped(report: str) -> dict[str, str]:
    """Give the tests that a JUnit report calls skipped, with the reason it gives; expected failures are among them."""
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):  # noqa: S314
        mark = case.find("skipped")
        if mark is not None:
            module = case.get("classname", "").replace(".", "/")
            found[f"{module}.py::{case.get('name')}"] = mark.get("message", "")
    return found


def allowed(text: str) -> list[str]:
    """Give the patterns of an ALLOWED file."""
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return [words[0] for words in lines if words]


def main() -> int:
    """Print the tests that must not have been skipped; 1 when there are any."""
    report, names = (Path(name).read_text() for name in sys.argv[1:3])
    patterns = allowed(names)
    unnamed = {
        test: why
        for test, why in skipped(report).items()
        if not any(fnmatch.fnmatchcase(test, pattern) for pattern in patterns)
    }
    for test, why in unnamed.items():
        print(f"skipped, and not named in .ci/allowed-skips: {test}: {why}", file=sys.stderr)
    return 1 if unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
