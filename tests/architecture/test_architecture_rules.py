"""The rules of `docs/architecture.md` and of house style that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ["platform", "adapters", "engine", "kernels", "admin_ui", "migrations"]
SOURCES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))
ASIDE = ["deploy", "tests", "examples", "benchmarks", ".ci"]
"""Folders of code that is never part of the wheel."""

ALL_FILES = sorted([*SOURCES, *(p for folder in ASIDE for p in (ROOT / folder).rglob("*.py"))])
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_top_level_folder_is_a_package() -> None:
    assert [str(p) for p in ROOT.glob("*/__init__.py")] == []


def test_no_test_folder_is_a_package() -> None:
    assert [str(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def test_platform_and_torch_import_from_the_root() -> None:
    found = run_python("import platform, torch; print(platform.__file__, platform.system())")
    assert found.startswith(sysconfig.get_paths()["stdlib"])


def test_room_lists_in_pyproject_equal_the_folders() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [f"{room}/graftwork_{room}" for room in ROOMS]
    assert sorted(pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(packages)
    assert sorted(pyproject["tool"]["hatch"]["build"]["dev-mode-dirs"]) == sorted(ROOMS)
    assert sorted(pyproject["tool"]["importlinter"]["root_packages"]) == sorted(f"graftwork_{room}" for room in ROOMS)
    assert sorted(pyproject["tool"]["pytest"]["ini_options"]["pythonpath"]) == sorted([*ROOMS, "deploy", "tests/plugins"])
    for package in packages:
        assert (ROOT / package / "__init__.py").exists()
        assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("graftwork_engine.sched.scheduler", ["torch", "transformers", "triton"]),
        ("graftwork_engine.kv.manager", ["torch", "transformers", "triton"]),
        ("graftwork_engine.core", ["torch", "transformers", "triton"]),
        ("graftwork_engine.assembly", ["triton"]),
        ("graftwork_engine.client", ["torch", "transformers", "triton"]),
        ("graftwork_platform.app", ["torch", "transformers", "triton", "peft"]),
        ("graftwork_platform.serve.api_process", ["torch", "transformers", "triton", "peft"]),
        ("graftwork_platform.cli", ["torch", "transformers", "triton", "peft"]),
    ],
)
def test_module_leaves_heavy_libraries_alone(module: str, forbidden: list[str]) -> None:
    loaded = run_python(f"import sys, {module}; print(*[m for m in {forbidden!r} if m in sys.modules])")
    assert loaded == ""


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_house_style(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert path.stem not in FORBIDDEN_NAMES
    assert ast.get_docstring(tree), "a file opens with a sentence of purpose"
    if len(text.splitlines()) > MAX_FILE_LINES:
        assert "This file is long because" in text, f"{len(text.splitlines())} lines and no reason given in it"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_public_names_have_docstrings() -> None:
    missing = []
    for path in SOURCES:
        if "versions" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if is_definition and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert missing == []


def test_nothing_left_to_do() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [
        f"{p.relative_to(ROOT)}: {line.strip()}" for p in SOURCES for line in p.read_text().splitlines() if pattern.search(line)
    ]
    assert found == []


CUDA_OWNERS = {
    "adapters/graftwork_adapters/device_copy.py": "pinned buffers, and the stream that adapters are copied on",
    "engine/graftwork_engine/cuda.py": "events and graphs of steps",
    "engine/graftwork_engine/cuda_memory.py": "how much memory is free",
    "engine/graftwork_engine/device.py": "which device an engine runs on",
    "engine/graftwork_engine/kernel_choice.py": "which kernels a device can have",
    "kernels/graftwork_kernels/candidates.py": "which implementations a device can have, and by which clock they are timed",
    "kernels/graftwork_kernels/triton/device.py": "what kernels ask of the device, its clock among it",
    "kernels/graftwork_kernels/triton/linear.py": "whether plain products can be the device's own library's, and E4M3 its own",
    "kernels/graftwork_kernels/triton/operators.py": "how many multiprocessors there are",
}
"""Product files that may name CUDA, and what each needs of it. All others take a device as they are given it."""


def names_cuda(node: ast.AST) -> bool:
    """`torch.cuda`, `tensor.is_cuda`, `tensor.cuda()`, an import of it, or a comparison with "cuda"."""
    match node:
        case ast.Attribute(attr="cuda" | "is_cuda"):
            return True
        case ast.Import(names=names):
            return any(name.name.startswith("torch.cuda") for name in names)
        case ast.ImportFrom(module=module, names=names):
            return f"{module}.".startswith("torch.cuda.") or (module == "torch" and any(name.name == "cuda" for name in names))
        case ast.Compare():
            return any(isinstance(part, ast.Constant) and part.value == "cuda" for part in ast.walk(node))
    return False


def test_few_files_know_cuda() -> None:
    found = {str(p.relative_to(ROOT)) for p in SOURCES if any(map(names_cuda, ast.walk(ast.parse(p.read_text()))))}
    assert found == CUDA_OWNERS.keys()


@pytest.mark.parametrize(
    ("code", "is_named"),
    [
        ("torch.cuda.synchronize()", True),
        ("x.is_cuda", True),
        ("x.cuda()", True),
        ("import torch.cuda", True),
        ("from torch import cuda", True),
        ("from torch.cuda import Stream", True),
        ('device.type == "cuda"', True),
        ('device.type in ("cpu", "cuda")', True),
        ('device: Literal["auto", "cpu", "cuda"]', False),
        ('"""A cuda device."""', False),
        ("from graftwork_engine import cuda_memory", False),
        ('device.type == "cpu"', False),
    ],
)
def test_what_counts_as_naming_cuda(code: str, is_named: bool) -> None:
    assert any(map(names_cuda, ast.walk(ast.parse(code)))) == is_named
