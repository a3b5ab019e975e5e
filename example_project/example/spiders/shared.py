from example.shared import REDIS, SITE
from example.spiders.docs import DocsSpider


class SharedSpider(DocsSpider):
    """The same crawl by many workers, which share filter and queue in Redis."""

    name = "shared"
    custom_settings = {
        **DocsSpider.custom_settings,
        "BLOOM_REDIS_URL": REDIS,
    }

    def __init__(self, url=SITE, **kwargs):
        super().__init__(url, **kwargs)
