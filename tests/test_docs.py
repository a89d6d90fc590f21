"""Every Python block of the README and of the documentation runs, and the README's commands are those that CI runs."""

import re
import shlex
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import cast

import pytest

import recurrent_depth as rd

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(r"^```py title=\"(.*?)\"\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(page: Path) -> list[tuple[int, str, str]]:
    """The fenced blocks of a page: the line where each starts, its language, its text."""
    text = page.read_text()
    return [(text[: m.start()].count("\n") + 1, m[1], m[2]) for m in FENCE.finditer(text)]


def blocks(page: Path, language: str) -> list[str]:
    return [code for _, of, code in fences(page) if of == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_code_of_the_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    printed = ""
    for line, language, code in fences(page):
        if language == "python":
            # Blank lines in front, so that a traceback names the page's own line.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
        elif language == "text":
            assert printed.strip() == code.strip()
    assert "rd" in namespace


@pytest.mark.parametrize("page", [page for page in PAGES if QUOTE.search(page.read_text())], ids=name)
def test_code_quoted_from_a_file_stands_in_it(page: Path):
    for quote in QUOTE.finditer(page.read_text()):
        source = (ROOT / quote[1]).read_text()
        assert any(indent(quote[2], " " * depth) in source for depth in (0, 4))


def test_readme_has_an_example():
    assert blocks(ROOT / "README.md", "python")


def test_ci_runs_the_tests_as_the_readme_says():
    wanted = re.search(r"grep -E '(.*?)' README.md", (ROOT / ".ci" / "run").read_text())
    assert wanted is not None
    found = [line for line in (ROOT / "README.md").read_text().splitlines() if re.search(wanted[1], line)]
    assert len(found) == 1
    assert found[0] in [code.strip() for code in blocks(ROOT / "README.md", "bash")]


def test_every_install_command_of_the_readme_uses_the_constraints():
    commands = [code for code in blocks(ROOT / "README.md", "bash") if "pip install" in code]
    assert len(commands) == 2
    assert all("pip install -c constraints.txt -e " in code for code in commands)
    train = re.search(r"python (\S+\.py)", commands[0])
    assert train is not None
    assert (ROOT / train[1]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_files_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_commands_for_the_training_example_are_understood(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from arguments import parse

    commands = [code for page in PAGES for code in blocks(page, "bash")]
    given = [m[1] for code in commands for m in re.finditer(r"python examples/train\.py(.*)", code)]
    assert len(given) >= 4
    for arguments in given:
        parse(shlex.split(arguments))


def test_every_public_name_has_its_place_in_the_reference():
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^::: recurrent_depth\.([\w.]+)$", reference, re.MULTILINE)
    modules = {name.rpartition(".")[0] for name in listed}
    assert sorted(set(rd.__all__) - set(listed) - modules) == []
    assert len(listed) == len(set(listed))


METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))


@pytest.mark.parametrize("page", METHOD_PAGES, ids=name)
def test_every_method_says_how_it_is_trained_by_a_loss_that_has_all_of_its_parts(page: Path):
    text, table = page.read_text(), (ROOT / "docs" / "training.md").read_text()
    assert f"(methods/{page.name})" in table.partition("## How each method is trained")[2].partition("\n## ")[0]
    assert "(../training.md#how-each-method-is-trained)" in text or "nothing is trained" in text
    assert "next_token_loss" not in text  # logits know nothing of the losses of routers and of halting


TOLD = {
    "uniform": "`UniformDepth(R)`",
    "full_depth": "full depth",
    "heavy_tail": "`PoissonLogNormalDepth`",
    "per_row": "`PoissonDepthPerRow`",
    "shorter": "`UniformDepth(R - 1)`",
}
"""How the table begins to say what a sampler of our comparison draws."""


def test_the_table_of_training_says_the_depths_that_our_comparison_draws(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from comparison import language

    rows = re.findall(r"^\| \[`rd\.(\w+)`\]\([^)]*\) \| ([^|]*) \|", (ROOT / "docs" / "training.md").read_text(), re.M)
    told = dict(rows)
    compared = language.FIRST | language.RELATIVES | language.MORE
    builders = {name: cast(partial, method.build).func.__name__ for name, method in compared.items()}
    looped = {name: builder for name, builder in builders.items() if builder != "dense"}
    assert len(looped) >= 10
    for name, builder in looped.items():
        assert told[builder].startswith(TOLD[compared[name].sampler.__name__]), name
