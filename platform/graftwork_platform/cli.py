"""The command line. Each command is a call of the admin API; what it prints is text for people, or JSON with ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from graftwork_adapters.keys import RowTypeName
from graftwork_adapters.report import Report
from graftwork_platform.admin.client import AdminClient, CallFailed
from graftwork_platform.admin.push import push
from graftwork_platform.admin.schemas import VersionOut
from graftwork_platform.doctor import examine_data, examine_kernels, examine_server, examine_software
from graftwork_platform.models import VersionState
from graftwork_platform.row_types import SERVERS, WantedRowType
from graftwork_platform.serve.command import serve
from graftwork_platform.serve.options import (
    DatabaseUrl,
    KernelDir,
    ObjectStoreUrl,
    S3CaBundle,
    S3Endpoint,
    S3PathStyle,
    S3Region,
    SecretsDir,
    UselessOption,
    store_config,
)
from graftwork_platform.settings import Settings, client_settings, given_secrets

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Serve and administer LoRA adapters."
)
tenants = typer.Typer(no_args_is_help=True, help="Customers.")
admin_key_commands = typer.Typer(no_args_is_help=True, help="The operator's own key.")
keys = typer.Typer(no_args_is_help=True, help="Tenants' API keys.")
adapters = typer.Typer(no_args_is_help=True, help="Tenants' adapters.")
app.command("serve")(serve)
app.add_typer(tenants, name="tenants")
app.add_typer(keys, name="keys")
app.add_typer(adapters, name="adapters")
app.add_typer(admin_key_commands, name="admin-key")

Url = Annotated[str | None, typer.Option("--url", help="Where the server is. [env: GRAFTWORK_URL]")]
AdminKey = Annotated[str | None, typer.Option("--admin-key", help="The operator's key. [env: GRAFTWORK_ADMIN_KEY]")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory, to read admin.key from.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RowTypeOption = Annotated[
    RowTypeName | None,
    typer.Option("--adapter-dtype", help="Of its adapters' rows; by default the tenant's, or else the server's."),
]
OfTenant = Annotated[str, typer.Option("--tenant", help="The tenant's name or id.")]

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


@tenants.command("create")
def create_tenant(
    name: str,
    adapter_dtype: RowTypeOption = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a tenant."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        tenant = client.create_tenant(name, adapter_dtype)
        _show(tenant, f"Tenant {tenant.name} is {tenant.id}.", as_json)


@tenants.command("change")
def change_tenant(
    tenant: Annotated[str, typer.Argument(help="The tenant's name or id.")],
    adapter_dtype: Annotated[
        WantedRowType,
        typer.Option("--adapter-dtype", help="Of the rows of what it uploads from now on; auto: the server's."),
    ],
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Change a tenant's settings."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        changed = client.change_tenant(tenant, None if adapter_dtype == SERVERS else adapter_dtype)
        _show(changed, f"New versions of {changed.name} have rows of {changed.adapter_dtype or 'the type of the server'}.", as_json)


@tenants.command("list")
def list_tenants(url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """All tenants."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        _show_list(client.list_tenants(), ["id", "name", "adapter_dtype"], as_json)


@admin_key_commands.command("rotate")
def rotate_admin_key(url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Make a new admin key, refuse the old one, and put the new one in the server's admin.key."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        key = client.rotate_admin_key()
        _show(key, f"{key.key}\nThe server's admin.key holds it too; the old key is refused from now on.", as_json)


@keys.command("create")
def create_key(
    tenant: OfTenant,
    adapter: Annotated[str | None, typer.Option("--adapter", help='What model "default" means; without it the base.')] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its text is shown this once."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        key = client.create_key(tenant, adapter)
        _show(key, f"{key.key}\nKeep it: it is not shown again. Its id is {key.id}.", as_json)


@keys.command("list")
def list_keys(
    tenant: OfTenant, url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """A tenant's keys, without their texts."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        _show_list(client.list_keys(tenant), ["id", "redacted", "default_adapter_id", "revoked_at"], as_json)


@keys.command("revoke")
def revoke_key(
    key_id: str, tenant: OfTenant, url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Refuse a key from now on."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        key = client.revoke_key(tenant, key_id)
        _show(key, f"Key {key.id} is revoked.", as_json)


@adapters.command("push")
def push_adapter(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that PEFT saved.")],
    tenant: OfTenant,
    name: Annotated[str, typer.Option("--name", help="The adapter's name.")],
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the verdict.")] = 1800.0,
    adapter_dtype: Annotated[
        WantedRowType | None,
        typer.Option("--adapter-dtype", help="Of its rows; by default the tenant's, or else the server's; auto: the server's."),
    ] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Publish a folder as the adapter's next version, wait for the verdict and print the report; exit 1 unless it is ready."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        with _progress(quiet=as_json) as progress:
            task = progress.add_task(f"Sending {folder.name}")

            def sent(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            version = push(client, folder, tenant=tenant, name=name, timeout=timeout, sent=sent, adapter_dtype=adapter_dtype)
        _show_verdict(name, version, as_json)
        if version.state != VersionState.READY:
            raise typer.Exit(1)


@adapters.command("list")
def list_adapters(
    tenant: OfTenant, url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """A tenant's adapters and their newest ready versions."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        _show_list(client.list_adapters(tenant), ["id", "name", "version", "digest"], as_json)


@adapters.command("delete")
def delete_adapter(
    name: str, tenant: OfTenant, url: Url = None, admin_key: AdminKey = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Stop serving an adapter and all its versions."""
    with _calling(url, admin_key, data_dir, as_json) as client:
        _show(client.delete_adapter(tenant, name), f"Adapter {name} is deleted.", as_json)


@app.command("doctor")
def doctor(
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    object_store: ObjectStoreUrl = None,
    s3_endpoint: S3Endpoint = None,
    s3_region: S3Region = None,
    s3_path_style: S3PathStyle = None,
    s3_ca_bundle: S3CaBundle = None,
    secrets_dir: SecretsDir = None,
    kernel_dir: KernelDir = None,
    as_json: AsJson = False,
) -> None:
    """Look for what keeps a server from serving, and say what to do; exit 1 if anything does.

    Give it the flags and the environment that the server has.
    """
    report = Report()
    with _calling(url, admin_key, data_dir, as_json) as client:
        try:
            store = store_config(object_store, s3_endpoint, s3_region, s3_path_style, s3_ca_bundle)
        except UselessOption as error:
            raise CallFailed(str(error), code="usage", next_step="Give doctor the flags of the server.") from error
        examine_software(report)
        if data_dir is None:
            examine_kernels(report, kernel_dir)
            report.warn("data directory", None, "was not looked at", "give --data-dir")
        else:
            settings = Settings(
                data_dir=data_dir, model_dir=data_dir, database_url=database_url, object_store=store, secrets_path=secrets_dir
            )
            examine_kernels(report, kernel_dir or settings.cache_dir / "kernels")
            examine_data(report, settings, given_secrets(), has_admin_key=client.has_key)
        examine_server(report, client)
    findings = report.as_json()
    if as_json:
        _print_json({"ok": report.ok, "checks": findings})
    else:
        Console().print(_report_table(findings))
    if not report.ok:
        raise typer.Exit(1)


def main() -> None:
    """The ``graftwork`` command. With ``--json`` a command line that makes no sense is told as JSON too, with exit status 2."""
    try:
        code = app(standalone_mode="--json" not in sys.argv)  # standalone, it tells of such mistakes itself, for people
    except typer.TyperException as error:
        _print_json({"error": {"message": error.format_message(), "code": "usage", "param": None, "fix": "Give --help."}})
        code = error.exit_code
    sys.exit(code)


@contextmanager
def _calling(url: str | None, admin_key: str | None, data_dir: Path | None, as_json: bool) -> Iterator[AdminClient]:
    """A client for one command; a call that fails is told to the user and ends the command with exit status 1."""
    try:
        try:
            settings = client_settings(url=url, admin_key=admin_key, data_dir=data_dir)
        except OSError as error:
            raise CallFailed(f"admin.key cannot be read: {error.strerror}", next_step="Give --admin-key.") from error
        with AdminClient(settings) as client:
            yield client
    except CallFailed as failed:
        if as_json:
            _print_json({"error": {"message": failed.message, "code": failed.code, "param": failed.param, "fix": failed.next_step}})
        else:
            typer.echo(f"Error: {failed.message}", err=True)
            if failed.next_step:
                typer.echo(failed.next_step, err=True)
        raise typer.Exit(1) from failed


def _show(item: BaseModel, text: str, as_json: bool) -> None:
    typer.echo(item.model_dump_json() if as_json else text)


def _show_list(items: Sequence[BaseModel], columns: Sequence[str], as_json: bool) -> None:
    rows = [item.model_dump(mode="json") for item in items]
    if as_json:
        _print_json({"object": "list", "data": rows})
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text("" if row[column] is None else str(row[column])) for column in columns))
    Console().print(table)


def _show_verdict(name: str, version: VersionOut, as_json: bool) -> None:
    if as_json:
        _print_json({"name": name, **version.model_dump(mode="json", exclude={"upload"})})
        return
    console = Console()
    console.print(_report_table(version.report))
    if version.version is None:
        console.print(f"{name} was refused; no version was published.")
    elif version.state == VersionState.READY:
        console.print(f"{name}@{version.version} is ready.")
    else:
        console.print(f"{name}@{version.version} was published, and is {version.state}: its adapter was deleted.")


def _report_table(findings: Sequence[dict[str, str | None]]) -> Table:
    table = Table("check", "result", "about", "message", "what to do")
    for finding in findings:
        result = finding["result"] or ""
        cells = (finding["check"], finding["field"], finding["message"], finding["fix"])
        check, about, message, fix = (Text(cell or "") for cell in cells)  # text, since findings quote what was uploaded
        table.add_row(check, Text(result, style=_COLOURS.get(result, "")), about, message, fix)
    return table


def _progress(*, quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty())


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value))


if __name__ == "__main__":
    main()
