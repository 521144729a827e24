"""Names that do not exist, on the command line: the error names what may be meant, and is that of the right command."""

from __future__ import annotations

import re

import pytest

from mpikv.__main__ import main


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--server 2", "mpikv: error: .*; there is no option --server before COMMAND: its options follow it\n"),
        ("lauch -n 2 x", r"mpikv: error: .*\. Did you mean 'launch'\?\n"),
        (
            "launch --server 2 -n 2 x",
            r"mpikv launch: error: .* --server\. Did you mean --env-server or --num-servers\?\n",
        ),
        ("launch -n 2 --servers=2 x --mine", r"mpikv launch: error: .* no option --servers\. Did .* --num-servers.*\n"),
        ("launch -n two ./x --mine", "mpikv launch: error: argument -n/--num-workers: 'two' is not a whole number\n"),
        ("bench modle", r"mpikv bench: error: .*\. Did you mean 'model'\?\n"),
        ("plan --servrs 2", r"mpikv plan: error: .* Did you mean --servers or --servers-take\?\n"),
        ("submit slurm -n 2 --mem=4G x", "mpikv submit slurm: error: .* --mem here; what Slurm .* --option .*\n"),
    ],
)
def test_named(line: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert re.fullmatch(says, said[said.rindex("mpikv", 0, said.index(": error: ")) :]), said
