"""Files are opened in one place: no other file of the package opens a path that somebody else may have chosen.

`mpikv.common.files` knows what may lie at such a path: a pipe, a device, another user's file or link.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mpikv

PACKAGE = Path(mpikv.__file__).parent
OPENS = {
    *("open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "FileHandler", "savefig"),
    *("memmap", "open_memmap", "fromfile", "tofile", "loadtxt", "savetxt", "genfromtxt", "savez", "savez_compressed"),
    *("ZipFile", "GzipFile", "BZ2File", "LZMAFile", "TarFile", "copyfile", "copy2", "copytree"),
}
OF_LIBRARIES = {f"{module}.{name}" for module in ("np", "numpy", "torch", "cupy") for name in ("load", "save")}
OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/null")
ALLOWED = {
    "common/files.py": {"open", "os.open"},  # the place
    "commands/launch/batch.py": {"(TEMPLATES / name).read_text", "file.write_text"},  # the package's, the repository's
    "commands/launch/rank.py": {"os.open"},  # os.devnull
    "data/image_records.py": {"Image.open"},  # bytes in memory
    "commands/launch/watch.py": {"self._connections.open"},  # of another kind
    "runtime/cuda_aware.py": {"out.open", "err.open", "out.read_text", "err.read_text"},  # in a new folder of its own
    "runtime/cuda_driver.py": {"Path(KERNEL_MODULE).read_text"},  # below /proc
    "runtime/interface.py": {"(sysfs / name / 'dev_port').read_text"},  # below /sys
}


def opening(source: str) -> Iterator[str]:
    """What in a module opens files by their paths, as text: calls, and functions that are kept to be called."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        by_method = isinstance(node, ast.Attribute) and node.attr in OPENS
        if by_method or (node.id if isinstance(node, ast.Name) else node.attr) in ("open", "load", "save"):
            text = ast.unparse(node)
            if (text == "open" or by_method or text in OF_LIBRARIES) and not is_harmless(calls.get(id(node))):
                yield text


def is_harmless(call: ast.Call | None) -> bool:
    """Whether it opens what only the system can have made, or is given a file that is open."""
    if call is None:
        return False
    words = (node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    given = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "fileobj")]
    is_open = any(isinstance(one, ast.Name) and one.id == "file" for one in given)
    return is_open or any(word.startswith(OF_THE_SYSTEM) for word in words)


def test_files_are_opened_in_one_place() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    may = re.compile(rf"\b({'|'.join([*OPENS, 'load', 'save'])})\b")  # what has no such word is not parsed
    found = {name: calls for name, source in sources.items() if may.search(source) and (calls := {*opening(source)})}
    assert found == ALLOWED
