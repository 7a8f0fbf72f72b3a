"""Manifests: lists of the utterances of a corpus.

Our own is a CSV file with a header, whose paths begin at its own folder or are absolute:

    path,transcript,seconds
    wav/fash/an251-fash-b.sph,YES,1.1

Those of deepspeech.pytorch are read as well: CSV lines of `wav_path,txt_path` without a header,
and JSON with `root_path` and `samples`. There, transcripts are files of their own.
"""

from __future__ import annotations

import csv
import io
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath

from ...common.errors import UserError
from ...common.files import check_ordinary, replacing
from ...common.values import build, parse
from ...common.values import read as file_content
from . import audio

HEADER = ["path", "transcript", "seconds"]
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ' ")
_LONG = 80
"""Characters of a transcript that a message shows."""
_APOSTROPHES = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'", "_": " ", "/": " "})


@dataclass(frozen=True)
class Utterance:
    """A recording and its transcript."""

    audio: Path
    """Resolved."""
    text: str
    """As `normalise` leaves it."""
    seconds: float


@dataclass(frozen=True)
class Rebuilt:
    """The result of `rebuild`: recordings that were found, and those that were not."""

    utterances: list[Utterance]
    missing: list[str]
    """A line for each entry that was not found: its path in the manifest, and why."""


@dataclass(frozen=True)
class _Entry:
    """A line of a manifest. Its files may not exist."""

    audio: str
    text: str | None
    transcript: str
    """Path of the transcript, where `text` is None."""
    seconds: float | None
    where: str
    """For messages."""


@dataclass(frozen=True)
class _Sample:
    wav_path: str
    transcript_path: str


@dataclass(frozen=True)
class _Samples:
    """The JSON of deepspeech.pytorch."""

    samples: list[_Sample]
    root_path: str = ""


def normalise(text: str) -> str:
    """The text in the labels that are recognised: A to Z, the apostrophe and single spaces.

    Accents and punctuation are dropped, and hyphens become spaces. Digits and other alphabets are
    mistakes, since it is not known how they were spoken.
    """
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).upper())
    kept = []
    for character in plain.translate(_APOSTROPHES):
        if character in _LETTERS:
            kept.append(character)
        elif character.isspace() or unicodedata.category(character) == "Pd":
            kept.append(" ")
        elif character.isnumeric():
            raise UserError(f"the transcript {_shown(text)} has digits; write numbers as words")
        elif "\ud800" <= character <= "\udfff":  # dropped, it would take a letter with it
            raise UserError(f"the transcript {_shown(text)} is not UTF-8; convert the file")
        elif character.isalpha():
            raise UserError(
                f"the transcript {_shown(text)} has {character!r}; only A to Z, ' and spaces can "
                "be recognised"
            )
    return " ".join("".join(kept).split())


def read(path: str | os.PathLike[str]) -> list[Utterance]:
    """All utterances of a manifest, in its order. Their recordings exist."""
    path = Path(path)
    entries, bases = _entries(path)
    recordings = [_find(entry.audio, bases) for entry in entries]
    missing = [entry.audio for entry, found in zip(entries, recordings, strict=True) if not found]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of {len(entries)} recordings are missing, the first is "
            f"{missing[0]}; if the corpus moved, `oktopk data manifest` rebuilds the manifest"
        )
    utterances = []
    for entry, recording in zip(entries, recordings, strict=True):
        assert recording is not None
        text = entry.text
        if text is None:
            transcript = _find(entry.transcript, bases)
            if transcript is None:
                raise UserError(
                    f"{entry.where}: there is no transcript {entry.transcript}; if the corpus "
                    "moved, `oktopk data manifest` rebuilds the manifest"
                )
            text = _transcript(transcript)
        length = audio.seconds(recording) if entry.seconds is None else entry.seconds
        utterances.append(Utterance(recording, _normalised(text, entry.where), length))
    return utterances


def write(
    path: str | os.PathLike[str], utterances: Sequence[Utterance], *, absolute: bool = False
) -> None:
    """Write our own kind of manifest, in one atomic operation, creating its folder.

    Paths are relative, so that corpus and manifest can move together, unless `absolute`.
    """
    path = Path(path)
    if not utterances:
        raise UserError(f"there is nothing to write to {path}: no utterance was found")
    check_ordinary(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    home = path.parent.resolve()
    rows = []
    for utterance in utterances:
        name = utterance.audio.as_posix()
        if not absolute:
            name = PurePath(os.path.relpath(utterance.audio, home)).as_posix()
        if "\n" in name or "\r" in name:
            raise UserError(f"{name!r}: a manifest cannot hold a line break; rename the recording")
        rows.append([name, utterance.text, repr(utterance.seconds)])
    with (
        replacing(path) as part,
        part.open("x", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])


def rebuild(manifest: str | os.PathLike[str], root: str | os.PathLike[str]) -> Rebuilt:
    """The manifest's utterances, with recordings found again under `root`.

    1. Of the files with an entry's name, those are candidates that agree with the longest end of
       its path: for `old/wav/fash/an251.sph`, `new/wav/fash/an251.sph` before `new/an251.sph`.
    2. One candidate is taken; of several none is, since the wrong one has another's transcript.
    3. A file that several entries would take goes to the one whose path agrees best, if one does.
    """
    manifest, root = Path(manifest), Path(root)
    if not os.path.isdir(root):
        raise UserError(f"there is no folder {root}; name the one that the corpus is in now")
    entries, bases = _entries(manifest)
    files = _files(root)
    found: list[tuple[_Entry, Path, int]] = []
    reasons: dict[str, str] = {}
    for entry in entries:
        recording, depth, problem = _match(entry.audio, files)
        if recording is None:
            reasons[entry.audio] = problem
        else:
            found.append((entry, recording, depth))
    # The same entry may be listed twice, but two entries are not one recording.
    claims = {(entry.audio, recording, depth) for entry, recording, depth in found}
    best: dict[Path, int] = {}
    for _, recording, depth in claims:
        best[recording] = max(depth, best.get(recording, 0))
    rivals = Counter(recording for _, recording, depth in claims if depth == best[recording])
    utterances = []
    for entry, recording, depth in found:
        if depth < best[recording] or rivals[recording] > 1:
            reasons[entry.audio] = f"{recording} is also another entry's"
            continue
        try:
            text = entry.text
            if text is None:
                moved, _, problem = _match(entry.transcript, files)
                moved = moved or _find(entry.transcript, bases)
                if moved is None:
                    raise UserError(f"transcript {entry.transcript} {problem}")
                text = _transcript(moved)
            text = _normalised(text, entry.where)
            utterances.append(Utterance(recording, text, audio.seconds(recording)))
        except UserError as error:
            reasons[entry.audio] = str(error)
    lost = [entry.audio for entry in entries if entry.audio in reasons]
    return Rebuilt(utterances, [f"{name}: {reasons[name]}" for name in lost])


def _entries(path: Path) -> tuple[list[_Entry], list[Path]]:
    """The entries of a manifest of any kind, and the folders that its relative paths start from."""
    try:
        content = file_content(path).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UserError(
            f"the manifest {path} cannot be read ({error.strerror or error}); `oktopk data` makes "
            "manifests"
        ) from None
    bases = [path.parent, Path.cwd()]
    if path.suffix.lower() == ".json":
        entries, root = _from_json(path, content)
        # A relative root begins where a relative path would; an absolute one replaces that.
        bases = [base / root for base in bases]
    else:
        entries = _from_csv(path, content)
    if not entries:
        raise UserError(f"the manifest {path} lists no utterance; `oktopk data` makes manifests")
    return entries, bases


def _from_csv(path: Path, content: str) -> list[_Entry]:
    rows = csv.reader(io.StringIO(content, newline=""))
    entries: list[_Entry] = []
    ours = False
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if not row:
                continue
            if not entries and not ours and [name.strip().lower() for name in row] == HEADER:
                ours = True
            elif len(row) != (3 if ours else 2) or not row[0].strip():
                wanted = ",".join(HEADER) if ours else "wav_path,txt_path"
                hint = "" if ours else f" (or the header {','.join(HEADER)} is missing)"
                raise UserError(f"{where}: expected {wanted}{hint}, but found {len(row)} columns")
            elif ours:
                entries.append(_Entry(row[0], row[1], "", _length(row[2], where), where))
            else:
                entries.append(_Entry(row[0].strip(), None, row[1].strip(), None, where))
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: not CSV ({error})") from None
    return entries


def _from_json(path: Path, content: str) -> tuple[list[_Entry], str]:
    try:
        table = build(_Samples, parse(content))
    except ValueError as error:
        raise UserError(
            f"{path} is not a manifest of deepspeech.pytorch, which has root_path and samples with "
            f"wav_path and transcript_path ({error})"
        ) from None
    entries = [
        _Entry(sample.wav_path, None, sample.transcript_path, None, f"{path}, sample {number}")
        for number, sample in enumerate(table.samples, 1)
    ]
    return entries, table.root_path


def _length(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{where}: seconds is {text!r}, but must be a number above 0")
    return value


def _normalised(text: str, where: str) -> str:
    try:
        result = normalise(text)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not result:
        raise UserError(f"{where}: the transcript is empty; write it, or leave the utterance out")
    return result


def _shown(text: str) -> str:
    """A transcript in a message: its beginning, if it is long."""
    text = text.strip()
    return repr(text if len(text) <= _LONG else f"{text[:_LONG]}...")


def _transcript(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            f"the transcript {path} cannot be read: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"the transcript {path} is not UTF-8 ({error}); convert the file") from None


def _find(name: str, bases: Iterable[Path]) -> Path | None:
    for base in bases:
        path = base / name
        try:
            if path.is_file():
                return path.resolve()
        except (OSError, ValueError):  # too long, or with a zero: no file has that name
            continue
    return None


def _files(root: Path) -> dict[str, list[Path]]:
    """All files under the folder, by name. Symbolic links are followed, each folder once."""
    files: dict[str, list[Path]] = {}
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in names:
            files.setdefault(name, []).append(Path(folder, name))
    return files


def _parts(name: str) -> list[str]:
    """Reversed. Backslashes alone divide too: the corpus may come from another system."""
    path = PureWindowsPath(name) if "\\" in name and "/" not in name else PurePath(name)
    return [part for part in reversed(path.parts) if part != path.anchor]


def _match(name: str, files: dict[str, list[Path]]) -> tuple[Path | None, int, str]:
    """The file whose path has the longest end in common with `name`, and the number of common
    parts; or the reason why there is none."""
    wanted = _parts(name)
    ranked: dict[int, set[Path]] = {}
    for path in files.get(wanted[0] if wanted else "", []):
        has = list(reversed(path.parts))
        depth = 0
        while depth < min(len(has), len(wanted)) and has[depth] == wanted[depth]:
            depth += 1
        ranked.setdefault(depth, set()).add(path.resolve())
    if not ranked:
        return None, 0, "not found"
    depth = max(ranked)
    best = sorted(ranked[depth])
    if len(best) > 1:
        return None, 0, f"found {len(best)} times, for example {best[0]} and {best[1]}"
    return best[0], depth, ""
