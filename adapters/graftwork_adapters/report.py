"""What a customer is told about an upload: a list of findings, each with what to do. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

MAX_FINDINGS_PER_CHECK = 200
"""Beyond it `Report.fail_each` counts the rest in one finding: an adapter of another model has thousands of wrong tensors."""

Result = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of an upload. ``field`` names the config field, tensor or file it is about; ``fix`` says what to do."""

    check: str
    result: Result
    field: str | None
    message: str
    fix: str | None = None


@dataclass(slots=True)
class Report:
    """All findings of one upload, in the order they were made."""

    findings: list[Finding] = field(default_factory=list)

    def passed(self, check: str, message: str, where: str | None = None) -> None:
        """Note a check that went well."""
        self.findings.append(Finding(check, "pass", where, message))

    def warn(self, check: str, where: str | None, message: str, fix: str | None = None) -> None:
        """Note something the customer should know that does not stop the adapter."""
        self.findings.append(Finding(check, "warn", where, message, fix))

    def fail(self, check: str, where: str | None, message: str, fix: str | None = None) -> None:
        """Note something that stops the adapter."""
        self.findings.append(Finding(check, "fail", where, message, fix))

    def fail_each(self, check: str, problems: Sequence[tuple[str | None, str]], fix: str | None = None) -> None:
        """Note several of the same kind, as pairs of (where, message)."""
        for where, message in problems[:MAX_FINDINGS_PER_CHECK]:
            self.fail(check, where, message, fix)
        if len(problems) > MAX_FINDINGS_PER_CHECK:
            self.fail(check, None, f"and {len(problems) - MAX_FINDINGS_PER_CHECK} more of the same kind", fix)

    @property
    def ok(self) -> bool:
        """True while nothing has failed."""
        return all(f.result != "fail" for f in self.findings)

    def as_json(self) -> list[dict[str, str | None]]:
        """The findings as the admin API shows them."""
        return [asdict(f) for f in self.findings]
