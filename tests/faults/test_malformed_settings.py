"""10,000 malformed settings: each is refused in one line that names the setting, or is harmless."""

import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from scrapy.settings import BaseSettings

from scrapy_bloom import SettingError
from scrapy_bloom.settings.settings import BloomSettings

SEED = 20261121
VALUES = 10_000
LONGEST_MESSAGE = 1000

CHOICES = {
    "BLOOM_BACKEND": {"local", "redis"},
    "BLOOM_ON_FULL": {"grow", "warn", "close"},
    "BLOOM_RECORD_ON": {"scheduled", "crawled"},
    "BLOOM_ON_UNCLEAN_SHUTDOWN": {"auto", "keep", "reset", "stop"},
    "BLOOM_REDIS_ON_OUTAGE": {"close", "pass"},
}
FLAGS = [
    "BLOOM_FORGET_FAILED",
    *("BLOOM_REDIS_CLUSTER", "BLOOM_REDIS_MIRROR", "BLOOM_REDIS_FLUSH"),
]
SECONDS = ["BLOOM_WINDOW_SECS", "BLOOM_SYNC_SECS", "BLOOM_REDIS_DEADLINE_SECS"]
SECRETS = ["BLOOM_SALT", "BLOOM_REDIS_URL"]
NAMES = sorted(
    [
        *("BLOOM_EXPECTED_REQUESTS", "BLOOM_ERROR_RATE", "BLOOM_DIR"),
        *("BLOOM_REDIS_SENTINEL", "BLOOM_REDIS_KEY", "BLOOM_DONE_STATUSES"),
        *(*CHOICES, *FLAGS, *SECONDS, *SECRETS),
    ]
)


def is_documented(name: str, value: Any) -> bool:  # noqa: PLR0911 - one for each kind of setting
    """Whether a value, as it was read, is one that docs/settings.md allows."""
    if name == "BLOOM_EXPECTED_REQUESTS":
        return type(value) is int and 1 <= value <= 10**12
    if name == "BLOOM_ERROR_RATE":
        return type(value) is float and 1e-15 <= value < 1
    if name in SECONDS:
        return type(value) is float and 0 <= value <= 10**9
    if name in CHOICES:
        return value in CHOICES[name]
    if name in FLAGS:
        return type(value) is bool
    if name == "BLOOM_DONE_STATUSES":
        return all(type(each) is int and 100 <= each <= 999 for each in value)
    if name == "BLOOM_SALT":
        return value is None or (type(value) is bytes and len(value) == 16)
    if name == "BLOOM_REDIS_URL":
        return value is None or value.startswith(("redis://", "rediss://", "unix://"))
    return (value is None and name != "BLOOM_REDIS_KEY") or (isinstance(value, str) and value != "")


# What the generator draws from.


def fails(*args: object) -> Any:
    raise RuntimeError("on purpose")


SPECIAL = [
    *("__str__", "__repr__", "__float__", "__int__", "__index__", "__bool__", "__len__"),
    *("__iter__", "__fspath__", "__bytes__", "__format__", "__mod__", "__lt__", "__contains__"),
]


def hostile(base: type, *args: object) -> Any:
    """An object of a type whose special methods fail, all of them."""
    return type("Hostile", (base,), dict.fromkeys(SPECIAL, fails))(*args)


class Unhashable:
    """Equal to nothing, and says so by an error."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return fails()


class SeveralLines:
    def __repr__(self) -> str:
        return "a\nb\r\nc\x1b[31m"


class PathOfBytes:
    def __fspath__(self) -> bytes:
        return b"bytes"


def nested(rng: random.Random) -> object:
    value: object = rng.choice([None, 1, "x"])
    for _ in range(rng.randrange(1, 60)):
        value = rng.choice([[value], (value,), {"a": value}, {1: "x", 2: value}])
    return value


def number(rng: random.Random) -> int | float:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308])
    if kind == 1:
        return rng.choice([1, -1]) * 10 ** rng.randrange(1, 6000)
    if kind == 2:
        return rng.uniform(-2, 2)
    if kind == 3:
        return 10.0 ** rng.randrange(-320, 308)
    if kind == 4:
        return rng.choice([0, 1, -1, 10**12, 10**12 + 1, 10**9, 10**9 + 1, 1 - 1e-16, 1e-15, 9e-16])
    return rng.randrange(-(2**70), 2**70)


def number_as_text(rng: random.Random) -> str:
    value = number(rng)
    digits = hex(value) if isinstance(value, int) else f"{value:.0f}"  # Python refuses long str()
    form = rng.choice(["{}", " {} ", "+{}", "{}_0", "{},0", "{}.", "0{}", "{}e3", "{}%"])
    return form.format(digits)


def text(rng: random.Random) -> str:
    pool = 'ab0159 %(){}/:@?#.,-_~\\"\n\r\t\0\x7f\x85\u2028é\u0663\U0001f600\ud800\udcff'
    return "".join(rng.choice(pool) for _ in range(rng.randrange(12)))


def almost(rng: random.Random) -> str:
    """What is nearly a good value of some setting, with one character changed, gone or added."""
    good = rng.choice(
        [
            *(choice for choices in CHOICES.values() for choice in sorted(choices)),
            *("True", "False", "0", "1", "1000000", "1e-6", "30.0", "None", "jobs/%(spider)s"),
            *("~/filter", "~nobody-of-that-name/filter", "%(spider)s:bloom", "mymaster", "ab" * 16),
            *("redis://localhost:6379/0", "rediss://u:p@h:1/2?a=b", "unix:///run/sock"),
        ]
    )
    if rng.randrange(4) == 0:
        return good  # of another setting, mostly
    place = rng.randrange(len(good) + 1)
    change = rng.choice(["", rng.choice(text(rng) or "x")])
    return good[:place] + change + good[place + rng.randrange(2) :]


def template(rng: random.Random) -> str:
    return rng.choice(
        [
            *("%", "%%", "%s", "%d", "%(", "%()s", "%(spider)", "%(spider)d", "%(job)s"),
            *("%(spider)*s", "%*s", "x%(spider)s%", "%(spider)s%(spider)s%(other)s", "100%"),
            # More than any machine has: to be refused before it is tried.
            *("%(spider)999999999999999s", "%(spider).5s%(spider)99999999999999999999999s"),
        ]
    )


def long(rng: random.Random) -> str:
    unit = rng.choice(["x", "9", "a,", "redis://", "%", "%(spider)s", "0" * 32, "../", "\n", "ä"])
    return rng.choice(["", "redis://", "0.", "1e"]) + unit * rng.choice([200, 5000, 50_000])


OTHERS = [
    *(None, True, False, (), [], {}, set(), frozenset({1}), b"", b"\xff" * 16, b"0" * 32),
    *(bytearray(b"local"), memoryview(b"local"), 1j, Fraction(1, 3), Ellipsis),
    *(object(), type, len, lambda: "local", range(3), Path(), Path("a\0b"), iter(())),
    *(hostile(object), hostile(int, 7), hostile(float, 0.5), hostile(str, "local")),
    *(hostile(str, "redis://h"), hostile(list), hostile(dict), hostile(bytes, b"x")),
    *(Unhashable(), SeveralLines(), PathOfBytes(), ValueError("x"), fails, SettingError),
]


def other(rng: random.Random) -> object:
    return rng.choice(OTHERS)


MAKERS: list[Callable[[random.Random], object]] = [
    *(nested, number, number_as_text, text, almost, template, long, other, other),
]


def described(value: object) -> str:
    try:
        return repr(value)[:200]
    except Exception:  # noqa: BLE001 - that is what some of them are for
        return f"an object of type {type(value).__name__}"


def test_ten_thousand_malformed_values() -> None:
    """A user sees one line with the setting's name, whatever the value is: never a traceback."""
    rng = random.Random(SEED)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
    wrong: list[str] = []
    for count in range(VALUES):
        name = NAMES[count % len(NAMES)]
        value = rng.choice(MAKERS)(rng)
        try:
            read = BloomSettings.from_settings(BaseSettings({name: value}))
            # As the crawl asks for it, once the settings are read.
            read.directory(None, "spider")
        except SettingError as error:
            problem = problem_of_message(name, value, str(error))
            outcomes[name]["refused"] += 1
        except BaseException as error:  # noqa: BLE001 - "any other" is the point
            problem = f"{type(error).__name__}: {str(error)[:100]}"
        else:
            got = getattr(read, name.removeprefix("BLOOM_").lower())
            problem = "" if is_documented(name, got) else f"was read as {got!r}"
            outcomes[name]["accepted"] += 1
        if problem:
            wrong.append(f"{name} = {described(value)}: {problem}")
    some = "\n".join(sorted(set(wrong))[:40])
    assert not wrong, f"seed {SEED}, {len(wrong)} of {VALUES}:\n{some}"
    assert sum(sum(each.values()) for each in outcomes.values()) == VALUES
    assert all(each["refused"] > 100 for each in outcomes.values()), outcomes
    # It also comes upon good ones: else all could be refused.
    assert all(each["accepted"] for each in outcomes.values()), outcomes


def problem_of_message(name: str, value: object, message: str) -> str:
    if not message.startswith(f"{name} is "):
        return f"the message names something else: {message!r}"
    if "allowed" not in message and "set BLOOM_" not in message:
        return f"the message does not say what is allowed: {message!r}"
    if len(message.splitlines()) != 1 or not message.isprintable():
        return f"not one printable line: {message!r}"
    if len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message)} characters"
    secret = value if isinstance(value, str) and type(value) is str else ""
    if name in SECRETS and len(secret) > 16 and secret in message:
        return "the message shows a secret"
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_of_two_malformed_settings_both_are_told_one_after_the_other(name: str) -> None:
    """Once what was told of is put right, the other one is told of."""
    other = "BLOOM_ERROR_RATE" if name != "BLOOM_ERROR_RATE" else "BLOOM_SYNC_SECS"
    values = {name: object(), other: "many"}
    for told in sorted(values):
        with pytest.raises(SettingError, match=f"^{told} is "):
            BloomSettings.from_settings(BaseSettings(values))
        del values[told]
    BloomSettings.from_settings(BaseSettings(values))
