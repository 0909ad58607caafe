"""A real PEFT adapter through the whole upload and the real publishing subprocess, and real damage refused by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork_adapters.base_spec import load_base_spec
from graftwork_adapters.errors import AdapterTooLarge, BlobCorrupt
from graftwork_adapters.keys import AdapterDigest, packed_key, packed_path, upload_prefix
from graftwork_adapters.packed import read_packed
from graftwork_adapters.publish_job import ServingMemory
from graftwork_adapters.publisher import run_publish
from graftwork_platform.serve import command
from graftwork_platform.serve.api_process import ApiConfig, decode_config, encode_config
from graftwork_platform.settings import PublishLimits

StartAdmin = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def real_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    folder = tmp_path_factory.mktemp("model") / "real-base"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def real_adapter(real_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of an adapter of rank 4 on q and v, with a B that is not zero."""
    model = LlamaForCausalLM.from_pretrained(real_base)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(model, config).save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("adapter_")}


@pytest.fixture
def real(start_admin: StartAdmin, real_base: Path, tmp_path: Path) -> Iterator[Any]:
    spec = load_base_spec(real_base, tmp_path / "base-id")
    with start_admin(steer=run_publish, spec=spec, model_dir=real_base) as admin:
        yield admin


def complete(admin: Any, tenant: str, files: dict[str, bytes], name: str = "support") -> str:
    """Send an upload and leave it to be validated; its id."""
    upload = admin.start_upload(tenant, files, name).json()
    admin.send_parts(tenant, upload, files)
    assert admin.call("POST", f"/tenants/{tenant}/uploads/{upload['id']}/complete").status_code in (200, 202)
    return str(upload["id"])


def push(admin: Any, tenant: str, files: dict[str, bytes]) -> Any:
    return admin.wait(tenant, complete(admin, tenant, files))["version"]


def failures(version: Any) -> list[dict[str, str]]:
    return [finding for finding in version["report"] if finding["result"] == "fail"]


def test_a_real_adapter_is_published_and_its_packed_form_rebuilt(real: Any, real_adapter: dict[str, bytes], tmp_path: Path) -> None:
    tenant = real.tenant()
    version = push(real, tenant, real_adapter)
    assert version["state"] == "ready", version["report"]
    assert all(finding["result"] != "fail" for finding in version["report"])
    key = packed_key(AdapterDigest(version["digest"]), real.services.spec.base_id, "bfloat16")
    store = real.services.store
    store.fetch(packed_path(key), tmp_path / "first")
    index, _ = read_packed(tmp_path / "first", key)
    assert {site.rank for site in index.sites} == {4}
    store.delete(packed_path(key))
    real.run(real.services.publisher.ensure_packed, AdapterDigest(version["digest"]))
    store.fetch(packed_path(key), tmp_path / "second")
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes()


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_extra_files_and_another_config_of_one_tenant_do_not_harm_anothers_adapter(
    start_admin: StartAdmin, real_base: Path, real_adapter: dict[str, bytes], tmp_path: Path
) -> None:
    spec = load_base_spec(real_base, tmp_path / "base-id")
    elsewhere = json.loads(real_adapter["adapter_config.json"]) | {"base_model_name_or_path": "somewhere/else"}
    other = {**real_adapter, "adapter_config.json": json.dumps(elsewhere).encode()}
    with start_admin(steer=run_publish, spec=spec, model_dir=real_base) as real:
        notes = {f"note{number}.txt": b"x" for number in range(40)}
        digest = AdapterDigest(push(real, real.tenant("first"), other | notes)["digest"])
    with start_admin(steer=run_publish, spec=spec, model_dir=real_base, publish=PublishLimits(require_base_name=True)) as real:
        named = json.loads(real_adapter["adapter_config.json"]) | {"base_model_name_or_path": spec.name}
        mine = {**real_adapter, "adapter_config.json": json.dumps(named).encode()}
        more = {f"more{number}.md": b"x" for number in range(40)}
        assert push(real, real.tenant("second"), mine | more)["digest"] == digest
        store, packed = real.services.store, packed_path(packed_key(digest, spec.base_id, "bfloat16"))
        assert {key.rpartition("/")[2] for key in store.list_keys(upload_prefix(digest))} == set(real_adapter)
        store.delete(packed)
        real.run(real.services.publisher.ensure_packed, digest)
        assert store.exists(packed)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_a_corrupt_upload_behind_a_corrupt_packed_form_is_what_the_error_names(real: Any, real_adapter: dict[str, bytes]) -> None:
    digest = AdapterDigest(push(real, real.tenant(), real_adapter)["digest"])
    store, broken = real.services.store, real.services.settings.data_dir / "broken"
    broken.write_bytes(b"\xff" * 64)
    for key in (
        upload_prefix(digest) + "adapter_model.safetensors",
        packed_path(packed_key(digest, real.services.spec.base_id, "bfloat16")),
    ):
        store.delete(key)
        store.put_if_absent(key, broken)
    with pytest.raises(BlobCorrupt, match=r"the stored upload .* cannot be packed"):
        real.run(lambda: real.services.publisher.ensure_packed(digest, replace=True))


def test_damage_is_refused_with_a_finding_and_the_server_goes_on(real: Any, real_adapter: dict[str, bytes], tmp_path: Path) -> None:
    tenant = real.tenant()
    weights, config = real_adapter["adapter_model.safetensors"], json.loads(real_adapter["adapter_config.json"])
    poisoned = tmp_path / "poisoned.safetensors"
    poisoned.write_bytes(weights)
    tensors = load_file(poisoned)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, poisoned)
    damaged = {
        "no config": {"adapter_model.safetensors": weights},
        "truncated": {**real_adapter, "adapter_model.safetensors": weights[:-10]},
        "NaN": {**real_adapter, "adapter_model.safetensors": poisoned.read_bytes()},
        "rank over the limit": {**real_adapter, "adapter_config.json": json.dumps({**config, "r": 512}).encode()},
        "unserved": {**real_adapter, "adapter_config.json": json.dumps({**config, "peft_type": "LOHA"}).encode()},
    }
    for name, files in damaged.items():
        version = push(real, tenant, files)
        assert (name, version["state"], version["version"]) == (name, "failed", None)
        failed = [finding for finding in version["report"] if finding["result"] == "fail"]
        assert failed, name
        assert all(finding["message"] for finding in failed)
    assert push(real, tenant, real_adapter)["version"] == "v1"


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_a_catastrophic_pattern_is_refused_in_seconds_and_others_need_not_wait(
    real: Any, real_adapter: dict[str, bytes], field: str
) -> None:
    tenant, regex = real.tenant(), r"(([a-z0-9_.]+)+)+Z$"
    config = json.loads(real_adapter["adapter_config.json"]) | {field: regex if field == "target_modules" else {regex: 4}}
    slow = complete(real, tenant, {**real_adapter, "adapter_config.json": json.dumps(config).encode()}, "slow")
    assert push(real, tenant, real_adapter)["state"] == "ready"
    assert real.call("GET", f"/tenants/{tenant}/uploads/{slow}").json()["state"] == "validating"
    version = real.wait(tenant, slow)["version"]
    (failed,) = failures(version)
    assert (version["state"], failed["check"]) == ("failed", "config")
    assert failed["field"].startswith(field)
    assert "processor time" in failed["message"]
    assert failed["fix"]


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_what_the_servers_memory_cannot_hold_is_refused_and_not_rebuilt(
    start_admin: StartAdmin, real_base: Path, real_adapter: dict[str, bytes], tmp_path: Path
) -> None:
    setup: dict[str, Any] = {"steer": run_publish, "spec": load_base_spec(real_base, tmp_path / "base-id"), "model_dir": real_base}
    small = PublishLimits(memory=ServingMemory(pool_bytes=512, page_bytes=256, host_bytes=1 << 20))
    with start_admin(**setup, publish=small) as admin:
        tenant = admin.tenant()
        refused = push(admin, tenant, real_adapter)
        (failed,) = failures(refused)
        assert (refused["state"], failed["check"]) == ("failed", "memory")
        assert "it needs 1024 bytes in 4 pages of adapter memory, there are 512" in failed["message"]
    with start_admin(**setup, publish=PublishLimits(memory=ServingMemory(4096, 256, 1 << 20))) as admin:
        digest = AdapterDigest(push(admin, tenant, real_adapter)["digest"])
        admin.services.store.delete(packed_path(packed_key(digest, admin.services.spec.base_id, "bfloat16")))
    too_large = pytest.raises(AdapterTooLarge, match=r"needs 1024 bytes in 4 pages.*there are 512; lower the rank")
    with start_admin(**setup, publish=small) as admin, too_large:
        admin.run(admin.services.publisher.ensure_packed, digest)


def test_serve_tells_the_engine_its_device(real_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[command.ServePlan] = []
    monkeypatch.setattr(command, "run", plans.append)
    command.serve(model=real_base, data_dir=tmp_path)
    command.serve(model=real_base, data_dir=tmp_path, device="cuda")
    assert [plan.engine.device for plan in plans] == ["auto", "cuda"]


def test_serve_tells_publishing_the_engines_adapter_memory(
    real_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[command.ServePlan] = []
    monkeypatch.setattr(command, "run", plans.append)
    command.serve(model=real_base, data_dir=tmp_path, adapter_memory=1 << 20, adapter_page=4096, max_lora_rank=8)
    (plan,) = plans
    settings = decode_config(encode_config(ApiConfig(plan.settings, "ipc://engine"))).settings
    engine = plan.engine
    expected = ServingMemory(1 << 20, 4096, engine.adapter_host_bytes, engine.adapter_whole_bytes, engine.dtype)
    assert settings.publish.memory == expected
    assert settings.publish.max_rank == 8
    assert plan.engine.max_adapter_rank == 256, "what was published under a higher limit stays in service"
    command.serve(model=real_base, data_dir=tmp_path, max_lora_rank=300)
    assert plans[1].engine.max_adapter_rank == 300, "what may be uploaded can be loaded"
