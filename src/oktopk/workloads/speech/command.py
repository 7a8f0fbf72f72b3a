"""`oktopk data`: fetch, make and repair speech corpora."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.cache import cache_dir
from ...common.errors import UserError, printable
from ...common.extras import need

if TYPE_CHECKING:
    from .manifest import Utterance

_SHOWN = 10


def add_commands(corpora: argparse._SubParsersAction[Any]) -> None:
    """One subcommand for each corpus."""
    command = _command(
        corpora,
        "an4",
        "get CMU AN4 ready, downloading it (64 MB) if it is not there",
        """Finds AN4 in the folder, as Carnegie Mellon distributes it (.sph, .raw or .wav), or
downloads it there, checks that it is complete (948 and 130 utterances), and writes
an4_train_manifest.csv and an4_val_manifest.csv beside it. If the folder is read-only, the manifests
go to the user's cache.

The archive comes over https from NVIDIA's mirror and must have the SHA-256 that is published for
it. If the mirror cannot be reached it comes from Carnegie Mellon, over https or, if there is none,
over http. No hash of that archive is published, so its own is shown, and it is kept in
an4/oktopk-archive.json with the address.

example:
  oktopk data an4 --data-dir corpora""",
    )
    command.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where AN4 is or goes (default: the cache)"
    )
    command.add_argument(
        "--no-download", action="store_true", help="fail if AN4 is not there, for machines offline"
    )
    command.add_argument(
        "--sha256",
        type=_sha256,
        metavar="HASH",
        help="accept only the archive that has this hash (default: the published one)",
    )

    command = _command(
        corpora,
        "spoken",
        "make a small corpus with a speech synthesiser; needs no network",
        """Has espeak-ng say spelled names, numbers, dates and commands in many voices. The same
request gives the same corpus, and one that is there already is kept.

example:
  oktopk data spoken --train 1200 --validation 160""",
    )
    command.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where it goes (default: the cache)"
    )
    command.add_argument(
        "--train", type=int, default=1200, metavar="N", help="utterances (default: %(default)s)"
    )
    command.add_argument(
        "--validation", type=int, default=160, metavar="N", help="utterances (default: %(default)s)"
    )

    command = _command(
        corpora,
        "manifest",
        "rebuild the manifest of a corpus that moved",
        """Finds each recording of a manifest again, by the end of its path, anywhere under the
folder. Reads our own manifests and those of deepspeech.pytorch (CSV and JSON), and writes our own:
CSV with the columns path, transcript and seconds. Exits with 1 if recordings are missing; those
that were found are written all the same, and the old manifest is kept as MANIFEST.old.

example:
  oktopk data manifest an4_train_manifest.csv --data-dir /new/place/an4""",
    )
    command.add_argument("manifest", type=Path, metavar="MANIFEST", help="the one that is outdated")
    command.add_argument(
        "--data-dir", type=Path, metavar="DIR", required=True, help="where the corpus is now"
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write (default: over MANIFEST; for JSON, beside it as CSV)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare a corpus; returns the exit code."""
    need("rich")
    from . import an4, spoken  # imported here, so that help does without torch

    progress = sys.stderr.isatty()
    if args.corpus == "an4":
        data_dir, sha256 = args.data_dir or cache_dir(), args.sha256 or ""
        paths = an4.prepare(
            data_dir, download=not args.no_download, progress=progress, sha256=sha256
        )
        _report(paths, speakers=True)
        return 0
    if args.corpus == "spoken":
        paths = spoken.prepare(
            args.data_dir, progress=progress, train=args.train, validation=args.validation
        )
        _report(paths, speakers=True)
        return 0
    return _rebuild(args.manifest, args.data_dir, args.output)


def _rebuild(path: Path, root: Path, output: Path | None) -> int:
    from rich.console import Console

    from . import manifest

    rebuilt = manifest.rebuild(path, root)
    console = Console()
    if output is None:
        output = path.with_suffix(".csv") if path.suffix.lower() == ".json" else path
    if not output.name:
        raise UserError(f"--output {output} is a folder; name a file in it")
    if rebuilt.utterances:
        try:
            if rebuilt.missing and output.exists() and output.samefile(path):
                _keep(path)
            manifest.write(output, rebuilt.utterances)
        except OSError as error:
            raise UserError(
                f"{output} cannot be written ({error.strerror or error}); name another --output"
            ) from None
        _report((output,), speakers=False)
    if not rebuilt.missing:
        return 0
    total = len(rebuilt.utterances) + len(rebuilt.missing)
    lines = [f"{len(rebuilt.missing)} of {total} utterances are missing:"]
    lines += [f"  {line}" for line in rebuilt.missing[:_SHOWN]]
    if len(rebuilt.missing) > _SHOWN:
        lines.append(f"  and {len(rebuilt.missing) - _SHOWN} more")
    if not rebuilt.utterances:
        lines.append(f"Nothing was found under {root}, so nothing was written.")
    for line in map(printable, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1


def _keep(path: Path) -> None:
    """Keep a copy of a manifest. An earlier copy stays: it lists more."""
    kept = path.with_name(f"{path.name}.old")
    with suppress(FileExistsError), kept.open("xb") as copy:
        copy.write(path.read_bytes())


def _sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no SHA-256, which has 64 digits of 0-9, a-f")
    return text.lower()


def _command(
    corpora: argparse._SubParsersAction[Any],
    name: str,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = corpora.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(corpus=name, run=run)
    return command


def _report(paths: tuple[Path, ...], *, speakers: bool) -> None:
    """A line for each manifest."""
    from rich.console import Console
    from rich.table import Table

    from . import manifest

    table = Table("manifest", box=None, pad_edge=False)
    for column in ("utterances", "length", *(["speakers"] * speakers), "shortest", "longest"):
        table.add_column(column, justify="right")
    for path in paths:
        utterances = manifest.read(path)
        lengths = [utterance.seconds for utterance in utterances]
        row = [printable(path.name), f"{len(utterances):,}", _length(sum(lengths))]
        if speakers:
            row.append(str(_speakers(utterances)))
        table.add_row(*row, f"{min(lengths):.1f} s", f"{max(lengths):.1f} s")
    console = Console()
    console.print(table)
    folder = printable(str(paths[0].parent))
    console.print(f"in {folder}", markup=False, highlight=False, soft_wrap=True)


def _speakers(utterances: list[Utterance]) -> int:
    """AN4 and the spoken corpus have a folder for each speaker."""
    return len({utterance.audio.parent for utterance in utterances})


def _length(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min"
