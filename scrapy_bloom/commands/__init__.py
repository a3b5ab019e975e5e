"""Define the command `scrapy bloom`, and import its subcommands when it runs.

Scrapy loads this module whenever any of its commands runs, so it imports nothing but Scrapy's own
base class.
"""

import argparse
import importlib
import logging
import os
import re
import signal
import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TextIO

from scrapy.cmdline import ScrapyArgumentParser
from scrapy.commands import ScrapyCommand
from scrapy.exceptions import UsageError

# Each is a module of this package, with the functions add_arguments and run. Its docstring is the
# help, and the first line of it the entry in the list of subcommands.
SUBCOMMANDS = "plan", "info", "queue", "stop", "add", "import_", "check", "copy", "reset", "report"


class BloomCommand(ScrapyCommand):
    """The command that Scrapy finds under the entry point `bloom`."""

    requires_project = False
    requires_crawler_process = False
    default_settings: ClassVar[dict[str, Any]] = {"LOG_ENABLED": False}

    def short_desc(self) -> str:
        """Return the line in the list that `scrapy` prints."""
        return "Plan, inspect, fill, check and copy Bloom filters; control crawls"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommands, each with its own options and Scrapy's global ones."""
        _print_interrupts_in_one_line()  # now, because the imports take a while
        from scrapy_bloom import __version__  # noqa: PLC0415 - see above

        parser.usage, version = "scrapy bloom SUBCOMMAND [options]", f"scrapy_bloom {__version__}"
        subparsers = parser.add_subparsers(
            title="subcommands", metavar="SUBCOMMAND", parser_class=_Parser
        )
        parser.add_argument("--version", action="version", version=version)
        parser.set_defaults(run=None, print_help=parser.print_help)
        parser.__class__ = _Parser  # Scrapy's own parser reports unknown subcommands
        for file in SUBCOMMANDS:
            module: Any = importlib.import_module(f"{__name__}.{file}")
            name = file.removesuffix("_")  # which a keyword of Python has
            description = module.__doc__ or ""  # which python -OO leaves out
            sub = subparsers.add_parser(
                name,
                prog=f"scrapy bloom {name}",
                help=description.partition(".\n")[0],
                description=description,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            module.add_arguments(sub)
            _, _, sub.usage = sub.format_usage().partition(": ")  # without Scrapy's options
            super().add_options(sub)
            sub.set_defaults(run=module.run)

    def process_options(self, args: list[str], opts: argparse.Namespace) -> None:
        """Refuse unknown arguments, and take the global options over into the settings."""
        if opts.run is None:
            opts.print_help(sys.stderr)
            sys.exit(2)
        if args:
            raise UsageError(f"unrecognized arguments: {' '.join(args)}; --help lists all options")
        super().process_options(args, opts)

    def run(self, args: list[str], opts: argparse.Namespace) -> None:  # noqa: ARG002 - Scrapy's
        """Run a subcommand; print a failure in one line, and exit with status 1."""
        from scrapy_bloom.exceptions import BloomError  # noqa: PLC0415 - see above

        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.reconfigure(errors="backslashreplace")  # of characters that it cannot encode
        logger = logging.getLogger("scrapy_bloom")
        logger.addHandler(_Warnings())
        logger.propagate = False
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # for the same clean-up
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            opts.run(opts, self.settings)
            sys.stdout.flush()
        except (BloomError, OSError, MemoryError) as error:
            self.exitcode = 1
            if not isinstance(error, BrokenPipeError):  # else, nobody reads the output any more
                text = str(error) or "there is not enough memory"
                _print_line("error", _without_passwords(text))
            _flush(sys.stdout)


def _flush(stream: TextIO) -> None:
    """Flush a stream; if that fails, drop its text, so that the flush at Python's end succeeds."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_line(kind: str, text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"scrapy bloom: {kind}: {text}\n")
    _flush(sys.stderr)


def _print_interrupts_in_one_line() -> None:
    """Print one line after Ctrl-C; Python then ends the process by the signal, as shells expect."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        _print_line("error", "interrupted") if is_interrupt else before(kind, error, trace)

    sys.excepthook = hook


class _Parser(ScrapyArgumentParser):
    """Parses arguments; masks the passwords in its errors."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search("SUBCOMMAND: invalid choice: '(.*?)'", message):
            near = get_close_matches(unknown[1], SUBCOMMANDS, n=1)
            message += f"; did you mean {near[0].removesuffix('_')}?" if near else ""
        super().error(_without_passwords(message))


def _without_passwords(text: str) -> str:
    """Return a message without passwords; one in an argument of the command may have any form."""
    from scrapy_bloom.text import escaped, masked, masked_url  # noqa: PLC0415 - see above

    for argument in sys.argv[1:]:
        if (hidden := masked_url(argument)) != argument:
            for form in (argument, repr(argument)[1:-1], str(Path(argument))):
                text = text.replace(form, hidden)
    return escaped(masked(text))


class _Warnings(logging.Handler):
    """Prints the warnings of the package, which a crawl would log, on the error output."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:  # the command reports an error itself
            _print_line("warning", _without_passwords(record.getMessage()))
