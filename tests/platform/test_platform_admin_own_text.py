"""Text files of an upload are looked at when it is published; what was found is in its report and is kept with its version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from graftwork_adapters.keys import AdapterDigest
from graftwork_adapters.publish_job import AdapterTraits
from graftwork_platform.catalog.facts import OwnText
from graftwork_platform.ids import parse

TEXT = {"tokenizer.json": b"{}", "chat_template.jinja": b"x"}


def test_what_is_in_force_is_kept_and_told(admin: Any) -> None:
    admin.check.text = OwnText(tokenizer=True, eos_token_ids=(4, 5))
    admin.publish.traits = AdapterTraits(vocab_size=77)
    tenant = admin.tenant()
    version = admin.push(tenant, **TEXT)["version"]
    assert version["state"] == "ready"
    assert [finding["check"] for finding in version["report"]] == ["tensors", "tokenizer"]
    [job] = admin.check.jobs
    assert job.names == ("chat_template.jinja", "tokenizer.json")
    assert job.num_rows == 77
    assert job.base_dir == str(admin.services.settings.model_dir)
    model = admin.run(admin.services.catalog.resolve, parse("tn", tenant), "support")
    assert model.facts.text == OwnText(True, False, (4, 5))


def test_files_that_cannot_be_served_refuse_the_version(admin: Any) -> None:
    admin.check.fail = "has ids up to 9, and the embedding has 8 rows"
    upload = admin.push(admin.tenant(), **TEXT)
    assert upload["state"] == "failed"
    [refusal] = [finding for finding in upload["version"]["report"] if finding["result"] == "fail"]
    assert refusal["field"] == "tokenizer.json"
    assert "8 rows" in refusal["message"]
    assert upload["version"]["digest"] is None


def test_an_upload_without_them_starts_no_process(admin: Any) -> None:
    admin.push(admin.tenant(), **{"README.md": b"# mine"})
    assert admin.check.jobs == []


def test_one_that_is_refused_already_is_not_looked_at(admin: Any) -> None:
    admin.publish.fail = "rank 512 is over 256"
    admin.push(admin.tenant(), **TEXT)
    assert admin.check.jobs == []


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_text_files_are_fetched_without_the_weights(start_admin: Callable[..., AbstractContextManager[Any]], tmp_path: Any) -> None:
    with start_admin() as admin:
        digest = AdapterDigest(admin.push(admin.tenant(), **TEXT)["version"]["digest"])
        admin.run(admin.services.blobs.fetch_text, digest, tmp_path / "text")
        assert {path.name: path.read_bytes() for path in (tmp_path / "text").iterdir()} == TEXT
        admin.run(admin.services.blobs.fetch_upload, digest, tmp_path / "all")
        assert {path.name for path in (tmp_path / "all").iterdir()} == {*TEXT, "adapter_config.json", "adapter_model.safetensors"}
