"""An upload's tensors and config to what the adapter does: every tensor finds its place, is a copy of the base's, or is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graftwork_adapters.adapter_content import AdapterContent, SiteContent, WholeModule
from graftwork_adapters.base_spec import BaseSpec
from graftwork_adapters.experts import expert_findings
from graftwork_adapters.fused import trained_names
from graftwork_adapters.lora_tensors import check_pair_without_config, check_selection, read_site
from graftwork_adapters.module_tensors import Matching, ModuleTensors, ShapeChecks, group_by_module, why_no_place
from graftwork_adapters.peft_config import EMBEDDING_MODULE, HEAD_MODULE
from graftwork_adapters.report import Report
from graftwork_adapters.tensor_source import AdapterTensor, UploadTensors
from graftwork_adapters.whole_tensors import read_norm, read_vocabulary

_AGAIN = "save the adapter again with PEFT's save_pretrained"
_LORA_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def read_content(upload: UploadTensors, matching: Matching) -> AdapterContent:
    """Place the upload's tensors; every one that would not be applied is a failing finding, and only without one is this complete.

    Raises `PatternTooSlow` where the config's patterns take too long.
    """
    report, spec, config = matching.report, matching.spec, matching.config
    expert_findings(upload.tensors, config.rank_of, report)
    dense = [tensor for tensor in upload.tensors if tensor.part != "expert"]
    groups = _placed_groups(dense, spec, report)
    adapted = {(tensor.module, tensor.trained_module) for tensor in dense if tensor.part in _LORA_PARTS and tensor.module in groups}
    trained = trained_names((tensor.trained_module for tensor in dense), spec)
    _check_saved(groups, trained, matching)
    if config.has_velora:
        states = [state for group in groups.values() if (state := group.take("training_state")) is not None]
        matching.left_out.extend(state.source.sent_as for state in states)
    sites: list[SiteContent] = []
    modules: list[WholeModule] = []
    for site in spec.sites:
        found = read_site(site, groups[site.module], matching) if site.module in groups else None
        if isinstance(found, SiteContent):
            sites.append(found)
        elif found is not None:
            modules.append(found)
    for module, size in spec.norms:
        norm = read_norm(module, size, groups[module], matching) if module in groups else None
        if norm is not None:
            modules.append(norm)
    of_embedding, of_head = (groups.get(module) or ModuleTensors(module) for module in (EMBEDDING_MODULE, HEAD_MODULE))
    embedding, head, vocab_size = read_vocabulary(of_embedding, of_head, matching)
    check_selection(adapted, trained.values(), matching)
    _check_invocation(spec.vocab_size if vocab_size is None else vocab_size, matching)
    return AdapterContent(
        sites=tuple(sites),
        embedding=embedding,
        head=head,
        modules=tuple(sorted(modules, key=lambda module: module.module)),
        invocation_token_ids=config.invocation_token_ids,
        vocab_size=vocab_size,
        left_out=(*matching.left_out, *upload.copies),
    )


def check_all_applied(upload: UploadTensors, content: AdapterContent, report: Report) -> None:
    """A finding unless all that was sent is applied or left out by name, and something is. For an upload that passed so far."""
    applied = len({source.sent_as for source in content.sources()})
    left_out = len(set(content.left_out))
    if upload.tensors and not applied:
        message = "holds copies of the base's own weights and nothing else, so nothing would be applied"
        report.fail("tensors", upload.shards[0], message, _AGAIN)
    elif applied + left_out != upload.num_sent:
        message = f"holds {upload.num_sent} tensors, of which {applied} would be applied and {left_out} are left out"
        report.fail("tensors", upload.shards[0], message, _AGAIN)


def check_without_config(tensors: Iterable[AdapterTensor], checks: ShapeChecks) -> None:
    """The findings about names and shapes alone, for an upload whose config is of no use."""
    groups = _placed_groups(tensors, checks.spec, checks.report)
    for site in checks.spec.sites:
        if site.module in groups:
            check_pair_without_config(site, groups[site.module], checks)


def _placed_groups(tensors: Iterable[AdapterTensor], spec: BaseSpec, report: Report) -> dict[str, ModuleTensors]:
    """Tensors by module; a finding for each whose module the base does not have."""
    groups = group_by_module(tensors, report)
    known = {site.module for site in spec.sites} | {module for module, _ in spec.norms} | {EMBEDDING_MODULE, HEAD_MODULE}
    for module in sorted(groups.keys() - known):
        fix = "make sure that the adapter was trained on this base"
        groups.pop(module).refuse_all("modules", why_no_place(module, spec), fix, report)
    return groups


def _check_invocation(num_tokens: int, matching: Matching) -> None:
    """A finding where no prompt can hold the tokens that activate the adapter: it would never act."""
    beyond = [token for token in matching.config.invocation_token_ids if token >= num_tokens]
    if beyond:
        message = f"names token {beyond[0]}; there are {num_tokens}, numbered from 0, so that no prompt activates the adapter"
        fix = "set it to the tokens trained with, or save the embedding and the head with the tokens that were added"
        matching.report.fail("config", "alora_invocation_tokens", message, fix)


def _check_saved(groups: dict[str, ModuleTensors], trained: Mapping[str, str], matching: Matching) -> None:
    """A finding for every projection and norm that modules_to_save names and that was not sent: PEFT loads no such adapter.

    ``trained`` has the projections' names by which the config knows them.
    """
    named = [*trained.items(), *((module, module) for module, _ in matching.spec.norms)]
    absent = [
        name for module, name in named if matching.config.saves(name) and not (module in groups and "weight" in groups[module])
    ]
    problems: list[tuple[str | None, str]] = [
        (f"{module}.weight", "is missing, and modules_to_save names it") for module in dict.fromkeys(absent)
    ]
    matching.report.fail_each("tensors", problems, _AGAIN)
