"""The documents: their code is run, their links lead somewhere, and the site shows each page."""

import re
from pathlib import Path

import pytest
from scrapy.settings import Settings

from scrapy_bloom.settings import _SETTINGS, BloomSettings
from tests.support import servers, workspace
from tests.support.documents import BLOCK, DOCUMENTS, LINK, PAGES, ROOT, blocks
from tests.support.shell import run_in_shell
from tests.support.workspace import make_filter


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_is_of_a_kind_that_is_tested(document: Path) -> None:
    text = document.read_text()
    languages = [language for language, _ in BLOCK.findall(text)]
    assert text.count("```") == 2 * len(languages)  # none is indented, or of another form
    operated = {"deploy.md": {"dockerfile", "ini", "yaml"}, "alerts.md": {"yaml"}}
    tested = {"python", "sh", "text", "ini"} | operated.get(document.name, set())
    assert set(languages) <= tested  # by test_operation.py
    for before, language in zip(["", *languages], languages, strict=False):
        assert language != "text" or before == "sh"  # it shows what the commands print


README = ROOT / "README.md"
(REPOSITORY,) = re.findall(
    r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
)
COMMANDS = [
    path
    for path in PAGES
    if "\n```sh\n" in path.read_text()
    and path.name != "getting-started.md"  # test_example.py runs those
]


@pytest.mark.parametrize("document", COMMANDS, ids=lambda path: path.name)
def test_commands(document: Path, tmp_path: Path) -> None:
    """Runs them in the order in which they are there; a block of text shows what they print."""
    url = workspace.prepare(tmp_path)
    printed = ""
    for language, code in BLOCK.findall(document.read_text()):
        if language == "sh":
            if "bloom copy jobs/shop redis://localhost:6379/0\n" in code:  # to the spider's key
                workspace.forget_shared(url)
            ran = run_in_shell(code.replace(workspace.LOCAL_REDIS, url), tmp_path)
            assert ran.returncode == 0, (code, ran)
            assert "scrapy bloom" in code
            printed = ran.stdout
        elif language == "text":
            assert code == printed


@pytest.mark.parametrize(
    ("document", "code"),
    [
        block for block in blocks("python") if "deltafetch" not in block[1]
    ],  # as test_recipes.py does
)
def test_python(document: str, code: str, tmp_path: Path) -> None:
    """Runs it; what it sets must be valid settings."""
    names: dict[str, object] = {"__name__": "settings"}
    code = code.replace("jobs/", f"{tmp_path}/jobs/")
    if "copy_to_job(" in code:  # needs a server, and a job
        servers.shared("valkey").client.delete("shop:bloom")
        code = code.replace("redis://localhost:6379/0", servers.shared("valkey").url)
        make_filter(tmp_path / "jobs/shop", [b"page"])
    exec(compile(code, document, "exec"), names)
    settings = Settings({key: value for key, value in names.items() if key.isupper()})
    BloomSettings.from_settings(settings)
    assert not [name for name in names if name.startswith("BLOOM_") and name not in _SETTINGS]


def test_the_set_up_commands_are_those_that_ci_runs() -> None:
    commands = [code for document, code in blocks("sh") if document == "README.md"]
    ci = (ROOT / ".ci/run").read_text()
    assert commands.pop(0) == f"git clone {REPOSITORY}\npip install ./scrapy-bloom\n"
    assert [ci.count(f"\n{command}COMMAND") for command in commands] == [1, 1]


def test_the_contributors_command_installs_an_extra_that_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (command,) = [code for document, code in blocks("sh") if document == "CONTRIBUTING.md"]
    assert "'.[dev]'" in command
    assert re.search(r"^dev = \[", project, re.MULTILINE)
    environments = set(re.findall(r"^\[tool\.tox\.env\.(\w+)\]", project, re.MULTILINE))
    table = (ROOT / "CONTRIBUTING.md").read_text()
    named = {name for line in re.findall(r"tox run -e ([\w,]+)", table) for name in line.split(",")}
    assert {name for name in named if not re.fullmatch(r"py3\d+", name)} <= environments


def without_blocks(document: Path) -> str:
    return BLOCK.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(document), re.MULTILINE)
    found = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert len(found) == len(set(found)), f"two headings of {document.name} have one anchor"
    return set(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in LINK.findall(without_blocks(document)):
        other = document.parent / target if target else document
        assert other.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(other), f"{document.name} links to {target}#{anchor}"


def test_the_site_shows_each_page() -> None:
    """README and its neighbours are pages of it, too: docs/hooks.py adds them."""
    site = (ROOT / "mkdocs.yml").read_text()
    shown = re.findall(r"^ +- .+: (\S+\.md)$", site.partition("\nnav:")[2], re.MULTILINE)
    others = re.findall(
        r'^    "\w+\.md": "(\w+\.md)"', (ROOT / "docs/hooks.py").read_text(), re.MULTILINE
    )
    assert sorted(shown) == sorted([*others, *(page.name for page in PAGES)])


REFERENCE = {"api.md", "cli.md", "settings.md", "stats.md"}


def test_the_documentation_is_short() -> None:
    """Without code, tables, reference, the messages of the program, and what benchmarks write."""
    prose = [
        re.sub(r"^(?:- `|\|).*$", "", without_blocks(document), flags=re.MULTILINE)
        for document in [README, *PAGES]
        if not document.name.startswith("benchmarks") and document.name not in REFERENCE
    ]
    words = [word for word in " ".join(prose).split() if re.search(r"\w", word)]
    assert len(words) <= 16_000


@pytest.mark.parametrize("document", [README, *PAGES], ids=lambda path: path.name)
def test_no_page_is_long(document: Path) -> None:
    """That on troubleshooting has a line for each message, and is searched."""
    most = {"architecture.md": 4500, "troubleshooting.md": 7500}.get(document.name, 5000)
    assert len(document.read_text("utf-8").split()) <= most
    assert document != README or document.read_text("utf-8").count("\n") <= 150


def test_each_setting_of_the_readme_is_explained_on_a_page_that_it_links() -> None:
    part = README.read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    linked = "".join((ROOT / target).read_text() for target, _ in LINK.findall(part))
    names = re.findall(r"^(\w+) = ", "".join(code for _, code in BLOCK.findall(part)), re.MULTILINE)
    assert len(names) == 5
    assert all(name in linked for name in names)


def test_each_link_of_the_readme_is_whole_on_pypi() -> None:
    """There it stands alone."""
    project = (ROOT / "pyproject.toml").read_text()
    assert f"\nrepo_url: {REPOSITORY}\n" in (ROOT / "mkdocs.yml").read_text()
    text = README.read_text()
    for pattern, replacement in re.findall(
        r"^pattern = '(.+)'\nreplacement = '(.+)'$", project, re.MULTILINE
    ):
        assert f"]({REPOSITORY}/" in replacement
        text = re.sub(pattern, replacement, text)
    assert not LINK.findall(text)
    assert text.count(f"]({REPOSITORY}/raw/main/docs/pictures/") == README.read_text().count("![")
