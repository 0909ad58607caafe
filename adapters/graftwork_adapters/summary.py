"""What a passed upload's report says of it: what was applied, in which formats, and what it costs to serve."""

from __future__ import annotations

from pathlib import Path

from graftwork_adapters.adapter_content import AdapterContent
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.packed import PackedIndex
from graftwork_adapters.peft_config import EMBEDDING_MODULE, HEAD_MODULE
from graftwork_adapters.report import Report
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import UploadTensors
from graftwork_adapters.upload_files import UploadFiles


def report_content(upload_dir: Path, upload: UploadTensors, content: AdapterContent, files: UploadFiles, report: Report) -> None:
    """Findings about an upload that passed every check."""
    left_out = sorted(set(content.left_out))
    applied = {source.sent_as for source in content.sources()}
    if left_out:
        names = ", ".join(map(shown, left_out[:5])) + (", …" if len(left_out) > 5 else "")
        report.passed("copies", f"{len(left_out)} tensors say nothing of their own and are left out: {names}", shown(left_out[0]))
    report.passed("tensors", f"applied {len(applied)} of {upload.num_sent - len(left_out)} tensors")
    ranks = sorted({pair.rank for pair in content.pairs})
    if ranks:
        report.passed("ranks", f"{len(content.pairs)} modules of rank {', '.join(map(str, ranks))}")
    formats = _formats(content)
    if formats:
        report.passed("formats", "; ".join(formats))
    report.passed("size", f"{sum((upload_dir / name).stat().st_size for name in files.stored)} bytes in {len(files.stored)} files")


def report_wholes(index: PackedIndex, spec: BaseSpec, report: Report) -> None:
    """The finding that says what an adapter's whole matrices cost, if it brings any."""
    if index.wholes:
        message = (
            f"whole matrices: {index.num_whole_bytes} bytes, read once per step for each adapter that is in it "
            f"(base's own weights: {spec.num_weight_bytes} bytes)"
        )
        report.passed("wholes", message)


def _formats(content: AdapterContent) -> list[str]:
    """What it has beyond plain LoRA on projections."""
    pairs = content.pairs
    dora = sum(pair.magnitude is not None for pair in pairs)
    lora_bias = sum(pair.bias is not None for pair in pairs)
    biases = sum(site.bias is not None for site in content.sites)
    found = [
        (dora, f"DoRA on {dora} modules"),
        (any(pair.use_rslora for pair in pairs), "rank-stabilised scale"),
        (lora_bias, f"a bias of lora_B (lora_bias) on {lora_bias} modules"),
        (biases, f"{biases} biases in place of the base's"),
        (content.invocation_token_ids, f"activated LoRA, from the last {list(content.invocation_token_ids)} of a prompt on"),
        (content.modules, f"{len(content.modules)} norms or projections whole"),
        (content.vocab_size is not None, f"{content.vocab_size} tokens in place of the base's"),
    ]
    for module, vocabulary in ((EMBEDDING_MODULE, content.embedding), (HEAD_MODULE, content.head)):
        tokens = 0 if vocabulary.tokens is None else len(vocabulary.tokens.ids)
        found += [
            (vocabulary.whole is not None, f"{module} whole"),
            (tokens, f"{tokens} rows of {module}"),
            (vocabulary.pair is not None, f"LoRA on {module}"),
        ]
    return [text for is_there, text in found if is_there]
