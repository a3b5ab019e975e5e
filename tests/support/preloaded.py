"""What every crawl and command imports: the process that forks them imports it first."""

import importlib
import pkgutil
import sys

import scrapy.commands
import scrapy.pqueues
import scrapy.squeues
from scrapy.settings import default_settings

import scrapy_bloom

for name, components in vars(default_settings).items():
    if name.endswith("_BASE") and isinstance(components, dict):
        for path in components:
            if isinstance(path, str) and path.startswith("scrapy."):
                importlib.import_module(path.rpartition(".")[0])
importlib.import_module(default_settings.DOWNLOAD_HANDLERS_BASE["http"].rpartition(".")[0])
for package in (scrapy.commands, scrapy_bloom):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

assert "twisted.internet.reactor" not in sys.modules  # each crawl chooses its own
