"""docs/troubleshooting.md explains each error and warning of the source, literally."""

from collections import Counter

from tests.support import messages


def test_each_error_and_warning_is_explained() -> None:
    assert not messages.missing()


def test_no_explained_message_is_out_of_date() -> None:
    assert len(messages.entries()) > 150
    assert not messages.stale()


def test_no_message_is_explained_twice() -> None:
    assert not [text for text, count in Counter(messages.entries()).items() if count > 1]
