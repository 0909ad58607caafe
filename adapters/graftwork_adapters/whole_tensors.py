"""What an upload does to the embedding, the head and the norms: replaced whole, in the rows of some tokens, or by LoRA.

A tied base has one matrix for embedding and head. What PEFT makes of it, by what was sent:

* saved whole (`modules_to_save`): a copy of its own, so the other keeps the base's;
* LoRA: on the one that it names, so the other keeps the base's;
* `trainable_token_indices` of the embedding: rows of both, unless the head has other indices of its own;
* `ensure_weight_tying`: what the one is given the other has as well, and both were saved;
* the base's matrix itself, saved because the vocabulary was resized: that of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graftwork_adapters.adapter_content import TokenRows, VocabularyContent, WholeModule
from graftwork_adapters.base_weights import is_copy, rows_at_a_time
from graftwork_adapters.lora_tensors import read_pair
from graftwork_adapters.module_tensors import UNUSED_FIX, Matching, ModuleTensors
from graftwork_adapters.peft_config import EMBEDDING_MODULE, HEAD_MODULE
from graftwork_adapters.safetensors_header import shown
from graftwork_adapters.tensor_source import TensorSource
from graftwork_adapters.tensor_values import to_fp32

_AGAIN = "save the adapter again with PEFT's save_pretrained"
_RESIZED_FIX = "save the adapter with save_embedding_layers=True, or name both in modules_to_save"
_TOKENS = "trainable_token_indices"


@dataclass(frozen=True, slots=True)
class _Whole:
    """A matrix in place of the base's: trained, or (``is_resized``) the base's own with another number of rows."""

    source: TensorSource
    is_resized: bool


def read_norm(module: str, size: int, tensors: ModuleTensors, matching: Matching) -> WholeModule | None:
    """A norm in place of the base's; None after a finding, or if it is the base's own."""
    weight = tensors.take("weight")
    if "lora_A" in tensors or "lora_B" in tensors:
        fix = "leave it out of target_modules; a norm can be trained whole (modules_to_save)"
        tensors.refuse_all("modules", f"adapts {module}, and a norm has no LoRA", fix, matching.report)
    original = tensors.take("base_layer.weight") if matching.config.saves(module) else None
    if original is not None:
        matching.leave_out_copy(original, f"{module}.weight")
    tensors.refuse_rest(matching.report)
    if weight is None:
        return None
    if not matching.config.saves(module):
        matching.leave_out_copy(weight, f"{module}.weight")
        return None
    return WholeModule(module, weight.source) if matching.has_shape(weight.source, (size,), module) else None


def read_vocabulary(
    embedding: ModuleTensors, head: ModuleTensors, matching: Matching
) -> tuple[VocabularyContent, VocabularyContent, int | None]:
    """What the upload does to embedding and head, and how many tokens they have where that is not the base's number."""
    wholes = {tensors.module: _read_whole(tensors, matching) for tensors in (embedding, head)}
    if matching.spec.is_tied:
        wholes = _share_wholes(wholes, matching)
    num_rows = _check_num_rows(wholes, matching)
    tokens = _read_tokens(embedding, head, wholes, num_rows, matching)
    hidden_size = matching.spec.hidden_size
    embedding_pair = head_pair = None
    if "lora_embedding_A" in embedding or "lora_embedding_B" in embedding:
        embedding_pair = read_pair(embedding, num_rows, hidden_size, matching, of_embedding=True)
    if "lora_A" in head or "lora_B" in head:
        head_pair = read_pair(head, hidden_size, num_rows, matching)
    contents = {
        module: VocabularyContent(None if whole is None else whole.source, tokens.get(module), pair)
        for (module, whole), pair in zip(wholes.items(), (embedding_pair, head_pair), strict=True)
    }
    names_head = any(HEAD_MODULE.endswith(name) for name, _ in matching.config.token_indices)
    for module, content in contents.items():
        has_rows = content.tokens is not None and (module == EMBEDDING_MODULE or names_head)
        _check_combination(module, content, wholes[module], has_rows, matching)
    if matching.spec.is_tied and matching.config.ties_targets():
        _check_tied_pairs(contents, matching)
    for tensors in (embedding, head):
        tensors.refuse_rest(matching.report)
    vocab_size = None if num_rows == matching.spec.vocab_size else num_rows
    return contents[EMBEDDING_MODULE], contents[HEAD_MODULE], vocab_size


def _read_whole(tensors: ModuleTensors, matching: Matching) -> _Whole | None:
    module, spec, config = tensors.module, matching.spec, matching.config
    weight = tensors.take("weight")
    if config.saves(module) or (spec.is_tied and config.ties_saved):
        original = tensors.take("base_layer.weight")  # what PEFT goes back to without the adapter
        if original is not None and original.source.shape == (spec.vocab_size, spec.hidden_size):
            matching.leave_out_copy(original, f"{module}.weight")
        elif original is not None:
            matching.left_out.append(original.source.sent_as)
        if weight is None:
            matching.report.fail("tensors", f"{module}.weight", "is missing, and modules_to_save names it", _AGAIN)
            return None
        fits = matching.has_shape(weight.source, ("tokens", spec.hidden_size), module)
        return _Whole(weight.source, is_resized=False) if fits else None
    own = tensors.take("base_layer.weight") if weight is None else weight
    if own is None:
        return None
    if own.source.shape[1:] == (spec.hidden_size,) and own.source.shape[0] not in (0, spec.vocab_size):
        fits = matching.has_shape(own.source, ("tokens", spec.hidden_size), module)
        return _Whole(own.source, is_resized=True) if fits else None
    matching.leave_out_copy(own, f"{module}.weight")
    return None


def _share_wholes(wholes: dict[str, _Whole | None], matching: Matching) -> dict[str, _Whole | None]:
    """What one of a tied base's two modules was given and the other has as well."""
    embedding, head = wholes[EMBEDDING_MODULE], wholes[HEAD_MODULE]
    if embedding is None or head is None:
        resized = embedding or head
        if resized is not None and resized.is_resized:
            return {EMBEDDING_MODULE: resized, HEAD_MODULE: resized}
        return wholes
    is_one = matching.config.ties_saved or (embedding.is_resized and head.is_resized)
    if is_one and not is_copy(head.source, embedding.source):
        message = f"differs from {shown(embedding.source.sent_as)}, and PEFT has one matrix for both"
        matching.report.fail("tensors", shown(head.source.sent_as), message, _AGAIN)
    return wholes


def _check_num_rows(wholes: dict[str, _Whole | None], matching: Matching) -> int:
    """The number of tokens that embedding and head have; a finding where they differ."""
    sizes = {module: matching.spec.vocab_size if whole is None else whole.source.shape[0] for module, whole in wholes.items()}
    of_embedding, of_head = sizes[EMBEDDING_MODULE], sizes[HEAD_MODULE]
    if of_embedding != of_head:
        module = next((module for module, whole in wholes.items() if whole is None), HEAD_MODULE)
        message = f"has {sizes[module]} rows while the embedding has {of_embedding} and the head {of_head}: its own are not here"
        matching.report.fail("tensors", f"{module}.weight", message, _RESIZED_FIX)
    elif of_embedding == 0:
        matching.report.fail("shapes", f"{EMBEDDING_MODULE}.weight", "has no rows, and neither has the head", _AGAIN)
    return of_embedding


def _read_tokens(
    embedding: ModuleTensors, head: ModuleTensors, wholes: dict[str, _Whole | None], num_rows: int, matching: Matching
) -> dict[str, TokenRows]:
    indices = _token_indices(matching)
    of_embedding, of_head = indices.get(EMBEDDING_MODULE), indices.get(HEAD_MODULE)
    found: dict[str, TokenRows] = {}
    if not (matching.spec.is_tied and of_embedding is not None and (of_head is None or of_head == of_embedding)):
        for tensors, ids in ((embedding, of_embedding), (head, of_head)):
            rows = None if ids is None else _read_rows(tensors, ids, num_rows, matching)
            if rows is not None:
                found[tensors.module] = rows
        if matching.spec.is_tied and matching.config.ensure_weight_tying and len(indices) > 1:
            message = "names other tokens for the head than for the embedding, and ensure_weight_tying makes them one"
            matching.report.fail("config", _TOKENS, message, "name the same tokens, or set ensure_weight_tying to false")
        return found
    rows = _read_rows(embedding, of_embedding, num_rows, matching)
    again = head.take("token_rows")  # PEFT writes them a second time where it saves the embedding as well
    whole = wholes[HEAD_MODULE]
    if "lora_magnitude_vector" in head or (whole is not None and not whole.is_resized):
        message = "changes the head's rows as well, since the base is tied, and PEFT cannot where the head has DoRA or is replaced"
        matching.report.fail("config", _TOKENS, message, "train the head's rows alone, or leave the head as it is")
    if rows is None:
        return {}
    if again is not None:
        if is_copy(again.source, rows.rows):
            matching.left_out.append(again.source.sent_as)
        else:
            message = f"differs from {shown(rows.rows.sent_as)}, and PEFT has one for both"
            matching.report.fail("tensors", shown(again.source.sent_as), message, UNUSED_FIX)
    return {EMBEDDING_MODULE: rows, HEAD_MODULE: rows}


def _token_indices(matching: Matching) -> dict[str, tuple[int, ...]]:
    """The config's trainable tokens by module of the base; a finding for a name that is neither embedding nor head."""
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in matching.config.token_indices:
        modules = [module for module in (EMBEDDING_MODULE, HEAD_MODULE) if module.endswith(name)]
        if len(modules) == 1 and modules[0] not in found:
            found[modules[0]] = ids
            continue
        message = "names neither the embedding nor the head alone" if len(modules) != 1 else f"names {modules[0]} a second time"
        matching.report.fail("config", f"{_TOKENS}[{shown(name)}]", message, "name embed_tokens or lm_head")
    return found


def _read_rows(tensors: ModuleTensors, ids: tuple[int, ...], num_rows: int, matching: Matching) -> TokenRows | None:
    rows, module = tensors.take("token_rows"), tensors.module
    beyond = [token for token in ids if token >= num_rows]
    if beyond:
        message = f"names token {beyond[0]}; {module} has {num_rows} rows, numbered from 0"
        matching.report.fail("config", _TOKENS, message, _RESIZED_FIX)
    if rows is None:
        matching.report.fail(
            "tensors", f"{module}.token_adapter.trainable_tokens_delta", f"is missing, and {_TOKENS} is set", _AGAIN
        )
        return None
    if beyond or not matching.has_shape(rows.source, (len(ids), matching.spec.hidden_size), module):
        return None
    return TokenRows(ids, rows.source)


def _check_combination(module: str, content: VocabularyContent, whole: _Whole | None, has_rows: bool, matching: Matching) -> None:
    """What PEFT cannot do to one module at once. ``has_rows``: the config names tokens of this one, not of what it is tied to."""
    is_trained = whole is not None and not whole.is_resized
    parts = {"modules_to_save": is_trained, _TOKENS: has_rows, "target_modules": content.pair is not None}
    named = [name for name, is_there in parts.items() if is_there]
    if len(named) > 1:
        message = f"names {module}, and so does {named[0]}: PEFT does not load such an adapter"
        matching.report.fail("config", named[1], message, f"name {module} in one of them")


def _check_tied_pairs(contents: dict[str, VocabularyContent], matching: Matching) -> None:
    """With `ensure_weight_tying` the head's A and B are the embedding's B and A turned, and PEFT saves both."""
    embedding, head = contents[EMBEDDING_MODULE].pair, contents[HEAD_MODULE].pair
    for module, pair in ((EMBEDDING_MODULE, embedding), (HEAD_MODULE, head)):
        if pair is None:
            message = "has no LoRA, and ensure_weight_tying gives embedding and head the same"
            matching.report.fail("tensors", module, message, _AGAIN)
    if embedding is None or head is None:
        return
    for sent, own in ((head.a, embedding.b), (head.b, embedding.a)):
        if not _is_turned_copy(sent, own):
            message = f"is not {shown(own.sent_as)} turned, and PEFT has one for both"
            matching.report.fail("tensors", shown(sent.sent_as), message, _AGAIN)


def _is_turned_copy(sent: TensorSource, own: TensorSource) -> bool:
    turned = own.shape[::-1]
    if sent.shape != turned:
        return False
    values, expected, step = sent.map(), own.map().T, rows_at_a_time(turned)
    return all(
        np.array_equal(to_fp32(values[start : start + step], sent.dtype), to_fp32(expected[start : start + step], own.dtype))
        for start in range(0, turned[0], step)
    )
