"""BLOOM_* settings: defaults, what is accepted, and what is refused and how."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrapy.settings import Settings

from scrapy_bloom import SettingError
from scrapy_bloom.redis.url import SCHEMES
from scrapy_bloom.settings import _SETTINGS, BloomSettings


def read(**values: object) -> BloomSettings:
    return BloomSettings.from_settings(Settings(values))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("BLOOM_EXPECTED_REQUESTS", "1_000_000", 1_000_000),
        ("BLOOM_EXPECTED_REQUESTS", "1e9", 10**9),
        ("BLOOM_EXPECTED_REQUESTS", 1e9, 10**9),
        ("BLOOM_ERROR_RATE", "1e-9", 1e-9),
        *(
            ("BLOOM_WINDOW_SECS", value, seconds)
            for value, seconds in {
                0: 0,
                "2.5": 2.5,
                "90s": 90,
                "1.5m": 90,
                "12h": 43_200,
                "7 D": 604_800,
                "2w": 1_209_600,
                "1e3": 1000,
            }.items()
        ),
        ("BLOOM_REDIS_URL", "", None),
        ("BLOOM_REDIS_MIRROR", "0", False),
        ("BLOOM_REDIS_MIRROR", "True", True),
        ("BLOOM_REDIS_URL", "rediss://me:pw@h:1/2?a=b", "rediss://me:pw@h:1/2?a=b"),
        *(
            ("BLOOM_REDIS_URL", url, url)
            for url in (
                *("redis+cluster://h", "rediss+cluster://me:pw@[::1]:7000/0"),
                *("redis+sentinel://a:1,b,c/s", "rediss+sentinel://me:pw@a:1,[::1]/s/3?x=y"),
            )
        ),
        ("BLOOM_REDIS_URL", "unix:///run/sock", "unix:///run/sock"),
        ("BLOOM_REDIS_URL", None, None),
        ("BLOOM_REDIS_MIRROR", 0, False),
        ("BLOOM_REDIS_KEY", "seen:%(spider)s:100%%", "seen:%(spider)s:100%%"),
    ],
)
def test_accepted(name: str, value: object, expected: object) -> None:
    assert getattr(read(**{name: value}), name.removeprefix("BLOOM_").lower()) == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(
            ("BLOOM_EXPECTED_REQUESTS", value, "a whole number from 1 to 1,000,000,000,000")
            for value in (0, 1.5, "ten", "1,5M", "5Mio", "7d", None, True, [], 10**12 + 1, 10**400)
        ),
        *(
            ("BLOOM_ERROR_RATE", value, "a number between 0 and 1")
            for value in (0, 1, -0.1, 1.01, "1%", "", None, False, {}, "nan", "inf", 10**400, 1e-16)
        ),
        *(
            ("BLOOM_WINDOW_SECS", value, "a number of seconds from 0")
            for value in (-1, "1y", None, "", "7days", "1,5h", "1e9d", "nand", True, float("inf"))
        ),
        *(("BLOOM_REDIS_MIRROR", entry, "True or False") for entry in ("", "yes", None, 2, [])),
        *(
            ("BLOOM_REDIS_KEY", value, "a name without braces")
            for value in ("", None, 5, b"x", "{x}", "x}", "%(job)s", "100%", "%d")
        ),
        *(
            ("BLOOM_QUEUE_LEASE_SECS", value, "a number of seconds from 1 to 86,400")
            for value in (0, 0.5, 86_401, "2d", None)
        ),
        ("BLOOM_QUEUE_WHEN_EMPTY", "stay", 'one of "close", "wait"'),
    ],
)
def test_refused(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is ") as caught:
        read(**{name: value})
    message = str(caught.value)
    assert isinstance(caught.value, SettingError)
    assert f"set it to {allowed}" in message
    assert repr(value)[:20] in message
    assert "\n" not in message
    assert len(message) < 300


def test_only_workers_of_a_shared_queue_can_wait() -> None:
    with pytest.raises(SettingError, match="^BLOOM_QUEUE_WHEN_EMPTY .* shared queue") as caught:
        read(BLOOM_QUEUE_WHEN_EMPTY="wait")
    assert "\n" not in str(caught.value)


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


def test_the_names_of_other_packages() -> None:
    assert read(BLOOMFILTER_BIT=30, BLOOMING=1, MY_BLOOM_RUN="x") == read() == BloomSettings()


def fails(*_: object) -> None:
    raise RuntimeError("on purpose")


SPECIAL = [
    *("__str__", "__repr__", "__float__", "__int__", "__index__", "__bool__", "__len__"),
    *("__iter__", "__fspath__", "__bytes__", "__format__", "__mod__", "__lt__", "__contains__"),
]


def hostile(base: type, *args: object) -> object:
    """Make an object of a type whose special methods all fail."""
    return type("Hostile", (base,), dict.fromkeys(SPECIAL, fails))(*args)


ANYTHING = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    *(st.lists(st.integers()), st.dictionaries(st.text(), st.integers()), st.builds(object)),
    st.sampled_from(["%", "%(", "%(job)s", "%(spider)*s", "%(spider)999999999999999s", "9" * 5000]),
    st.sampled_from([hostile(object), hostile(int, 7), hostile(float, 0.5), hostile(str, "local")]),
)


@given(st.sampled_from(sorted(_SETTINGS)), ANYTHING)
@settings(max_examples=500)
def test_any_value_is_accepted_or_refused_in_one_line(name: str, value: object) -> None:
    try:
        read(**{name: value})
    except SettingError as error:
        assert str(error).startswith(name)
        assert str(error).isprintable()
        assert len(str(error)) <= 1000


SECRET = "hushhush"  # in every password here, and nowhere else


def place(**values: object) -> tuple[str | None, dict[str, object]]:
    """The URL of the server under scrapy-redis's scheduler, and its parameters."""
    read_settings = BloomSettings.from_settings(Settings(values), scrapy_redis=True)
    assert SECRET not in repr(read_settings)
    assert SECRET not in str(read_settings)
    return read_settings.redis_url, dict(read_settings.redis_params)


# The forms of bad URLs are those of tests/redis/connection/test_redis_urls.py.
BAD_URLS = [
    *(5, b"redis://host", ["redis://host"], True, SECRET),
    *(f"redis://:a?{SECRET}@host", f"redis+sentinel://:{SECRET}@a,b"),
]


@pytest.mark.parametrize("name", ["BLOOM_REDIS_URL", "REDIS_URL"])
@pytest.mark.parametrize("value", BAD_URLS)
def test_a_bad_url_is_refused_and_not_shown(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"^{name} is not valid ") as caught:
        place(**{name: value})
    message = str(caught.value)
    scheme = str(value).partition("://")[0]
    form = f"{scheme if scheme in SCHEMES else 'redis'}://[[user]:password@]"
    assert f"use {form}" in message
    assert SECRET not in f"{message} {caught.value!r} {caught.value.__context__!r}"
    assert "\n" not in message


@pytest.mark.parametrize(
    "name",
    [
        *("BLOOM_QUEUE_WHEN_EMPTY", "BLOOM_REDIS_MIRROR", "BLOOM_REDIS_KEY"),
        "BLOOM_EXPECTED_REQUESTS",
    ],
)
@pytest.mark.parametrize("url", [f"redis://:{SECRET}@localhost/0", f"redis:{SECRET}@localhost"])
def test_a_url_in_another_setting_is_refused_and_not_shown(name: str, url: str) -> None:
    with pytest.raises(SettingError, match=rf"^{name} is a URL \(it is not logged\)") as caught:
        read(**{name: url})
    assert SECRET not in f"{caught.value} {caught.value!r} {caught.value.__context__!r}"


def test_the_redis_url_counts_alone() -> None:
    scrapy_redis = {
        "REDIS_URL": "redis://other",
        "REDIS_HOST": "other",
        "REDIS_PORT": 1,
        "REDIS_DB": 1,
        "REDIS_PARAMS": {"password": SECRET, "url": "redis://other"},
    }
    url = f"redis://:{SECRET}@host"
    assert place(BLOOM_REDIS_URL=url, **scrapy_redis) == (url, {})
    # Under another scheduler, nothing of it matters.
    assert read(REDIS_URL=5, REDIS_PARAMS="x") == BloomSettings()


@pytest.mark.parametrize(
    ("values", "url", "params"),
    [
        ({"REDIS_URL": f"redis://:{SECRET}@h"}, f"redis://:{SECRET}@h", {}),
        ({"REDIS_PARAMS": {"url": "redis://h/1"}}, "redis://h/1", {}),
        ({"REDIS_URL": "redis://a", "REDIS_PARAMS": {"url": "redis://b"}}, "redis://a", {}),
        # What the URL does not say comes from the others: so does redis-py take it.
        ({"REDIS_URL": "redis://a", "REDIS_DB": 3}, "redis://a", {"db": 3}),
        ({"REDIS_HOST": "h"}, "redis://h:6379/0", {}),
        ({"REDIS_HOST": "h", "REDIS_PORT": "7", "REDIS_DB": "2"}, "redis://h:7/2", {}),
        ({"REDIS_HOST": "::1"}, "redis://[::1]:6379/0", {}),
        ({"REDIS_PARAMS": {"host": "h", "port": 7, "db": 2}}, "redis://h:7/2", {}),
        ({"REDIS_HOST": "a", "REDIS_PARAMS": {"host": "b"}}, "redis://a:6379/0", {}),
        ({"REDIS_PARAMS": {"ssl": True}}, "rediss://localhost:6379/0", {}),
        (
            {"REDIS_HOST": "h", "REDIS_PARAMS": {"unix_socket_path": "/run/a b", "db": 2}},
            "unix:///run/a%20b",
            {"db": 2},
        ),
        (
            {"REDIS_PARAMS": {"password": SECRET, "socket_timeout": 3}},
            "redis://localhost:6379/0",
            {"password": SECRET, "socket_timeout": 3},
        ),
        (
            {"REDIS_PARAMS": f'{{"password": "{SECRET}"}}'},  # on the command line
            "redis://localhost:6379/0",
            {"password": SECRET},
        ),
    ],
)
def test_scrapy_redis_settings(
    values: dict[str, object], url: str, params: dict[str, object]
) -> None:
    assert place(**values) == (url, params)


@pytest.mark.parametrize("value", [SECRET, 5, [SECRET], f'["{SECRET}"]', f'{{"password": {SECRET}'])
def test_bad_redis_params_are_refused_and_not_shown(value: object) -> None:
    with pytest.raises(SettingError, match="^REDIS_PARAMS is not valid; use a dict") as caught:
        place(REDIS_PARAMS=value)
    assert SECRET not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    "values",
    [
        {"REDIS_PORT": SECRET},
        {"REDIS_DB": SECRET},
        {"REDIS_HOST": f"redis://:{SECRET}@host"},
        {"REDIS_HOST": f"me:{SECRET}@host"},
        {"REDIS_PARAMS": {"unix_socket_path": SECRET}},
    ],
)
def test_bad_redis_places_are_refused_and_not_shown(values: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="^REDIS_HOST, REDIS_PORT, REDIS_DB or ") as caught:
        place(**values)
    assert SECRET not in f"{caught.value} {caught.value!r}"
