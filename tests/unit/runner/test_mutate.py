"""`scripts/mutate`: the changes that it makes of a file, and that tests find one."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT

from mpikv.common import checks

SCRIPT = str(ROOT / "scripts/mutate")
CODE = '''
def f(a: int = 3, *, b: tuple[int, int] = ()) -> "int":
    """Add 1 + 1."""
    return g(a, b) if a < 2 and not b else f"{a + 1}"
'''


def test_the_changes_of_a_file(tmp_path: Path) -> None:
    loader = importlib.machinery.SourceFileLoader("mutate", SCRIPT)
    mutate = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutate", loader))
    loader.exec_module(mutate)
    (tmp_path / "code.py").write_text(CODE)
    changes = mutate.changes(tmp_path / "code.py")
    assert {(line, before, after) for line, before, after, _ in changes} == {
        (2, "3", "4"),
        (4, "g(a, b)", "g(b, a)"),
        (4, "a < 2 and not b", "a < 2 or not b"),
        (4, "a < 2", "a <= 2"),
        (4, "2", "3"),
        (4, "not b", "b"),
    }
    for _, before, after, whole in changes:
        ast.parse(whole)
        assert whole.replace(f"({after})", before, 1) == CODE


@pytest.mark.timeout(240)
def test_tests_find_a_change() -> None:
    (tests,) = (ROOT / "tests").rglob("test_checks.py")
    line = [sys.executable, SCRIPT, checks.__file__, "-n", "1", "--", str(tests.relative_to(ROOT))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.startswith("found    mpikv/"), done.stdout + done.stderr
    assert "\n1 of 1 changes found, of " in done.stdout
