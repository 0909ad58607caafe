"""The servers that Graftwork is measured beside: vLLM and llama.cpp, as their own documentation starts them for LoRA on a CPU.

vLLM serves adapters from slots that are all as large as its greatest rank. llama.cpp loads all adapters at its start, converted to
its own format, and lets each request name the ones it wants.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from load import Target
from results import BenchmarkFailed
from servers import HttpContender, free_port, process, wait_until_up

BASE_NAME = "base"
CONTEXT = 2048
SLOTS = 32
"""Requests that llama.cpp runs at the same time; each gets an equal share of its context."""


@contextlib.contextmanager
def vllm(
    venv: Path, base: Path, adapters: Mapping[str, Path], *, dtype: str, max_loras: int, max_rank: int, log: Path
) -> Iterator[HttpContender]:
    """vLLM from the virtual environment ``venv``; without ``adapters`` with LoRA off. Raises `BenchmarkFailed`."""
    program = vllm_program(venv)
    port = free_port()
    command: list[str | Path] = [program, "serve", base, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", BASE_NAME, "--max-model-len", str(CONTEXT), "--dtype", dtype]
    name = f"vLLM, {dtype}"
    if adapters:
        name = f"vLLM, {dtype}, {max_loras} slots"
        command += ["--enable-lora", "--max-loras", str(max_loras), "--max-cpu-loras", str(max(max_loras, len(adapters)))]
        command += ["--max-lora-rank", str(max_rank), "--lora-modules", *(f"{key}={path}" for key, path in adapters.items())]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with process(name, command, log, environment) as child:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(name, child, url, log)
        yield HttpContender(name, Target(url), child.pid)


def vllm_program(venv: Path) -> Path:
    """The program that starts vLLM; raises `BenchmarkFailed`."""
    program = venv / "bin" / "vllm"
    if not program.exists():
        raise BenchmarkFailed(f"there is no {program}; install vLLM's CPU build there, or leave --peer vllm out")
    return program


@contextlib.contextmanager
def llama_cpp(
    folder: Path, base: Path, adapters: Mapping[str, Path], *, python: Path, work: Path, log: Path
) -> Iterator[HttpContender]:
    """llama.cpp built in ``folder``/build, or in the one such folder below it.

    ``python`` runs its converters, whose files are kept in ``work``. Raises `BenchmarkFailed`.
    """
    source = llama_source(folder)
    work.mkdir(parents=True, exist_ok=True)
    model = work / "base.gguf"
    _convert(python, source, "convert_hf_to_gguf.py", [base], model)
    command: list[str | Path] = [source / "build" / "bin" / "llama-server", "-m", model]
    for key, path in adapters.items():
        _convert(python, source, "convert_lora_to_gguf.py", [path, "--base", base], work / f"{key}.gguf")
        command += ["--lora", work / f"{key}.gguf"]
    port, threads = free_port(), str(os.cpu_count() or 1)
    command += ["--host", "127.0.0.1", "--port", str(port), "-np", str(SLOTS), "-c", str(512 * SLOTS), "-kvu"]
    command += ["-t", threads, "-tb", threads, *(["--lora-init-without-apply"] if adapters else [])]
    numbers = {key: number for number, key in enumerate(adapters)}

    def fields(model: str) -> dict[str, Any]:
        lora = [] if model == BASE_NAME else [{"id": numbers[model], "scale": 1.0}]
        return {"model": model, "lora": lora, "cache_prompt": False}

    with process("llama.cpp", command, log) as child:
        url = f"http://127.0.0.1:{port}"
        wait_until_up("llama.cpp", child, url, log)
        # It resets connections that were kept alive.
        yield HttpContender("llama.cpp", Target(url, fields=fields, keep_alive=False), child.pid)


def llama_source(folder: Path) -> Path:
    """The folder with llama.cpp's sources and its build: ``folder`` or one below it."""
    for source in (folder, *sorted(folder.glob("*/llama.cpp")), *sorted(folder.glob("llama.cpp"))):
        if (source / "build" / "bin" / "llama-server").exists() and (source / "convert_hf_to_gguf.py").exists():
            return source
    raise BenchmarkFailed(
        f"{folder} holds no llama.cpp with build/bin/llama-server; build that target, or leave --peer llamacpp out"
    )


def _convert(python: Path, source: Path, script: str, arguments: list[str | Path], out: Path) -> None:
    """Run one of llama.cpp's converters unless ``out`` is there."""
    if out.exists():
        return
    unfinished = out.with_suffix(f".{os.getpid()}")
    command = [python, source / script, *arguments, "--outfile", unfinished, "--outtype", "bf16"]
    environment = {**os.environ, "PYTHONPATH": str(source / "gguf-py"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(part) for part in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        needs = f"{python} needs torch, transformers and sentencepiece; name another with --llama-python"
        raise BenchmarkFailed(f"{script} cannot convert {arguments[0]}: {done.stdout[-1000:]}\n{needs}")
    unfinished.rename(out)
