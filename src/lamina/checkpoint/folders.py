"""Folders of checkpoints: how one appears whole or not at all, which is the newest, which may go.

A checkpoint is written into a folder with a hidden name beside its place; the manifest comes last, then one rename.
What a crash leaves is either hidden or complete.

Note [names]   for a checkpoint at `runs/step-10`
    runs/step-10             complete, always
    runs/.step-10.partial-1f being written, or left by a crash; the next save of that name begins anew. Each save has a
                             number: jobs that save under one name do not write into each other's files
    runs/.step-10.replaced   the earlier checkpoint of that name, while (and only while) a new one takes its place
    runs/.step-10.1f.deleted being deleted: what others may be looking at is renamed first, all at once
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from lamina.checkpoint.manifest import MANIFEST_NAME, Manifest, from_json, to_json
from lamina.checkpoint.special import refuse_special
from lamina.errors import CheckpointError, UsageError


def _beside(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}"


def partial(path: Path, number: int | None = None) -> Path:
    """Where a checkpoint is written before it is complete."""
    return _beside(path, "partial" if number is None else f"partial-{number:x}")


def given(path: str | os.PathLike[str], call: str) -> str:
    """A path as the user gave it, as text.

    Raises:
        UsageError: it is none.
    """
    try:
        return os.fsdecode(path)
    except TypeError:
        raise UsageError(f"{call}: a {type(path).__name__} is no path: give that of a folder") from None


_LONGEST_NAME_BYTES = 255 - len("..partial-12345678")


def check_target(path: Path) -> None:
    """A checkpoint may be written at `path`: nothing is there, or a checkpoint, which is replaced."""
    length = len(os.fsencode(path.name))
    if length > _LONGEST_NAME_BYTES:
        raise UsageError(f"{path}: a name of {length} bytes; save() takes at most {_LONGEST_NAME_BYTES}")
    if path.name.startswith("."):
        raise UsageError(f"{path}: a hidden name is that of an unfinished checkpoint, which latest() does not see")
    if (path.parent / MANIFEST_NAME).is_file():
        with contextlib.suppress(CheckpointError):
            read_manifest(path.parent)
            raise UsageError(
                f"{path.parent} is a checkpoint itself, and all in it goes when it is replaced or deleted: save to a "
                "path beside it"
            )
    if path.exists() and not (path / MANIFEST_NAME).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} exists and is not a checkpoint: save() writes a folder of its own, give another path")


def prepare(path: Path, number: int | None = None) -> Path:
    """Make the hidden folder; what earlier, unfinished saves left there goes."""
    recover(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = re.compile(re.escape(partial(path).name) + "(-[0-9a-f]+)?")
    deleted = re.compile(re.escape(_beside(path, "").name) + "[0-9a-f]{8}\\.deleted")
    for left in list(path.parent.iterdir()):
        if unfinished.fullmatch(left.name):
            _discard(path, left)
        elif deleted.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    folder = partial(path, number)
    folder.mkdir()
    return folder


def publish(path: Path, manifest: Manifest, number: int | None = None) -> None:
    """Write the manifest into the hidden folder, then give the folder its name.

    Raises:
        CheckpointError: files that were written are not there: another job that saves under this name took them for
            left over.
    """
    folder = partial(path, number)
    wrong = faults(folder, manifest)
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]}, though it was written. Does another job save there, too?")
    with open(folder / MANIFEST_NAME, "x") as file:
        file.write(to_json(manifest))
        file.flush()
        os.fsync(file.fileno())
    give_name(path, number)


def give_name(path: Path, number: int | None = None) -> None:
    """Let what is in the hidden folder appear at `path`, all at once; an earlier checkpoint there goes afterwards."""
    folder = partial(path, number)
    sync_folder(folder)
    earlier = _beside(path, "replaced")
    if (path / MANIFEST_NAME).is_file():
        os.rename(path, earlier)
    os.rename(folder, path)
    sync_folder(path.parent)
    with contextlib.suppress(OSError):  # the new one is complete; the next save tries again
        _discard(path, earlier)


def _discard(path: Path, folder: Path) -> Path | None:
    """First the name, by a rename that somebody else may win; then the files, as far as that works.

    A network file system keeps a file that another process has open, under a name of its own: so its folder stays.

    Returns:
        what could not be deleted.
    """
    hidden = _beside(path, f"{secrets.token_hex(4)}.deleted")
    try:
        os.rename(folder, hidden)
    except FileNotFoundError:
        return None
    shutil.rmtree(hidden, ignore_errors=True)
    return hidden if hidden.exists() else None


def abandon(path: Path, number: int | None = None) -> None:
    """After a failed save: the earlier checkpoint gets its place back, the hidden folder goes, as far as that works."""
    with contextlib.suppress(OSError):
        recover(path)
    shutil.rmtree(partial(path, number), ignore_errors=True)


def recover(path: Path) -> None:
    """Give an earlier checkpoint its name back if a crash came between the two renames of `publish`."""
    earlier = _beside(path, "replaced")
    if not earlier.exists():
        return
    if not path.exists():
        with contextlib.suppress(FileNotFoundError):  # another job was faster
            os.rename(earlier, path)
        sync_folder(path.parent)
    else:
        _discard(path, earlier)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(path: Path) -> Path:
    """The folder of the checkpoint at `path`, also where a crash left it under its hidden name."""
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    earlier = _beside(path, "replaced")
    return earlier if not path.exists() and earlier.exists() else path


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of a folder."""
    path = folder / MANIFEST_NAME
    refuse_special(path)
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise CheckpointError(_no_manifest(folder)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return from_json(text, str(path))


def _no_manifest(folder: Path) -> str:
    if not folder.exists():
        return f"there is no checkpoint at {folder}"
    inside = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    held = [name for name in inside if (folder / name / MANIFEST_NAME).is_file() and not name.startswith(".")]
    if held:
        return f"{folder} holds checkpoints ({', '.join(held[:5])}) and is none: load lamina.latest({str(folder)!r})"
    return f"{folder} is no checkpoint: it has no {MANIFEST_NAME}, which a save writes last"


def faults(folder: Path, manifest: Manifest) -> list[str]:
    """Files of a checkpoint that are not there in full length."""
    found = []
    for entry in manifest.files:
        try:
            actual_bytes = os.stat(folder / entry.name).st_size
        except OSError as error:
            found.append(f"{entry.name}: {error.strerror}")
            continue
        if actual_bytes != entry.size_bytes:
            found.append(f"{entry.name} has {actual_bytes} bytes, not {entry.size_bytes}")
    return found


def complete(folder: Path) -> Manifest | None:
    """The manifest of a folder all of whose files are there in full length; None if it is not such a folder."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return None
    return None if faults(folder, manifest) else manifest


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first. Links are none of them: what they point to has a name."""
    if not folder.is_dir():
        return []
    found = []
    for entry in folder.iterdir():
        if entry.is_symlink():
            continue
        visible = entry
        if entry.name.startswith("."):
            if not entry.name.endswith(".replaced"):
                continue
            visible = folder / entry.name[1:].removesuffix(".replaced")
            if visible.exists():
                continue
        manifest = complete(entry)
        if manifest is not None:
            found.append((manifest.created_ns, visible.name, visible))
    return [path for _, _, path in sorted(found)]


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder (or the folder, if it is one); None if there is none."""
    if complete(folder) is not None:
        return folder
    found = checkpoints(folder)
    return found[-1] if found else None


def check_count(keep: int) -> None:
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise UsageError(f"keep={keep!r}: give the number of checkpoints to keep, at least 1")


def prune(folder: Path, keep: int, protect: Sequence[Path] = ()) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints in a folder; returns what was deleted.

    Folders that are not complete checkpoints are left alone, and count for nothing: they never push out a good one.
    """
    check_count(keep)
    for left in folder.glob(".*.deleted") if folder.is_dir() else ():
        shutil.rmtree(left, ignore_errors=True)
    going = [path for path in checkpoints(folder)[:-keep] if path not in protect]
    for path in going:
        try:
            recover(path)
            undeleted = _discard(path, path)  # half of a checkpoint must never be visible
        except OSError:
            undeleted = path
        if undeleted is not None:
            warnings.warn(f"{undeleted} could not be deleted: the next keep_last() tries again", stacklevel=3)
    if going:
        sync_folder(folder)
    return going
