"""A site of as many pages as each module needs."""

from collections.abc import Iterator

import pytest

from tests.support import sites


@pytest.fixture
def tree(request: pytest.FixtureRequest) -> Iterator[sites.Site]:
    site = sites.tree_site(request.module.PAGES)
    yield site
    site.end()
