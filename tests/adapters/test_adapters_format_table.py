"""What publishing says to every adapter that PEFT saves, and that docs/adapters.md says the same."""

from __future__ import annotations

import pytest
from format_table import EIGHT_BITS, OTHERS, Zoo, outcome, refusal, split_document, table
from peft_recipes import EXACT
from peft_zoo import Recipe
from refused_recipes import REFUSED


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize("recipe", REFUSED, ids=lambda recipe: recipe.name)
def test_what_is_not_served_is_refused_by_name(zoo: Zoo, recipe: Recipe) -> None:
    result = zoo.publish(recipe)
    assert not result.ok
    assert refusal(recipe, result) is not None, result.report
    failed = [finding for finding in result.report.findings if finding.result == "fail"]
    assert [finding for finding in failed if not finding.field or not finding.fix] == [], "a refusal names a field and a way out"


@pytest.mark.parametrize("recipe", [recipe for recipe in REFUSED if recipe.convert is not None], ids=lambda recipe: recipe.name)
def test_it_is_refused_for_that_and_nothing_else(zoo: Zoo, recipe: Recipe) -> None:
    """The same adapter is taken as it was before the change that it is refused for."""
    result = zoo.publish(recipe, converted=False)
    assert result.ok, result.report


def test_the_documents_table_is_what_publishing_says(zoo: Zoo) -> None:
    """Written anew by: .venv/bin/python tests/plugins/format_table.py"""
    _, written, _ = split_document()
    made = table(zoo)
    assert "| NOT " not in made, made
    assert made == written, "docs/adapters.md is behind; run .venv/bin/python tests/plugins/format_table.py"


def test_other_servers_are_compared_on_rows_that_exist() -> None:
    rows = {recipe.row for recipe in (*EXACT, *REFUSED)}
    assert OTHERS.keys() <= rows | {EIGHT_BITS}
    exact, refused = ({recipe.row for recipe in recipes} for recipes in (EXACT, REFUSED))
    assert not exact & refused, "a row is served or refused, not both"


def test_a_format_that_stops_being_taken_shows_in_the_table(zoo: Zoo) -> None:
    recipe = next(recipe for recipe in EXACT if recipe.name == "list")
    other = Recipe("other", recipe.row, recipe.config, refused="nothing")
    assert outcome(other, zoo.publish(other)) == "NOT REFUSED"
