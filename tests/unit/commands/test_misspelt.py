"""Names that do not exist, on the command line: the error says what may be meant, or used, in the right command."""

from __future__ import annotations

import re

import pytest

from mpikv.__main__ import main


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lauch -n 2 x", r"mpikv: error: .*\. Did you mean 'launch'\?\n"),
        ("launch -n 2 --server 2 x", r"mpikv launch: error: .* --server\. Did .* --num-servers\?\n"),
        ("launch -n 2 --servers=2 x --mine", r"mpikv launch: error: .*: --servers=2\. Did you mean --num-servers.*\n"),
        ("bench modle", r"mpikv bench: error: .*\. Did you mean 'model'\?\n"),
        ("plan --servrs 2", r"mpikv plan: error: .* Did you mean --servers or --servers-take\?\n"),
        ("records pack x", r"mpikv: error: .*'records' is gone: use MXNet's im2rec, or .*\n"),
        ("submit slurm -n 2 --mem=4G x", "mpikv submit slurm: error: .*: --mem=4G; what Slurm .* --option .*\n"),
    ],
)
def test_named(line: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert re.fullmatch(says, said[said.rindex("mpikv", 0, said.index(": error: ")) :]), said
