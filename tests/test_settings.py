"""BLOOM_* settings: defaults, what is accepted, and what is refused and how."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrapy.settings import Settings

from scrapy_bloom import SettingError
from scrapy_bloom.settings import BloomSettings


def read(**values: object) -> BloomSettings:
    return BloomSettings.from_settings(Settings(values))


def test_defaults() -> None:
    assert read() == BloomSettings(
        expected_requests=1_000_000,
        error_rate=1e-6,
        backend="local",
        dir=None,
        on_full="grow",
        window_secs=0.0,
        on_unclean_shutdown="auto",
        sync_secs=30.0,
        salt=None,
    )


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("BLOOM_EXPECTED_REQUESTS", 5, "expected_requests", 5),
        ("BLOOM_EXPECTED_REQUESTS", "1_000_000", "expected_requests", 1_000_000),
        ("BLOOM_EXPECTED_REQUESTS", "1e9", "expected_requests", 10**9),
        ("BLOOM_EXPECTED_REQUESTS", 1e9, "expected_requests", 10**9),
        ("BLOOM_ERROR_RATE", 0.5, "error_rate", 0.5),
        ("BLOOM_ERROR_RATE", "1e-9", "error_rate", 1e-9),
        ("BLOOM_DIR", "x", "dir", "x"),
        ("BLOOM_DIR", Path("x/y"), "dir", "x/y"),
        ("BLOOM_DIR", None, "dir", None),
        ("BLOOM_ON_UNCLEAN_SHUTDOWN", "stop", "on_unclean_shutdown", "stop"),
        ("BLOOM_SYNC_SECS", 0, "sync_secs", 0.0),
        ("BLOOM_SYNC_SECS", "2.5", "sync_secs", 2.5),
        ("BLOOM_SALT", "00112233445566778899aabbccddeeff", "salt", bytes(range(0, 256, 17))),
        ("BLOOM_SALT", None, "salt", None),
    ],
)
def test_accepted(name: str, value: object, field: str, expected: object) -> None:
    assert getattr(read(**{name: value}), field) == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(
            ("BLOOM_EXPECTED_REQUESTS", value, "a whole number from 1 to 1,000,000,000,000")
            for value in (0, -1, 1.5, "1.5", "", "ten", None, True, [], 10**12 + 1, 10**400)
        ),
        *(
            ("BLOOM_ERROR_RATE", value, "a number between 0 and 1")
            for value in (0, 1, -0.1, 1.01, "1%", "", None, False, {}, "nan", "inf", 10**400, 1e-16)
        ),
        *(("BLOOM_WINDOW_SECS", value, "a number of seconds from 0") for value in (-1, "1h", None)),
        ("BLOOM_ON_FULL", "stop", 'one of "grow", "warn", "close"'),
        *(
            ("BLOOM_SYNC_SECS", value, "a number of seconds from 0")
            for value in (-1, "-0.5", "soon", None, True, float("inf"), 10**400)
        ),
        ("BLOOM_BACKEND", "Local", 'one of "local"'),
        ("BLOOM_BACKEND", 1, 'one of "local"'),
        ("BLOOM_ON_UNCLEAN_SHUTDOWN", "", 'one of "auto", "keep", "reset", "stop"'),
        ("BLOOM_ON_UNCLEAN_SHUTDOWN", None, 'one of "auto", "keep", "reset", "stop"'),
        *(
            ("BLOOM_DIR", value, "the path of a directory")
            for value in ("", 7, b"x", "a\0b", "%(job)s", "100%", "%d", "%(spider)d")
        ),
    ],
)
def test_refused(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is ") as caught:
        read(**{name: value})
    message = str(caught.value)
    assert isinstance(caught.value, SettingError)
    assert f"allowed is {allowed}" in message
    assert repr(value)[:20] in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("value", ["", "12", "g" * 32, "0" * 31, "0" * 34, 5, b"0" * 32])
def test_a_bad_salt_is_refused_and_not_shown(value: object) -> None:
    with pytest.raises(SettingError, match="^BLOOM_SALT is not valid .* 32 hexadecimal") as caught:
        read(BLOOM_SALT=value)
    assert str(value) not in str(caught.value).replace("32", "").replace("16", "") or not value


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BLOOM_ERROR_RAET", "did you mean BLOOM_ERROR_RATE?"),
        ("BLOOM_EXPECTED_REQUEST", "did you mean BLOOM_EXPECTED_REQUESTS?"),
        ("BLOOM_XYZ", "known are BLOOM_EXPECTED_REQUESTS, "),
    ],
)
def test_unknown_names_are_refused(name: str, hint: str) -> None:
    with pytest.raises(SettingError, match=f"^{name} is not a setting") as caught:
        read(**{name: 1})
    assert hint in str(caught.value)


def test_other_packages_settings_are_left_alone() -> None:
    assert read(BLOOMFILTER_BIT=30, BLOOMING=1, MY_BLOOM_DIR="x") == BloomSettings()


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_that_cannot_be_shown() -> None:
    with pytest.raises(SettingError, match="an object of type Unprintable"):
        read(BLOOM_BACKEND=Unprintable())


NAMES = [
    *("BLOOM_EXPECTED_REQUESTS", "BLOOM_ERROR_RATE", "BLOOM_BACKEND", "BLOOM_DIR"),
    *("BLOOM_ON_FULL", "BLOOM_WINDOW_SECS", "BLOOM_SALT"),
    *("BLOOM_ON_UNCLEAN_SHUTDOWN", "BLOOM_SYNC_SECS"),
]
ANYTHING = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    *(st.lists(st.integers()), st.dictionaries(st.text(), st.integers()), st.builds(object)),
)


@given(st.sampled_from(NAMES), ANYTHING)
@settings(max_examples=500)
def test_any_value_is_accepted_or_refused_in_one_line(name: str, value: object) -> None:
    try:
        read(**{name: value})
    except SettingError as error:
        assert str(error).startswith(name)
        assert "\n" not in str(error)


def test_where_the_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert read().directory(None, "docs") is None
    assert read().directory("job", "docs") == Path("job/bloom")
    assert read(BLOOM_DIR="kept").directory("job", "docs") == Path("kept")
    assert read(BLOOM_DIR="kept/%(spider)s").directory(None, "docs") == Path("kept/docs")
    assert read(BLOOM_DIR="~/100%%").directory(None, "docs") == Path("/home/someone/100%")
