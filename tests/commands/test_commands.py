"""`scrapy bloom` as a whole: its examples, its errors, and what it adds to scrapy commands."""

import importlib
import re
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest

import scrapy_bloom
from scrapy_bloom.commands import SUBCOMMANDS
from tests.support import servers, workspace
from tests.support.cli import Ran, at_a_terminal, bloom
from tests.support.crawls import run_script
from tests.support.shell import run_in_shell
from tests.support.workspace import (
    fingerprints,
    make_filter,
    urls,
    write_seen,
    write_urls,
)

EXAMPLE = re.compile(r"^  scrapy bloom (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project; the commands of the other tests run outside of any."""
    return workspace.start_project(tmp_path_factory.mktemp("bloom") / "work")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_examples_of_each_help(name: str, directory: Path) -> None:
    commands = EXAMPLE.findall(importlib.import_module(f"scrapy_bloom.commands.{name}").__doc__)
    assert commands
    assert all(each_command.split()[0] == name.removesuffix("_") for each_command in commands)
    ran = workspace.run_examples(commands, directory / name)
    for command, entry in zip(commands, ran, strict=True):
        assert entry.status == 0, (command, entry)
        assert entry.out, command
        assert "Traceback" not in entry.err
        if "--json" in command:
            assert entry.json


def test_the_help(tmp_path: Path) -> None:
    top = bloom("--help", cwd=tmp_path)
    assert (top.status, top.err) == (0, "")
    assert bloom(cwd=tmp_path) == Ran(2, "", top.out)
    for name in SUBCOMMANDS:
        module = importlib.import_module(f"scrapy_bloom.commands.{name}")
        word = name.removesuffix("_")
        assert re.search(rf"^    {word} +{re.escape(module.__doc__[:30])}", top.out, re.MULTILINE)
        ran = bloom(word, "--help", cwd=tmp_path)
        assert ran.status == 0
        assert f"usage: scrapy bloom {word} " in ran.out
        assert EXAMPLE.search(ran.out)


@pytest.mark.parametrize("name", ["", *SUBCOMMANDS])
def test_the_help_fits_a_terminal(name: str, tmp_path: Path) -> None:
    """That of a subcommand ends with Scrapy's own options."""
    arguments = [*filter(None, [name.removesuffix("_")]), "--help"]
    lines = at_a_terminal(*arguments, cwd=tmp_path, columns=80).out.splitlines()
    assert not [line for line in lines if len(line) > 80]
    end = [line for line in lines if line.startswith("Global Options")]
    assert len(end) == bool(name)
    assert not name or "  --pdb" in lines[-1]


def test_the_help_needs_no_docstrings(tmp_path: Path) -> None:
    code = """
        import sys
        from scrapy.cmdline import execute
        for name in sys.argv[1:]:
            try:
                execute(["scrapy", "bloom", *name.split(), "--help"])
            except SystemExit as end:
                assert not end.code
    """
    names = ["", *(name.removesuffix("_") for name in SUBCOMMANDS)]
    ran = run_script(code, *names, cwd=tmp_path, prefix=("env", "PYTHONOPTIMIZE=2"))
    assert ran.returncode == 0, ran
    assert ran.stdout.lower().count("usage") >= len(names)


def test_the_version(tmp_path: Path) -> None:
    assert bloom("--version", cwd=tmp_path) == Ran(
        0, f"scrapy_bloom {version('scrapy-bloom')}\n", ""
    )
    assert scrapy_bloom.__version__ == version("scrapy-bloom")


NOWHERE = "neither BLOOM_REDIS_URL nor JOBDIR"
WRONG_USAGE = {
    "nonsense": "invalid choice: 'nonsense'",
    "plan --nonsense": "unrecognized arguments: --nonsense; --help lists all options",
    "plan '12 apples'": "'12 apples'",
    "plan -s 'no value'": "Invalid -s value, use -s NAME=VALUE",
    **dict.fromkeys(["info", "queue", "stop", "reset"], NOWHERE),
    "info redis://localhost --scan": "the name of the filter is missing; give URL#KEY",
    "import urls redis:/localhost/0#k": "redis:/localhost/0#*** is neither a path nor the URL of",
    "info job --watch 0": "'0' is not an interval",
    "info job --watch x": "'x' is not an interval",
    "info --watch job": "use a time from 0.1 seconds to 1 day, such as 1m",
    "check https://a.example job": "give the filter first, and then URLs",
    "import urls http://a.example/0#k": "http://a.example/0#*** is neither a path nor",
    "queue job --drop --requeue": "argument --requeue: not allowed with argument --drop",
    "queue job --drop --json": "--json: not allowed with argument --drop",
    "info job --format prometheus --scan": "not allowed with argument --format",
    "import only-a-source": "required: ",
    "copy a": "required: DST",
    "infos": "did you mean info?",
    "info 'redis://localhost#{shop}'": "use one without braces",
    "info redis://localhost --spider '{shop}'": "use one without braces",
    "copy redis b": "the name of the filter is missing; give URL#KEY",
    "check job": "required: URL|URLFILE",
}


@pytest.mark.parametrize("command", WRONG_USAGE)
def test_wrong_usage_ends_with_2(command: str, tmp_path: Path) -> None:
    ran = bloom(*shlex.split(command), cwd=tmp_path)
    assert ran.status == 2, ran
    assert not ran.out
    error = ran.err.partition("error: ")[2]
    assert WRONG_USAGE[command] in error
    assert "Traceback" not in ran.err


FAILURES = {
    "plan 1M -s BLOOM_QUEUE_WHEN_EMPTY=sit": "BLOOM_QUEUE_WHEN_EMPTY is 'sit'; set it to",
    "info nowhere": "nowhere does not exist; give a JOBDIR",
    "info .": "holds no filter; give a JOBDIR",
    "import nowhere filter": "nowhere does not exist; give a list, or a URL that begins with",
    "import / SERVER#KEY": "/ is a directory; give a file with a list of URLs",
    "info redis://:secret@localhost:1x/0#k": "the URL is not valid (its value is not logged): use",
    "info SERVER9999#k": "index is out of range; the server has no such database: end the URL with",
    "info redis#k -s BLOOM_REDIS_URL=http://h": "BLOOM_REDIS_URL is not valid (its value is not",
    "reset nowhere --yes": "nowhere does not exist",
    "report nowhere -o .": ". cannot be written: give a file in a directory that exists",
    "stop .": "holds no queue of CrashSafeScheduler; give its JOBDIR",
    "stop SERVER#KEY": "has no queue 'KEY'; `scrapy bloom info` with the URL alone lists",
    "info SERVER#KEY": "has no filter 'KEY'; `scrapy bloom info` with the URL alone lists",
    "queue nowhere": "nowhere does not exist; give a JOBDIR, a URL such as redis://localhost:6379",
    "add SERVER#KEY https://a.example": "has no queue 'KEY'; no request was added; give the",
}


@pytest.mark.parametrize("command", FAILURES)
def test_a_failure_is_one_line(
    command: str, key: str, server: servers.Server, tmp_path: Path
) -> None:
    real = command.replace("SERVER", server.url).replace("KEY", key)
    ran = bloom(*shlex.split(real), cwd=tmp_path)
    assert FAILURES[command].replace("KEY", key) in ran.error
    assert not ran.out
    assert "secret" not in ran.err
    assert not list(tmp_path.iterdir())
    assert not server.client.exists(key)


def test_arguments_in_the_wrong_order_and_with_typing_errors(tmp_path: Path) -> None:
    make_filter(tmp_path / "jobs/shop", fingerprints(urls(range(3))))
    write_urls(tmp_path / "urls.txt", urls(range(2, 5)))
    error = bloom("check", "urls.txt", "jobs/shop", cwd=tmp_path).error
    assert "urls.txt is a file; give a JOBDIR, and a list of URLs after it" in error
    error = bloom("info", "jobs/shop/typo", cwd=tmp_path).error
    assert "jobs/shop/typo does not exist" in error  # not the filter of its parent
    for command, directory in (("info", "jobs"), ("info", "jobs/shpo"), ("queue", "jobs/shpo")):
        assert bloom(command, directory, cwd=tmp_path).error.endswith("; did you mean jobs/shop?")
    error = bloom("check", "jobs/shop", "shop.example/1", cwd=tmp_path).error
    assert "shop.example/1 does not exist; give a list, or a URL that begins" in error
    checked = bloom("check", "jobs/shop", "urls.txt", *urls([0, 9]), "--json", cwd=tmp_path).json
    assert (checked["read"], checked["seen"]) == (5, 2)


def test_a_job_of_scrapys_own_scheduler(tmp_path: Path) -> None:
    (tmp_path / "job/requests.queue").mkdir(parents=True)
    (tmp_path / "job/requests.queue/active.json").write_text("[]")
    write_seen(tmp_path / "job/requests.seen", fingerprints(urls(range(3))))
    for command in ("queue", "add", "stop"):
        arguments = urls([1]) if command == "add" else []
        error = bloom(command, "job", *arguments, cwd=tmp_path).error
        assert "job holds a queue of Scrapy's own scheduler" in error, command
        assert 'SCHEDULER = "scrapy_bloom.CrashSafeScheduler" takes it over' in error
    for command in (["info", "job"], ["check", "job", *urls([1])], ["reset", "job"]):
        error = bloom(*command, cwd=tmp_path).error
        assert "job is a job with Scrapy's own duplicate filter" in error, command


def test_settings_of_the_project_and_of_the_command_line(tmp_path: Path) -> None:
    project = workspace.start_project(tmp_path / "work")
    with (project / "shopping/settings.py").open("a") as file:
        file.write("\nBLOOM_EXPECTED_REQUESTS = 4321\nBLOOM_ERROR_RATE = 0.25\n")
    (plan,) = bloom("plan", "--json", "-s", "BLOOM_ERROR_RATE=0.5", cwd=project).json
    assert (plan["requests"], plan["error_rate"]) == (4321, 0.5)


@pytest.mark.parametrize(
    "code",
    [
        "import nothing_of_that_name\n",
        """
class Shop(scrapy.Spider):
    name = "shop"
    def update_settings(settings):
        raise ValueError("mine")
""",
        """
class Bad:
    def fingerprint(self, request):
        return "text"
class Shop(scrapy.Spider):
    name = "shop"
    custom_settings = {"REQUEST_FINGERPRINTER_CLASS": Bad}
""",
    ],
    ids=["import", "settings", "fingerprint"],
)
def test_a_broken_project_is_one_line(code: str, tmp_path: Path) -> None:
    project = workspace.start_project(tmp_path / "work")
    (project / "shopping/spiders/shop.py").write_text(f"import scrapy\n{code}")
    workspace.write_urls(project / "urls.txt", workspace.urls(range(3)))
    ran = bloom("import", "urls.txt", "filter", "--spider", "shop", cwd=project)
    assert ran.status == 1
    assert "Traceback" not in ran.err
    assert "project's" in ran.err


def test_what_every_scrapy_command_imports(tmp_path: Path) -> None:
    """So that a broken dependency of ours breaks no other command."""
    code = """
        import sys, scrapy.cmdline
        before = set(sys.modules)
        from importlib.metadata import entry_points
        (bloom,) = entry_points(group="scrapy.commands", name="bloom")
        bloom.load()()
        print(*sorted(set(sys.modules) - before))
    """
    ran = run_script(code, cwd=tmp_path)
    ours = {name for name in ran.stdout.split() if name.startswith("scrapy_bloom")}
    assert ours == {"scrapy_bloom", "scrapy_bloom.commands"}
    assert not {"redis", "rich", "jinja2", "mmh3", "bitarray"} & set(ran.stdout.split())


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    make_filter(tmp_path / "filter", fingerprints(urls(range(100))))
    write_urls(tmp_path / "urls.txt", urls(range(200)))
    write_urls(tmp_path / "bad.txt", [*urls(range(50, 200)), "no URL"])
    return tmp_path


@pytest.mark.parametrize(
    "command",
    ["info filter", "check filter bad.txt", "plan 1M"],
)
def test_a_full_disk(command: str, filled: Path) -> None:
    ran = run_in_shell(f"unset PYTHONUNBUFFERED; scrapy bloom {command} > /dev/full", filled)
    assert ran.returncode == 1
    (message,) = ran.stderr.splitlines()
    assert message.startswith("scrapy bloom: error: ")
    assert "No space left on device" in message


@pytest.mark.parametrize("command", ["info filter", "check filter bad.txt"])
def test_a_closed_pipe_is_no_error(command: str, filled: Path) -> None:
    code = f"set +o pipefail; scrapy bloom {command} | sleep 0; exit ${{PIPESTATUS[0]}}"
    ran = run_in_shell(f"unset PYTHONUNBUFFERED; {code}", filled)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert not ran.stderr  # nobody reads the output any more


def test_a_full_standard_error(filled: Path) -> None:
    for command in ("info nowhere", "check filter bad.txt"):
        ran = run_in_shell(f"scrapy bloom {command} > out.txt 2> /dev/full", filled)
        assert ran.returncode == 1, command
        assert not ran.stderr
