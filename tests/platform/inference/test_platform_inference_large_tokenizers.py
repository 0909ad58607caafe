"""How long everyone's streams stand still while an adapter's own large tokenizer is read."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.publish_job import AdapterTraits
from graftwork_platform.catalog.catalog import ResolvedModel
from graftwork_platform.catalog.facts import OwnText, VersionFacts
from graftwork_platform.inference.adapter_texts import AdapterTexts
from graftwork_platform.text.model_text import ModelText


def write_large(folder: Path, num_tokens: int) -> None:
    """A byte-level BPE of so many tokens, as large as a real one's."""
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: place for place, char in enumerate(chars)}
    merges: list[tuple[str, str]] = []
    for left in [*chars, *(a + b for a in chars for b in chars)]:
        for right in chars:
            if len(vocab) < num_tokens and left in vocab and left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("num_tokens", [49_152, 128_256])
def test_the_loop_stands_still_no_longer_than_the_library_reads(model_text: ModelText, tmp_path: Path, num_tokens: int) -> None:
    write_large(tmp_path / "large", num_tokens)
    source_text = (tmp_path / "large" / "tokenizer.json").read_text()
    started = time.perf_counter()
    tokenizers.Tokenizer.from_str(source_text)
    reading = time.perf_counter() - started

    async def fetch(_digest: AdapterDigest, folder: Path) -> None:
        shutil.copy(tmp_path / "large" / "tokenizer.json", folder)

    async def scene() -> None:
        texts = AdapterTexts(model_text, fetch, tmp_path / "scratch")
        facts = VersionFacts(AdapterTraits(vocab_size=num_tokens), OwnText(tokenizer=True))
        loading = asyncio.create_task(texts.of(ResolvedModel("m", 1, AdapterDigest("a" * 64), facts=facts)))
        gaps, last = [0.0], time.perf_counter()
        while not loading.done():
            await asyncio.sleep(0.002)
            gaps.append((now := time.perf_counter()) - last)
            last = now
        await asyncio.to_thread(texts.close)
        print(f"{num_tokens} tokens: read in {reading:.3f} s, longest gap {max(gaps):.3f} s")
        tokenizer = (await loading).tokenizer
        assert tokenizer.vocab_size == num_tokens
        assert tokenizer.max_bytes_per_token >= 3
        assert max(gaps) < 2 * reading + 0.25, "beside the library's own reading nothing holds it up"

    asyncio.run(scene())
