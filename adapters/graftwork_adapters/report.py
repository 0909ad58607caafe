"""What a customer is told about an upload: a list of findings, each with what to do. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

MAX_FINDINGS_PER_CHECK = 50
"""Of one result; the rest are counted. An adapter of another model has thousands of wrong tensors, and a hostile one any number."""

MAX_TEXT = 1000
"""Characters of a message."""

Result = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of an upload. ``field`` names the config field, tensor or file it is about; ``fix`` says what to do."""

    check: str
    result: Result
    field: str | None
    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class More:
    """Findings of one check and result that are not listed: the ``first`` of them, and their ``number``."""

    first: Finding
    number: int


@dataclass(slots=True)
class Report:
    """All findings of one upload, in the order they were made: of each check and result `MAX_FINDINGS_PER_CHECK`.

    ``more`` has, for each check and result, what there is beyond.
    """

    findings: list[Finding] = field(default_factory=list)
    more: dict[str, More] = field(default_factory=dict)

    def passed(self, check: str, message: str, where: str | None = None) -> None:
        """Note a check that went well."""
        self._note(Finding(check, "pass", where, message))

    def warn(self, check: str, where: str | None, message: str, fix: str | None = None) -> None:
        """Note something the customer should know that does not stop the adapter."""
        self._note(Finding(check, "warn", where, message, fix))

    def fail(self, check: str, where: str | None, message: str, fix: str | None = None) -> None:
        """Note something that stops the adapter."""
        self._note(Finding(check, "fail", where, message, fix))

    def fail_each(self, check: str, problems: Sequence[tuple[str | None, str]], fix: str | None = None) -> None:
        """Note several of the same kind, as pairs of (where, message)."""
        for where, message in problems:
            self.fail(check, where, message, fix)

    def add(self, other: Report) -> None:
        """Note all that is in ``other``."""
        for finding in other.findings:
            self._note(finding)
        for more in other.more.values():
            self._note(more.first, more.number)

    def copy(self) -> Report:
        """Another report with the same in it."""
        return Report(list(self.findings), dict(self.more))

    @property
    def ok(self) -> bool:
        """True while nothing has failed."""
        return all(f.result != "fail" for f in self.findings)

    def as_json(self) -> list[dict[str, str | None]]:
        """The findings as the admin API shows them; of each check and result that has more, their number in a last one."""
        rest = [replace(more.first, message=f"and {more.number} more of the same kind") for more in self.more.values()]
        return [asdict(f) for f in (*self.findings, *rest)]

    def _note(self, finding: Finding, number: int = 1) -> None:
        key = f"{finding.result} {finding.check}"
        if (more := self.more.get(key)) is not None:
            self.more[key] = More(more.first, more.number + number)
        elif sum(f.check == finding.check and f.result == finding.result for f in self.findings) >= MAX_FINDINGS_PER_CHECK:
            self.more[key] = More(finding, number)
        else:
            long = len(finding.message) > MAX_TEXT
            self.findings.append(replace(finding, message=f"{finding.message[:MAX_TEXT]}…") if long else finding)
