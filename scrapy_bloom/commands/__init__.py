"""The command `scrapy bloom`: whatever is done to a filter around a crawl, from the shell.

Scrapy loads this module whenever any of its commands runs. So nothing is imported here but
Scrapy's own base class: the subcommands are imported when one of them is asked for.
"""

import argparse
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TextIO

from scrapy.cmdline import ScrapyArgumentParser
from scrapy.commands import ScrapyCommand
from scrapy.exceptions import UsageError

# Each is a module here, whose docstring is its help, with SYNTAX, HELP, add_arguments and run.
SUBCOMMANDS = (
    "plan",
    "info",
    "ls",
    "queue",
    "stop",
    "add",
    "import_",
    "check",
    "forget",
    "merge",
    "push",
    "pull",
    "reset",
    "report",
)


class BloomCommand(ScrapyCommand):
    """The command that Scrapy finds under the entry point `bloom`."""

    requires_project = False
    requires_crawler_process = False
    default_settings: ClassVar[dict[str, Any]] = {"LOG_ENABLED": False}

    def syntax(self) -> str:
        """Return the part of the usage line after `scrapy bloom`."""
        return "SUBCOMMAND [options]"

    def short_desc(self) -> str:
        """Return the line in the list that `scrapy` prints."""
        return "Plan, look into, fill, check, merge and move Bloom filters; stop crawls"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add Scrapy's global options, before or after the subcommand's name, and its own."""
        _print_interrupts_in_one_line()  # here, since the imports take the time
        super().add_options(parser)
        subparsers = parser.add_subparsers(
            title="subcommands", dest="subcommand", metavar="SUBCOMMAND", parser_class=_Parser
        )
        parser.set_defaults(run=lambda *_: parser.print_help(), parser=parser)
        parser.__class__ = _Parser  # it is Scrapy's, and tells what is no subcommand
        for name, module in _subcommands():
            sub = subparsers.add_parser(
                name,
                prog=f"scrapy bloom {name}",
                usage=f"scrapy bloom {name} {module.SYNTAX}",
                help=module.HELP,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                conflict_handler="resolve",
            )
            super().add_options(sub)
            _keep_what_stands_before(sub)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run, parser=sub)

    def process_options(self, args: list[str], opts: argparse.Namespace) -> None:
        """Refuse unknown arguments, and take the global options over into the settings."""
        if hasattr(opts, "rest") and not any(argument.startswith("-") for argument in args):
            # argparse takes them only if no option stands before them.
            opts.rest, args = [*opts.rest, *args], []
        if args:
            opts.parser.error(f"unrecognized arguments: {' '.join(args)}")
        opts.set = [*opts.set, *getattr(opts, "set_after", [])]
        try:
            super().process_options(args, opts)
        except UsageError as error:
            opts.parser.error(str(error))

    def run(self, args: list[str], opts: argparse.Namespace) -> None:  # noqa: ARG002 - Scrapy's
        """Run a subcommand. Whatever fails is told in one line, and ends with status 1."""
        from scrapy_bloom.exceptions import (  # noqa: PLC0415 - see above
            TROUBLESHOOTING,
            BloomError,
        )

        _repair_streams()
        _show_warnings()
        _interrupt_on_sigterm()
        failure: Exception | None = None
        is_terminated = False
        try:
            opts.run(opts, self.settings)
        except UsageError as error:
            opts.parser.error(str(error))
        except _Terminated:
            is_terminated = True
        except (BloomError, OSError, MemoryError) as error:
            failure = error
        finally:
            unwritten = _flush(sys.stdout)
        if is_terminated:
            self.exitcode = 128 + signal.SIGTERM
            _print_error("terminated")
            return
        if unwritten is not None and not isinstance(failure, BloomError):
            failure = unwritten
        if failure is None:
            return
        self.exitcode = 1
        if isinstance(failure, MemoryError):
            _print_error("there is not enough memory for that")
        elif not is_broken_pipe(failure):  # else nobody reads the output any more
            what = "the output cannot be written: " if failure is unwritten else ""
            where = f" ({TROUBLESHOOTING})" if isinstance(failure, BloomError) else ""
            _print_error(_shown(f"{what}{failure}") + where)


def _flush(stream: TextIO) -> OSError | None:
    """Write what a stream still holds; return why that failed, if it did.

    Then what is left must not fail once more when Python ends.
    """
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _print_error(why: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"scrapy bloom: error: {why}\n")
    _flush(sys.stderr)


def _print_interrupts_in_one_line() -> None:
    """Print no traceback after Ctrl-C. Python itself then ends the process by the signal.

    That is 130 for a shell. Its loops would not stop after an exit with that status.
    """
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _print_error("interrupted")
        else:
            before(kind, error, trace)

    sys.excepthook = tell


class _Terminated(KeyboardInterrupt):
    """A SIGTERM, which has the same clean-up as Ctrl-C."""


def _interrupt_on_sigterm() -> None:
    def terminate(number: int, frame: object) -> None:  # noqa: ARG001 - as Python calls it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the clean-up is not to be interrupted
        raise _Terminated

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)


def is_broken_pipe(error: Exception) -> bool:
    """Return whether nobody reads the output any more; Windows says it in other words."""
    if sys.platform == "win32" and isinstance(error, OSError) and error.errno == errno.EINVAL:
        return error.filename is None  # else it is a name that no file can have
    return isinstance(error, BrokenPipeError)


class _Parser(ScrapyArgumentParser):
    """A parser of arguments: its errors repeat them, but for passwords."""

    def error(self, message: str) -> NoReturn:
        super().error(_shown(message))


def _shown(text: str) -> str:
    from scrapy_bloom.text import escaped, masked  # noqa: PLC0415 - see above

    return escaped(masked(text))


def _subcommands() -> Iterator[tuple[str, Any]]:
    for name in SUBCOMMANDS:  # one that is a word of Python's has an underscore
        yield name.removesuffix("_"), importlib.import_module(f"{__name__}.{name}")


def _keep_what_stands_before(sub: argparse.ArgumentParser) -> None:
    """Let `scrapy bloom -s A=1 plan -s B=2` set both: a default after it would undo the first."""
    for action in sub._actions:  # noqa: SLF001 - argparse has no other way to them
        if action.dest == "set":
            action.dest = "set_after"
        action.default = argparse.SUPPRESS


def _repair_streams() -> None:
    """Replace streams that came closed, and escape what a terminal cannot show."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - for good
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _show_warnings() -> None:
    """Print on the error output what the package would warn of in a crawl's log."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_OneLine())
    logger = logging.getLogger("scrapy_bloom")
    logger.addHandler(handler)
    logger.propagate = False


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"scrapy bloom: {record.levelname.lower()}: {_shown(record.getMessage())}"
