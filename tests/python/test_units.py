# SPDX-License-Identifier: Apache-2.0
"""Sizes, rates and times as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usbyte import _core
from usbyte._util import units


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("8388608", 8 << 20), ("8M", 8 << 20), ("8MiB", 8 << 20), (" 25k ", 25 << 10),
     ("2g", 2 << 30)],
)  # fmt: skip
def test_bytes(text, value):
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "8MB", "8iB", "1.5M", "M", "8 M", "8T", "1e3", "9" * 19, "9" * 20, "9" * 5000,
     "9999999999G"],
)  # fmt: skip
def test_bad_bytes(text):
    with pytest.raises(ValueError, match="8MiB"):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["1", "8M", "8MiB", "3k", "2G", "0", "8MB", "8iB", "1.5M", "M"])
def test_bytes_are_those_of_the_environment(monkeypatch, text):
    monkeypatch.setenv("USBYTE_CREDIT_BYTES", text)
    try:
        expected = _core.Env.read().credit_bytes
    except _core.EnvError:
        with pytest.raises(ValueError, match="is no size"):
            units.parse_bytes(text)
    else:
        assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("10gbit", 1.25e9), ("10Gbit/s", 1.25e9), ("200 mbit", 25e6), ("8bit", 1.0), ("1.6kbit", 200),
     ("1.25GB/s", 1.25e9), ("1.25GB", 1.25e9), ("5kB/s", 5e3), ("0.4tbit", 50e9),
     ("25Gb/s", 3.125e9), ("25Gbps", 3.125e9), ("25 gb/s", 3.125e9), ("200Mbps", 25e6),
     ("1.25GBps", 1.25e9), ("10Gbits/s", 1.25e9), ("8b/s", 1.0)],
)  # fmt: skip
def test_rates(text, value):
    assert units.parse_rate(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "10", "0gbit", "-1gbit", "10gb", "10Gb", "10Gbyte/s", "10bps/s", "fast", "gbit",
     "1e999bit", "1e308gbit", "1e-400bit",
     "1e99999999999999999999bit"],
)  # fmt: skip
def test_bad_rates(text):
    with pytest.raises(ValueError, match="10gbit"):
        units.parse_rate(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("25us", 25e-6), ("8ms", 8e-3), ("1.5s", 1.5), ("1.5", 1.5), ("0", 0.0), ("40 ns", 40e-9),
     ("1e-3", 1e-3)],
)  # fmt: skip
def test_seconds(text, value):
    assert units.parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "-1s", "soon", "5m", "1e999"])
def test_bad_seconds(text):
    with pytest.raises(ValueError, match="25us"):
        units.parse_seconds(text)


def test_costs():
    assert units.format_cost(6e-3, 12.6e-9, 5e-3) == "6ms (overlap 5ms) + 12.6 ns/byte"
    assert units.format_cost(25e-6, 1e-9, 0) == "25us + 1 ns/byte"


def test_sizes_rates_and_times_in_sentences():
    sizes = {1: "1 B", 1 << 16: "64 KiB", 3 << 19: "1.5 MiB", 1 << 30: "1 GiB", 1 << 41: "2048 GiB"}
    assert [units.format_bytes(size) for size in sizes] == list(sizes.values())
    rates = {1.175e9: "9.4 Gb/s", 1.2496e8: "1 Gb/s", 2e6: "16 Mb/s", 0.5: "4 b/s", 1e12: "8 Tb/s"}
    assert [units.spoken_rate(rate) for rate in rates] == list(rates.values())
    times = {1.2345: "1.23 s", 0.9996: "1 s", 6e-3: "6 ms", 113.4e-6: "113 us", 0: "0 ns"}
    times |= {123.4: "123 s", 5e-9: "5 ns"}
    assert [units.spoken_seconds(seconds) for seconds in times] == list(times.values())


@given(st.floats(1e-3, 1e13))
def test_a_rate_survives_being_written(rate):
    assert units.parse_rate(units.format_rate(rate)) == pytest.approx(rate, rel=1e-5)


@given(st.floats(1e-9, 1e4))
def test_a_time_survives_being_written(seconds):
    assert units.parse_seconds(units.format_seconds(seconds)) == pytest.approx(seconds, rel=1e-3)
