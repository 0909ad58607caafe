"""Where a server keeps things, as flags of the command line: the same for whoever serves and whoever looks. Opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from graftwork_adapters.store import StoreConfig

DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database-url", envvar="GRAFTWORK_DATABASE_URL", help="PostgreSQL or SQLite; by default a SQLite file in DATA_DIR."
    ),
]
ObjectStoreUrl = Annotated[
    str | None,
    typer.Option(
        "--object-store", metavar="URL", help="Of adapters: a folder or s3://BUCKET/PREFIX; by default a folder in DATA_DIR."
    ),
]
S3Endpoint = Annotated[str | None, typer.Option("--s3-endpoint", metavar="URL", help="An S3-compatible server; AWS by default.")]
S3Region = Annotated[str | None, typer.Option("--s3-region", help="Region of the bucket.")]
S3PathStyle = Annotated[
    bool | None,
    typer.Option(
        "--s3-path-style/--no-s3-path-style",
        help="Bucket in the path of the URL and not in the host; by default with --s3-endpoint.",
    ),
]
S3CaBundle = Annotated[
    Path | None, typer.Option("--s3-ca-bundle", help="PEM file that the endpoint's certificate is checked against.")
]
SecretsDir = Annotated[
    Path | None, typer.Option("--secrets-dir", help="Folder of the server's secrets; DATA_DIR/secrets by default.")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where the model runs; auto: on a GPU where torch has one.")
]
Graphs = Annotated[
    bool,
    typer.Option("--graphs/--no-graphs", help="On a GPU: capture steps that decode, and replay them. Off to look for a fault."),
]
AdapterDtype = Annotated[
    Literal["auto", "bfloat16", "float32", "int8", "e4m3"],
    typer.Option("--adapter-dtype", help="Of adapters' rows, unless a tenant's or an upload's is another; auto: that of --dtype."),
]
AdapterWholeMemory = Annotated[
    int | None,
    typer.Option(
        "--adapter-whole-memory", metavar="BYTES", help="For whole matrices that adapters bring: heads, embeddings, norms."
    ),
]
KernelDir = Annotated[
    Path | None, typer.Option("--kernel-dir", help="Folder of compiled kernels; DATA_DIR/cache/kernels by default.")
]
KernelPins = Annotated[
    list[str] | None,
    typer.Option("--kernel", metavar="OPERATOR=NAME", help="Instead of the fastest; may be repeated. all=reference: plain torch."),
]


class UselessOption(Exception):
    """An option that the others leave without effect; the message says with which it has one."""


def store_config(
    url: str | None, endpoint: str | None, region: str | None, path_style: bool | None, ca_bundle: Path | None
) -> StoreConfig | None:
    """The object store that the flags name; None: the data directory's own. Raises `UselessOption`."""
    is_s3 = url is not None and url.startswith("s3://")
    if not is_s3 and (endpoint, region, path_style, ca_bundle) != (None,) * 4:
        raise UselessOption("S3 settings are of use with --object-store s3://BUCKET/PREFIX only")
    if url is None:
        return None
    place = url if "://" in url else str(Path(url).absolute())
    return StoreConfig(place, endpoint, region, path_style, None if ca_bundle is None else str(ca_bundle.absolute()))


def adapter_memory(pool: int | None, host: int | None, whole: int | None, page: int | None) -> dict[str, int | float | None]:
    """What the engine is told of memory for adapters, in bytes; None: its default."""
    return {
        "adapter_memory_bytes": pool,
        "adapter_memory_fraction": None if pool is None else 0.0,  # as much as was said, and no more
        "adapter_host_bytes": host,
        "adapter_whole_bytes": whole,
        "adapter_page_bytes": page,
    }


def kernel_pins(given: list[str]) -> dict[str, str]:
    """Implementation by operator; the engine's configuration knows which there are. Raises `typer.BadParameter`."""
    pins: dict[str, str] = {}
    for pin in given:
        operator, equals, name = pin.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pin!r} is not OPERATOR=NAME, for instance paged_attention=reference", param_hint="--kernel")
        if operator in pins:
            raise typer.BadParameter(f"{operator} is pinned twice", param_hint="--kernel")
        pins[operator] = name
    return pins
