"""What this machine has, and what it must have: CI names that."""

import os

from tests.support import sites

REQUIRED = os.environ.get("SCRAPY_BLOOM_TEST_REQUIRE", "").split(",")
# Where it is installed, the documentation of Python is crawled too: real pages, which no one
# here wrote. CI installs it and says so, and then it has to be there.
REAL_SITES = ["python3-doc"] if sites.PYTHON_DOC.exists() else []
