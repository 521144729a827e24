"""What is known of hosts' links: given, read from a file, or what follows from streams that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpikv.errors import ConfigError
from mpikv.placement.links import ASSUMED, STEP, LinkRates, announced, expected, given, in_ring, to_json


def measured(*bytes_per_s: float) -> LinkRates:
    """Of streams from each host of a, b, c, ... to the next one."""
    return in_ring("abcdefg"[: len(bytes_per_s)], bytes_per_s, [1e-5] * len(bytes_per_s))


def of_links(*rates: float) -> LinkRates:
    """The streams that links of these rates carry."""
    return measured(*(min(rate, rates[(i + 1) % len(rates)]) for i, rate in enumerate(rates)))


@pytest.mark.parametrize("n", range(2, 7))
def test_equal_links_are_equal_whatever_the_measurement_says(n: int) -> None:
    noisy = [100 * 1.08 ** (1 - i % 3) for i in range(n)]
    found = of_links(*noisy)
    assert {rate for _, rate in found.by_host} == {found.bytes_per_s}


def test_one_slow_link_is_found_by_both_of_its_streams() -> None:
    for slow in range(4):
        rates = [100.0] * 4
        rates[slow] = 50.0
        found = of_links(*rates)
        assert found.bytes_per_s == 100
        exact = dict(zip("abcd", rates, strict=True))
        for host, rate in found.by_host:
            assert exact[host] / 1.1 <= rate <= exact[host] * 1.1
        assert [rate for _, rate in found.by_host if rate != 100] == [pytest.approx(100 * STEP**-2)]


def test_two_slow_links() -> None:
    """Where all streams of a host meet slow links, its own looks slow: nothing can be sent faster between these."""
    assert [rate < 90 for _, rate in of_links(50, 100, 100, 50, 100).by_host] == [True, False, False, True, True]
    assert [rate < 90 for _, rate in of_links(50, 50, 100, 100, 100).by_host] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("text", "rate", "latency_s"),
    [("200mbit", 25e6, 50e-6), ("10gbit,20us", 1.25e9, 20e-6), ("1gbit/s,1ms", 125e6, 1e-3)],
)
def test_given_as_text(text: str, rate: float, latency_s: float) -> None:
    found = given(text)
    assert found is not None
    assert (found.bytes_per_s, found.latency_s) == (pytest.approx(rate), pytest.approx(latency_s))
    assert (found.by_host, found.source) == ((), f"MPIKV_LINK={text}")
    assert announced(text) == text
    assert (given("auto"), expected("auto"), announced("auto")) == (None, ASSUMED, "auto")


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    found = of_links(100, 100, 100, 50)
    file.write_text(json.dumps(to_json(found)))
    read = given(str(file))
    assert read is not None
    assert [read.of(host) for host in "abcdx"] == [found.of(host) for host in "abcdx"]
    assert read.latency_s == found.latency_s
    assert json.loads(announced(str(file))) == to_json(found)
    assert str(read) == f"MPIKV_LINK={file}: 0.0008 Mbit/s, 10 us, d 0.000408 Mbit/s"


BAD = (
    *("", "[]", "{}", '{"bytes_per_s": -1, "latency_s": 0, "hosts": {}}'),
    *('{"bytes_per_s": 1, "latency_s": NaN, "hosts": {}}', '{"bytes_per_s": 1, "latency_s": 0, "hosts": {"a": 0}}'),
    '{"bytes_per_s": 1, "latency_s": 0, "hosts": [3]}',
)


def test_no_such_file(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    for content in BAD:
        file.write_text(content)
        with pytest.raises(ConfigError, match="no file that `mpikv bench link --save` has written"):
            given(str(file))
    with pytest.raises(ConfigError, match=r"MPIKV_LINK='.*missing.json': No such file"):
        given(str(tmp_path / "missing.json"))
