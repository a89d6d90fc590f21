"""Sealed folders: they appear whole or not at all, and a single changed bit is noticed."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "manifest.json"
ASIDE = ".old.tmp"
FORMAT = "recurrent-depth sealed folder, version 1"


def write_sealed(target: Path, files: Mapping[str, bytes]) -> None:
    """Writes `files` and a manifest with the size and SHA-256 of each as the folder `target`.

    All is written into a temporary folder beside it and synced to the disk; one rename then puts it in place. What lay
    there before is set aside first and removed last. A process that is killed leaves at most the temporary folder and
    what was set aside: `read_sealed` finds the latter until `remove_leftovers` puts it back.

    Raises:
        OSError: if the disk is full or refuses; what was in place stays, the temporary folder is removed.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, content in {**files, MANIFEST: _manifest(files)}.items():
            _write_synced(temporary / name, content)
        _sync_folder(temporary)
        _put_in_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_sealed(path: Path) -> dict[str, bytes]:
    """The files of a sealed folder, each checked against the manifest; other files in the folder are ignored.

    Reading changes nothing on the disk: where a killed process had set the folder aside, it is read there.

    Raises:
        ValueError: if the manifest or a file is missing, cut short or changed; says which, what was found and expected.
    """
    place = _aside(path) if not path.exists() and _aside(path).exists() else path
    return {name: _read_checked(place / name, *expected) for name, expected in _read_manifest(place).items()}


def sealed_folders(folder: Path, pattern: str) -> set[Path]:
    """The folders whose names match `pattern`, also where a killed process had set one aside."""
    return {*folder.glob(pattern), *map(_target, folder.glob(f".{pattern}{ASIDE}"))}


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Puts back what killed processes had set aside and not replaced, then removes what else they left.

    For the one process that writes: only sealed folders whose names match `pattern` are touched.
    """
    for aside in list(folder.glob(f".{pattern}{ASIDE}")):
        _put_back(aside)
    for leftover in folder.glob(f".{pattern}.tmp"):
        shutil.rmtree(leftover)


def _manifest(files: Mapping[str, bytes]) -> bytes:
    entries = {name: {"size": len(content), "sha256": _digest(content)} for name, content in files.items()}
    return json.dumps({"format": FORMAT, "files": entries}, indent=1).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(temporary: Path, target: Path) -> None:
    aside = _aside(target)
    try:
        if target.exists():  # a folder that is not empty cannot be renamed over
            target.rename(aside)
        temporary.rename(target)
        _sync_folder(target.parent)
    except BaseException:
        if not temporary.exists():
            target.rename(temporary)
        _put_back(aside)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}{ASIDE}")


def _target(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".").removesuffix(ASIDE))


def _put_back(aside: Path) -> None:
    if aside.exists() and not _target(aside).exists():
        aside.rename(_target(aside))


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # Windows opens no folders; its renames are journaled
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, expected {FORMAT!r}")
        return {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged or no such folder of ours: {MANIFEST} cannot be read ({reason})."
        ) from None


def _read_checked(path: Path, size: int, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.parent} is damaged: {path.name} cannot be read ({error}).") from None
    if len(content) != size:
        raise ValueError(f"{path.parent} is damaged: {path.name} holds {len(content)} bytes, expected {size}.")
    if _digest(content) != digest:
        raise ValueError(f"{path.parent} is damaged: the SHA-256 of {path.name} is not the one in {MANIFEST}.")
    return content
