"""The admin API's guide says what is so: its examples run, and it names every route and every code."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "admin-api.md").read_text()
PLATFORM = ROOT / "platform" / "graftwork_platform"


@pytest.mark.e2e
def test_examples_run_one_after_the_other(
    start_server: Callable[..., Any], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    server = start_server("--dtype", "float32")
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 6
    script = "".join(blocks)
    for written, here in (
        ("http://127.0.0.1:8000", server.url),
        (".data/admin.key", str(server.data_dir / "admin.key")),
        ("./my-adapter", str(make_adapter("guide", 60))),
    ):
        assert script.count(written) == 1
        script = script.replace(written, here)
    done = subprocess.run(["sh", "-eu", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"state": "ready"' in done.stdout
    assert '"object":"tenant.deleted"' in done.stdout
    key = json.loads((tmp_path / "key.json").read_text())
    assert key["expires_at"] > key["created"]
    with pytest.raises(openai.AuthenticationError):
        server.client(key["key"]).models.list()


def test_every_route_is_in_the_table() -> None:
    written = set(re.findall(r"^\| `(\w+) (/[^`?]*)", GUIDE, re.MULTILINE))
    source = (PLATFORM / "admin" / "routes.py").read_text()
    routes, prefix = set(), ""
    for line in source.splitlines():
        if "APIRouter(" in line:
            found = re.search(r'prefix="([^"]*)"', line)
            prefix = found[1] if found and found[1] != "/admin/v1" else ""
        if found := re.search(r'@router\.(\w+)\("([^"]*)"', line):
            routes.add((found[1].upper(), (prefix + found[2]).replace("{path:path}", "{path}")))
    assert len(routes) > 15
    assert written == routes


def test_every_code_of_the_rooms_behind_it_is_in_the_table() -> None:
    files = [PLATFORM / name for name in ("tenants.py", "db.py", "admin/routes.py")]
    files += [file for room in ("catalog", "publishing", "keys") for file in (PLATFORM / room).glob("*.py")]
    codes = {code for file in files for code in re.findall(r'code="(\w+)"', file.read_text())}
    assert len(codes) > 15
    assert {code for code in codes if f"`{code}`" not in GUIDE} == set()
