"""The table of formats in docs/adapters.md: what publishing says to every recipe, beside what other servers do.

Run as a script it writes the table anew. What it calls exact, tests/golden compares with PEFT token by token.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from peft_recipes import EXACT
from peft_zoo import Made, Recipe, make_adapter, make_base
from refused_recipes import REFUSED

from graftwork_adapters.base_spec import BaseSpec, load_base_spec
from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.publish import publish
from graftwork_adapters.publish_job import PublishJob, PublishResult
from graftwork_adapters.report import Finding

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
BEGIN, END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"
SERVERS = ("vLLM 0.32", "SGLang 0.5.10", "TensorRT-LLM 1.x", "LoRAX")

EIGHT_BITS = "eight-bit rows (INT8, E4M3) made when publishing"
UNKNOWN = ("?", "?", "?", "?")
EIGHT_BIT_TYPES: tuple[RowTypeName, ...] = ("int8", "e4m3")
NOBODY = ("no", "no", "no", "no")
OTHERS: dict[str, tuple[str, str, str, str]] = {
    "target_modules: list": ("yes", "yes", "yes", "yes"),
    "target_modules: all-linear": ("yes", "yes", "yes", "yes"),
    "any rank up to the server's limit": ("padded to the server's", "padded to the server's", "yes", "yes"),
    "rank_pattern, alpha_pattern": ("yes", "not read", "rank from the tensors; alpha_pattern not read", "no"),
    "rsLoRA": ("yes", "not read: the scale is wrong", "yes", "yes"),
    "bias: lora_only": ("refused", "?", "?", "?"),
    "bias: all": ("refused", "?", "?", "?"),
    "lora_bias": NOBODY,
    "DoRA": ("no", "no", "engine path only", "no"),
    "DoRA with bias": ("no", "no", "?", "no"),
    "DoRA with rsLoRA and patterns": ("no", "no", "?", "no"),
    "DoRA on embed_tokens and lm_head": ("no", "no", "?", "no"),
    "PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ: not converted": ("refused", "not detected", "not detected", "not detected"),
    "modules_to_save: lm_head": ("no", "no", "?", "no"),
    "modules_to_save: embed_tokens": ("no", "no", "?", "no"),
    "modules_to_save: lm_head and embed_tokens": ("no", "no", "?", "no"),
    "modules_to_save: norms": ("no", "no", "?", "no"),
    "modules_to_save: a linear": ("no", "no", "?", "no"),
    "modules_to_save: fused projections": ("no", "no", "?", "no"),
    "classifier heads": ("yes", "no", "?", "no"),
    "LoRA on embed_tokens": ("yes", "one back end", "no", "no"),
    "LoRA on lm_head": ("yes", "one back end", "no", "yes"),
    "LoRA on embed_tokens and lm_head": ("yes", "one back end", "no", "no"),
    "added tokens": ("no", "no", "?", "no"),
    "aLoRA": NOBODY,
    "aLoRA with what acts on all tokens": NOBODY,
    "aLoRA without invocation tokens": NOBODY,
    "aLoRA with invocation tokens outside the vocabulary": NOBODY,
    "lora_bias on lm_head": NOBODY,
    "layer_replication": NOBODY,
    "MoE experts": ("yes", "yes", "yes", "no"),
    EIGHT_BITS: ("no", "no", "only files of E4M3, without scales", "no"),
    "pickles": ("?", "?", "?", "opened"),
    "QA-LoRA": ("refused", "?", "?", "?"),
    "BD-LoRA": ("refused", "?", "?", "?"),
}
"""In the order of `SERVERS`, at the versions that the document names; a format that is not here was not verified anywhere."""


class Zoo:
    """The bases, made once in a folder, and what publishing says to adapters for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._specs: dict[str, BaseSpec] = {}
        self._made: dict[str, Made] = {}

    def publish(self, recipe: Recipe, row_type: RowTypeName = "float32", *, converted: bool = True) -> PublishResult:
        """Make the adapter and publish it; as PEFT saved it where it is not to be ``converted``."""
        base_dir = self._folder / recipe.base
        if recipe.base not in self._specs:
            make_base(recipe.base, base_dir)
            self._specs[recipe.base] = load_base_spec(base_dir)
        if recipe.name not in self._made:
            self._made[recipe.name] = make_adapter(recipe, base_dir, self._folder / f"adapter-{recipe.name}")
        made = self._made[recipe.name]
        upload = made.upload_dir if converted or made.peft_dir is None else made.peft_dir
        return publish(PublishJob(upload, self._folder / "packed", self._specs[recipe.base], row_type, base_dir=base_dir))


def refusal(recipe: Recipe, result: PublishResult) -> Finding | None:
    """The finding that refuses it for the reason it must be refused for."""
    assert recipe.refused is not None
    failed = [finding for finding in result.report.findings if finding.result == "fail"]
    return next((finding for finding in failed if finding.field and re.fullmatch(recipe.refused, finding.field)), None)


def outcome(recipe: Recipe, result: PublishResult) -> str:
    """A cell of the table."""
    if recipe.refused is None:
        return "exact" if result.ok else "NOT TAKEN"
    finding = refusal(recipe, result)
    return "NOT REFUSED" if finding is None else f"refused: `{finding.field}` {finding.message}"


def table(zoo: Zoo, recipes: Iterable[Recipe] = (*EXACT, *REFUSED)) -> str:
    """The table's text: one line for each row that recipes name, its first outcome, or the first that is not as it must be."""
    cells: dict[str, str] = {}
    for recipe in recipes:
        found = outcome(recipe, zoo.publish(recipe))
        if recipe.row not in cells or found.startswith("NOT"):
            cells[recipe.row] = found
    first = next(recipe for recipe in EXACT)
    eight_bits = [zoo.publish(first, row_type).ok for row_type in EIGHT_BIT_TYPES]
    cells[EIGHT_BITS] = "served, not exact" if all(eight_bits) else "NOT TAKEN"
    lines = [["Format", "Here", *SERVERS], ["---"] * (2 + len(SERVERS))]
    lines += [[row, cell.replace("|", "\\|"), *OTHERS.get(row, UNKNOWN)] for row, cell in cells.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def split_document() -> tuple[str, str, str]:
    """What stands before, between and after the two markers."""
    before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    inside, end, after = rest.partition(END)
    assert begin, f"{DOCUMENT.name} has no {BEGIN}"
    assert end, f"{DOCUMENT.name} has no {END}"
    return before, inside, after


def main() -> int:
    """Write the table anew; 1 if it changed."""
    before, inside, after = split_document()
    with tempfile.TemporaryDirectory() as folder:
        made = table(Zoo(Path(folder)))
    if made != inside:
        DOCUMENT.write_text(f"{before}{BEGIN}{made}{END}{after}")
    return int(made != inside)


if __name__ == "__main__":
    sys.exit(main())
