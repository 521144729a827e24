"""What the documents show is true: every block of shell or Python in them is executed, and printed output is compared.

The blocks of one document run from top to bottom, as a reader would: in one directory (a copy of the checkout), with
what earlier blocks exported. A line of HTML comment directly above a block says how:

- `<!-- file: NAME -->` above Python: save it under this name for later blocks; where none of them runs it, run it;
- `<!-- ranks: N -->` above Python: run it under mpirun with N ranks, otherwise alone;
- `<!-- mpi: mpich -->` above shell: run it where that wheel's mpirun comes first;
- `<!-- needs: MODULE, ... -->` above either: the document is not executed where one of these is not installed;
- `<!-- same as: FILE -->` above Python: the block is the text of this file, which other blocks run;
- `<!-- part of: FILE -->` above a diff: the lines that are there after the change stand in this file in this order;
- `<!-- printed by: COMMAND -->` above text: the command prints these lines among others, whatever its status.

A `text` block without a comment is what the block above it prints, exactly, but that `...` stands for anything within a
line. Blocks of other kinds are an error, so that nothing escapes.

`NOT_RUN` names the commands that are not executed, each with its reason. They are looked at instead, as are commands
within the text, in `code`, and in what --help prints: their own parsers read them, the files that they name are there,
extras of `pip install` exist.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import clone
import frameworks
import jobs
import pytest

from mpikv import Config
from mpikv.__main__ import _parser
from mpikv.config import KNOWN, VARIABLES

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))))
# Left to --thorough: they take most of the time of all documents.
LONG = ("performance", "pytorch", "local-training", "tutorial", "jax", "data", "adr/0001-progress-engine")
LONG_DOCUMENTS = {f"docs/{name}.md" for name in LONG}
BLOCK_TIMEOUT_S = 180  # of one block, on a busy machine with two cores
# The documents must say what root needs, so they do not get it from the test's environment.
ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
MPIRUN = f"{' '.join(f'{name}=1' for name in ROOT_VARIABLES)} mpirun --oversubscribe --bind-to none"
KINDS = {"sh": "shell", "bash": "shell", "python": "python", "text": "output", "diff": "diff"}
ALLOWED = {
    "shell": {"mpi", "needs"},
    "python": {"file", "ranks", "needs", "same as"},
    "diff": {"part of"},
    "output": {"printed by"},
}
# Words at most, outside of fenced blocks and comments; tables and headings count. docs/: without ADRs and gradient.md.
README_WORDS, DOCS_WORDS = 1150, 30_000

# Commands that are not executed here, by what they begin with, and why.
NOT_RUN = {
    r"scripts/demo\b": "loads images and trains for minutes",
    r"scripts/test\b": "runs this very test",
    r"scripts/(lint|docs|get_cifar10|build_ompi_cuda)\b": "loads what it needs",
    r"python3? -m venv |\. ~/|pip install |apt-get |git clone ": "changes the machine, and loads what it needs",
    r"mpikv submit (?!.*--dry-run)|(sbatch|qsub|squeue|qstat|scancel|qdel)\b": "needs a batch system: tests/cluster",
    r"mpikv launch (?!.*--dry-run).*(-H |--host|--launcher (ssh|slurm|sge|mpi))": "needs other hosts: tests/cluster",
    r"mpirun (.* )?(--hostfile|-f|--host (?!localhost))": "needs other hosts: tests/cluster",
    r"(ssh|scp|rsync|kubectl) ": "needs other hosts",
    r".*--(device|gpus)\b": "needs a GPU: tests/gpu",
}

COMMENT = re.compile(r"<!-- (file|ranks|mpi|needs|same as|part of|printed by): (.+) -->")
FENCE = re.compile(r"^ *(`{3,}|~{3,}) *(\S*)")


@dataclass
class Block:
    """One fenced block: its kind, its text, where it begins, and what the comment above it says."""

    document: str
    line: int
    kind: str
    text: str
    says: dict[str, str] = field(default_factory=dict)
    output: str | None = None

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def prints(self) -> bool:
        return self.kind in ("shell", "python") and "same as" not in self.says and not self.not_run

    @property
    def not_run(self) -> list[str]:
        """Its commands that are not executed."""
        return [
            line for line in self._lines if self.kind == "shell" and any(re.match(begin, line) for begin in NOT_RUN)
        ]

    @property
    def script(self) -> str:
        """What is executed."""
        left_out = self.not_run
        return "\n".join(line for line in self._lines if line not in left_out) if left_out else self.text

    @property
    def _lines(self) -> list[str]:
        return self.text.replace("\\\n", " ").splitlines()


def blocks(document: str, text: str) -> list[Block]:
    """The blocks of shell and Python in `text`, each with its expected output. ValueError for anything else."""
    found: list[Block] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    says: dict[str, str] = {}
    for number, line in lines:
        comment = COMMENT.fullmatch(line)
        if comment:
            says[comment[1]] = comment[2]
            continue
        fence = FENCE.match(line)
        if not fence:
            if says and line.strip():
                raise ValueError(f"{document}:{number}: the comment above belongs to a block, which must follow it")
            continue
        body = []
        for _, inner in lines:
            if inner.strip() == fence[1]:
                break
            body.append(inner)
        else:
            raise ValueError(f"{document}:{number}: this block has no end")
        block = Block(document, number, KINDS.get(fence[2], ""), "\n".join(body) + "\n", says)
        says = {}
        if not block.kind:
            raise ValueError(f"{block.place}: a block of kind {fence[2]!r}; known are {', '.join(KINDS)}")
        _check_comment(block)
        if block.kind == "output" and not block.says:
            if not found or not found[-1].prints or found[-1].output is not None:
                raise ValueError(f"{block.place}: no block above it prints this")
            found[-1].output = block.text
        else:
            found.append(block)
    return found


def _check_comment(block: Block) -> None:
    if set(block.says) - ALLOWED[block.kind]:
        raise ValueError(f"{block.place}: {', '.join(block.says)} above a {block.kind} block")
    if block.kind == "diff" and not block.says:
        raise ValueError(f"{block.place}: a diff needs the file that it is part of")


def differences(expected: str, found: str) -> str:
    """What is wrong with an output; empty where it is as expected."""
    want, have = expected.rstrip().splitlines(), found.rstrip().splitlines()
    for i in range(max(len(want), len(have))):
        pattern = ".*".join(re.escape(part) for part in want[i].split("...")) if i < len(want) else None
        line = have[i] if i < len(have) else None
        if pattern is None or line is None or not re.fullmatch(pattern, line):
            return f"line {i + 1}: expected {want[i] if i < len(want) else None!r}, found {line!r}"
    return ""


class Reader:
    """Somebody who types in one block after another: keeps the directory and what was exported."""

    def __init__(self, checkout: Path, notes: Path) -> None:
        self.directory = checkout
        self._notes = notes
        self._count = 0

    def run(self, block: Block) -> None:
        """Execute one block; pytest.fail where it does, or prints something else than the document says."""
        self._count += 1
        if block.kind == "output":
            job = self._shell(f"{block.says['printed by']} || true", "openmpi")
            if block.text not in job.output:
                pytest.fail(f"{block.place}: {block.says['printed by']} prints\n{job.output}", pytrace=False)
            return
        script = block.script
        if block.kind == "python":
            name = self.save(block)
            ranks = block.says.get("ranks")
            script = f"{MPIRUN} -n {int(ranks)} python {name}" if ranks else f"python {name}"
        job = self._shell(script, block.says.get("mpi", "openmpi"))
        shown = f"\n--- block\n{block.text}--- stdout\n{job.stdout}--- stderr\n{job.stderr}"
        if job.timed_out:
            pytest.fail(f"{block.place}: no end within {BLOCK_TIMEOUT_S} s{shown}", pytrace=False)
        if job.status != 0:
            pytest.fail(f"{block.place}: ended with status {job.status}{shown}", pytrace=False)
        if job.ranks_left:
            pytest.fail(f"{block.place}: left {len(job.ranks_left)} processes behind{shown}", pytrace=False)
        wrong = "" if block.output is None else differences(block.output, job.stdout)
        if wrong:
            pytest.fail(f"{block.place}: {wrong}{shown}", pytrace=False)

    def save(self, block: Block) -> str:
        """Write a block of Python into a file; its name."""
        name = block.says.get("file", f"block_{self._count}.py")
        (self.directory / name).write_text(block.text)
        return name

    def _shell(self, script: str, kind: str) -> jobs.Job:
        mpi = jobs.find_mpi(kind)
        if mpi is None:
            pytest.fail(f"no environment has {kind}; scripts/test makes one of each, {jobs.ENVIRONMENTS} names others")
        exports, place = self._notes / "exports", self._notes / "pwd"
        lines = [f"source {shlex.quote(str(exports))}"] if exports.exists() else []
        lines += [f"PATH={shlex.quote(str(mpi.prefix / 'bin'))}:$PATH", f"cd {shlex.quote(str(self.directory))}"]
        lines += ["set -e", script]
        if kind == "openmpi":  # a terminal with another MPI in it is used once
            # What belongs to this one job is not carried over to the next.
            lines += [f"unset TMPDIR {jobs.BACKING} {jobs.MARK}", f"export -p > {shlex.quote(str(exports))}"]
        lines.append(f"pwd > {shlex.quote(str(place))}")
        folder = Path(tempfile.mkdtemp(prefix="mpikv-document-"))
        env = jobs.environment(mpi, {}, folder)
        env = {name: value for name, value in env.items() if name not in ROOT_VARIABLES}
        job = jobs.Running(["bash", "-c", "\n".join(lines)], env, folder, BLOCK_TIMEOUT_S).finish()
        if job.status == 0:
            self.directory = Path(place.read_text().strip())
        return job


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone, with the environment that scripts/demo leaves there."""
    target = tmp_path_factory.mktemp("clone")
    clone.into(target)
    mpi = jobs.find_mpi("openmpi")
    if mpi is not None:
        (target / ".venv").symlink_to(mpi.prefix)
    return target


@pytest.mark.whole_job
@pytest.mark.timeout(1800)  # against a hang between blocks, which have limits of their own
@pytest.mark.parametrize(
    "document", [pytest.param(one, marks=[pytest.mark.thorough] * (one in LONG_DOCUMENTS)) for one in DOCUMENTS]
)
def test_every_block_does_what_it_shows(document: str, checkout: Path, tmp_path: Path) -> None:
    reader = Reader(checkout, tmp_path)
    found = blocks(document, (ROOT / document).read_text())
    for name in {name for block in found for name in re.findall(r"\w+", block.says.get("needs", ""))}:
        if importlib.util.find_spec(name) is None:
            frameworks.need(name)  # skips, or fails where it ought to be
    for i, block in enumerate(found):
        if "same as" in block.says:
            assert block.text == (checkout / block.says["same as"]).read_text(), f"{block.place} is another text"
        elif block.kind == "diff":
            check_part(block, (checkout / block.says["part of"]).read_text())
        else:
            assert not (wrong := mistakes(block.not_run, checkout)), block.place + "".join(wrong)
            reader.save(block) if run_by_others(block, found[i + 1 :]) else reader.run(block)


def run_by_others(block: Block, later: Sequence[Block]) -> bool:
    """Whether a block of Python is saved for a later one that names it, and has neither output nor ranks of its own."""
    name = block.says.get("file")
    own = "ranks" in block.says or block.output is not None
    return name is not None and not own and any(one.kind == "shell" and name in one.script.split() for one in later)


def check_part(block: Block, whole: str) -> None:
    """The lines of a diff that are there after the change stand in the file, in this order; those taken away do not."""
    rest = iter(whole.splitlines())
    for line in block.text.splitlines():
        if line[:1] in ("+", " "):
            assert line[1:] in rest, f"{block.place}: {line[1:]!r} is not in {block.says['part of']}, or not there"
        else:
            assert line[:1] == "-", f"{block.place}: {line!r} is no line of a diff"
            assert line[1:] not in whole.splitlines(), f"{block.place}: {line[1:]!r} is still there"


@pytest.mark.timeout(600)  # it imports PyTorch and JAX
def test_commands_within_the_text_are_right(checkout: Path) -> None:
    found = sorted({span for document in DOCUMENTS for span in spans((ROOT / document).read_text())})
    begin, left_open = r"[A-Z_]+=|mpikv \w+( |$)|mpirun |python |pip |scripts/", r"\.\.\.|[|{<*]|:$"
    wrong = mistakes([one for one in found if re.match(begin, one) and not re.search(left_open, one)], checkout)
    missing = r"arguments are required|: '[A-Z]+'"  # the name of a command, or of a value: `mpirun -n N`
    assert not [one for one in wrong if not re.search(missing, one)]


def test_the_examples_of_the_helps_are_right(checkout: Path) -> None:
    def texts(parser: argparse.ArgumentParser) -> Iterator[str]:
        yield parser.epilog or ""
        for action in parser._actions:
            for one in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                yield from texts(one)

    lines = {
        line for text in texts(_parser()) for line in re.findall(r"^  (mpikv .*?)(?:  .*| >.*)?$", text, re.MULTILINE)
    }
    assert len(lines) > 10
    assert not mistakes(sorted(lines), checkout)


def spans(text: str) -> list[str]:
    """What stands in `code` outside of blocks, and the lines that four spaces make code, each in one line."""
    prose = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^ {4}(?:\$ )?(.+)$", prose.replace("\\\n", " "), re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`", prose) + lines]


def mistakes(lines: Sequence[str], checkout: Path) -> list[str]:
    """What is wrong with these commands, as far as that can be known without running them."""
    found, to_read = [], []
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if not words:
            continue
        for word in words:
            if re.fullmatch(r"(scripts|examples|tests)/\S+", word) and not (checkout / word).exists():
                found.append(f"{line}: there is no {word}")
        if re.fullmatch(r"scripts/\w+", words[0]) and not os.access(checkout / words[0], os.X_OK):
            found.append(f"{line}: {words[0]} is not executable")
        if words[:2] == ["pip", "install"]:
            known = set(re.findall(r"^(\w+) = \[", (checkout / "pyproject.toml").read_text(), re.MULTILINE))
            extras = {one for word in words if word.startswith(".[") for one in word[2:-1].split(",")}
            found += [f"{line}: no extra {one} in pyproject.toml" for one in sorted(extras - known)]
        at = [i for i, word in enumerate(words) if word == "mpikv" or (checkout / word).suffix == ".py"]
        if (
            words[0] in ("mpikv", "mpirun", "python")
            and at
            and (words[at[0]] == "mpikv" or (checkout / words[at[0]]).is_file())
        ):
            to_read.append((line, words[at[0] :]))
    if to_read:
        mpi, folder = jobs.find_mpi(), Path(tempfile.mkdtemp(prefix="mpikv-document-"))
        assert mpi is not None, "no MPI in this environment, which the examples import"
        command = [mpi.python, "-c", READ_ONLY, str(checkout), json.dumps([words for _, words in to_read])]
        done = jobs.Running(command, jobs.environment(mpi, {}, folder), folder, BLOCK_TIMEOUT_S).finish()
        assert done.status == 0, done.output
        said = json.loads(done.stdout.splitlines()[-1])
        found += [f"{line}: {one}" for (line, _), one in zip(to_read, said, strict=True) if one]
    return found


# Runs programs of Python until each has read its arguments; prints what they complain of.
READ_ONLY = """
import argparse, contextlib, io, json, os, runpy, sys
from pathlib import Path

class Read(Exception):
    pass

def only_read(parser, words=None, namespace=None):
    read(parser, words, namespace)
    raise Read

read, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, only_read
said = []
os.chdir(sys.argv[1])
for words in json.loads(sys.argv[2]):
    error = io.StringIO()
    sys.argv = words
    with contextlib.redirect_stderr(error), contextlib.suppress(Read, SystemExit):
        if words[0] == "mpikv":
            runpy.run_module("mpikv", run_name="__main__")
        elif "parse_args" in Path(words[0]).read_text():
            sys.path[0] = str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    said.append(error.getvalue().strip().rpartition("\\n")[2])
print(json.dumps(said))
"""


def words(document: Path) -> int:
    fenced = re.compile(r"^```.*?^```|<!--.*?-->", re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\S*\w\S*", fenced.sub("", document.read_text())))


def test_the_documents_are_short() -> None:
    assert 300 < words(ROOT / "README.md") <= README_WORDS
    counted = [path for path in (ROOT / "docs").glob("*.md") if path.name != "gradient.md"]
    assert sum(map(words, counted)) <= DOCS_WORDS


def test_every_variable_stands_in_the_settings_with_its_default() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    for variable in VARIABLES:
        default = getattr(Config(), variable.field)
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert f"| `{variable.name}` | {shown} |" in text, variable.name
    known = set(KNOWN)
    for document in DOCUMENTS:
        named = set(re.findall(r"\bMPIKV_[A-Z_]+\b", (ROOT / document).read_text()))
        assert named <= known, f"{document} names {named - known}"


def test_links_lead_somewhere() -> None:
    for document in (*DOCUMENTS, "CHANGELOG.md"):
        path = ROOT / document
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{document} links to {target}, which is not there"


# --- the test's own reading


def test_blocks_that_nothing_would_execute_are_errors() -> None:
    for text, complaint in (
        ("```console\n$ ls\n```\n", "kind 'console'"),
        ("```sh\nls\n```\n```text\n1\n```\n```text\n1\n```\n", "no block above"),
        ("<!-- ranks: 2 -->\n```sh\nls\n```\n", "above a shell block"),
        ("<!-- ranks: 2 -->\n\ntext\n```python\n1\n```\n", "must follow"),
        ("```sh\nls\n", "no end"),
    ):
        with pytest.raises(ValueError, match=re.escape(complaint)):
            blocks("x.md", text)


def test_a_block_that_fails_or_prints_something_else_fails_the_test(tmp_path: Path) -> None:
    for text in ("```sh\nfalse\n```\n", "```sh\ntrue | false\n```\n", "```python\nprint(1)\n```\n```text\n2\n```\n"):
        with pytest.raises(pytest.fail.Exception):
            Reader(tmp_path, tmp_path).run(blocks("x.md", text)[0])
