"""AN4's archive: downloaded, verified, unpacked.

A download may have been tampered with. So the archive must have a known SHA-256, or a warning says
that it cannot be verified; and none of its members may leave the folder that they go to.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import io
import logging
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...common.errors import UserError, printable
from ...common.extras import need
from ...common.values import parse, read

log = logging.getLogger("oktopk")
RECORD = "oktopk-archive.json"
"""In the corpus, where it came from: address, size, SHA-256, and whose that hash is."""
_LARGEST = 1 << 30
"""Most bytes of an archive, and of its content. AN4 has 64 MB and 100 MB."""


@dataclass(frozen=True)
class Source:
    """An address of the archive."""

    url: str
    sha256: str = ""
    """As others have published it; empty if none is published."""


SOURCES = (
    # NVIDIA's mirror. The hash is the one that a training program outside of this project requires
    # of it. Carnegie Mellon publishes none, and often does not answer.
    Source(
        "https://dldata-public.s3.us-east-2.amazonaws.com/an4_sphere.tar.gz",
        "a0525579493735d32b60fb6fa5975dd0eaacde087b0a4eeb7f13b7ef33077b12",
    ),
    Source("https://www.speech.cs.cmu.edu/databases/an4/an4_sphere.tar.gz"),
    Source("http://www.speech.cs.cmu.edu/databases/an4/an4_sphere.tar.gz"),
)
"""In the order in which they are tried: the next one only if one cannot be reached, or has not the
hash that a user asks for."""


@dataclass(frozen=True)
class Fetched:
    url: str
    """After all redirections."""
    size: int
    sha256: str


def download(
    sources: Sequence[Source], archive: Path, data_dir: Path, progress: bool, sha256: str = ""
) -> tuple[Source, Fetched]:
    """The archive, from the first source that can be reached and has the hash that is asked for."""
    for source, other in zip(sources, [*sources[1:], None], strict=True):
        try:
            fetched = _download_from(source.url, archive, progress)
            if fetched.sha256 == (sha256.lower() or fetched.sha256):
                return source, fetched
            problem = (
                f"the AN4 of {fetched.url} has the SHA-256 {fetched.sha256}, but {sha256.lower()} "
                "is asked for"
            )
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if type(error) is urllib.error.URLError else error
            problem = f"AN4 could not be downloaded from {source.url}: {reason}"
        if other is not None:
            log.warning("%s; trying %s%s", printable(problem), other.url, _over_http(other.url))
    raise UserError(
        f"{problem}; see to the network and try again, or unpack the archive into {data_dir} "
        "yourself, or train on the corpus `spoken`, which needs no download"
    )


def _over_http(url: str) -> str:
    insecure = url.lower().startswith("http:")
    return ", over plain http, where anybody on the way can change it" if insecure else ""


def verify(source: Source, fetched: Fetched, sha256: str) -> dict[str, Any]:
    """The record of an archive. An archive with the wrong hash is refused; if no hash is known, a
    message says so."""
    wanted = sha256.lower() or source.sha256
    if wanted and fetched.sha256 != wanted:
        raise UserError(
            f"{fetched.url} has the SHA-256 {fetched.sha256}, but {wanted} is published for it: "
            "the archive is another one, and is not unpacked; if you trust it, "
            f"`oktopk data an4 --sha256 {fetched.sha256}` takes it"
        )
    published = {known.sha256 for known in (source, *SOURCES)}
    verified = "asked for" if sha256 else "published" if fetched.sha256 in published else "no"
    if verified == "no":
        log.warning(
            "AN4 was downloaded from %s%s. It cannot be verified: no SHA-256 is published for this "
            "archive. It has %d bytes and the SHA-256 %s; `oktopk data an4 --sha256 HASH` requires "
            "one",
            *(fetched.url, _over_http(fetched.url), fetched.size, fetched.sha256),
        )
    return {**asdict(fetched), "verified": verified}


def check_record(corpus: Path, sha256: str) -> None:
    """UserError unless the corpus was unpacked from an archive with this hash."""
    try:
        record = parse(read(corpus / RECORD))
    except (OSError, ValueError):
        record = None
    found = record.get("sha256") if isinstance(record, dict) else None
    if found != sha256.lower():
        what = f"the SHA-256 {found}" if found else "an unrecorded SHA-256"
        raise UserError(
            f"{corpus} is there already, from an archive with {what}: move it away to download "
            "the archive that --sha256 asks for, or leave out --sha256"
        )


def _download_from(url: str, target: Path, progress: bool) -> Fetched:
    need("rich")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("downloading AN4"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not progress,
        transient=True,
    )
    digest, received = hashlib.sha256(), 0
    with urllib.request.urlopen(url, timeout=30) as response, target.open("wb", 0) as file, bar:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        task = bar.add_task("", total=total)
        while chunk := response.read(1 << 16):
            _write(file, chunk)
            digest.update(chunk)
            received += len(chunk)
            bar.update(task, completed=received)
            if received > _LARGEST:
                raise OSError("it is far larger than AN4")
        if total is not None and received < total:
            raise OSError(f"the connection ended after {received} of {total} bytes")
        return Fetched(response.geturl(), received, digest.hexdigest())


def _write(file: io.RawIOBase, chunk: bytes) -> None:
    try:
        if file.write(chunk) != len(chunk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:  # no reason to try another source
        raise UserError(
            f"AN4 cannot be stored ({error.strerror}); choose a folder that has room"
        ) from None


UNPACKING = (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError)
"""Errors that damaged archives raise."""


def unpack(archive: Path, folder: Path) -> None:
    """Write everything in the archive to the folder."""
    with tarfile.open(archive, "r:gz") as tar:
        size = 0
        for member in tar:
            path = PurePosixPath(member.name)
            # The filter would only strip the slash, but no honest archive has such a name.
            if path.is_absolute() or ".." in path.parts:
                raise tarfile.TarError(f"{member.name!r} would leave the folder")
            size += member.size
            if size > _LARGEST:
                raise tarfile.TarError("what is in it is far larger than AN4")
        tar.extractall(folder, filter="data")
        # The archive's own end comes before gzip's, where its checksum is.
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass
