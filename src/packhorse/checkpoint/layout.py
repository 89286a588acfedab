"""What lies where in a checkpoint, and the names that belong to one. Reader and writer agree through this file only.

    step-500/manifest.json          {"digest": SHA-256 of "body" as canonical JSON, "body": {...}}
    step-500/tensors.safetensors    every tensor once

A checkpoint is built under `.staging-NAME-PID` beside its place and renamed there when everything is on disk. To replace an earlier
checkpoint of that name, the earlier one is first renamed to `.replaced-NAME`; a reader that finds no NAME looks there, so that at no
instant is there neither.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packhorse.errors import CheckpointError

FORMAT = "packhorse-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
STEP_PREFIX = "step-"
STAGING_PREFIX = ".staging-"
REPLACED_PREFIX = ".replaced-"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files`: name -> (size_bytes, SHA-256 in hex); `tensors`: name -> (safetensors dtype, shape).

    `aliases`: name of a tied tensor -> the name under which its bytes are stored. `meta`: JSON-able values of the caller.
    """

    files: dict[str, tuple[int, str]]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]
    meta: dict[str, Any]


def encode_manifest(manifest: Manifest) -> bytes:
    """Manifest -> the bytes of manifest.json. Raises CheckpointError if `meta` holds something that is not JSON."""
    body = {"format": FORMAT, "version": VERSION} | asdict(manifest)
    try:
        canonical = _canonical(body)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save the extra values of a checkpoint: {error}; expected numbers, strings, booleans, None, and lists and "
            "dicts of them. Save tensors as tensors, and everything else as one of these"
        ) from error
    # Written in canonical form too: then every byte of the file counts for the digest.
    return b'{"body":' + canonical + b',"digest":"' + hashlib.sha256(canonical).hexdigest().encode() + b'"}'


def decode_manifest(encoded: bytes, path: Path) -> Manifest:
    """The bytes of manifest.json -> Manifest. Raises CheckpointError naming `path` if they are foreign, newer or damaged."""
    foreign = CheckpointError(f"{path} is not the manifest of a packhorse checkpoint, or is damaged; load another checkpoint")
    try:
        outer = json.loads(encoded)
        body, digest = outer["body"], outer["digest"]
        if body["format"] != FORMAT:
            raise foreign
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise foreign from error
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {body.get('version')!r}, and this packhorse reads version {VERSION}; "
            "load it with the version of packhorse that wrote it"
        )
    if hashlib.sha256(_canonical(body)).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content; load an earlier checkpoint")
    try:
        return _manifest(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise foreign from error


def _manifest(body: dict[str, Any]) -> Manifest:
    """A checksum keeps accidents out, not intent: whoever forges a manifest can compute one, so the types are checked as well."""
    return Manifest(
        files={name: (int(size), str(digest)) for name, (size, digest) in body["files"].items()},
        tensors={name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in body["tensors"].items()},
        aliases={name: str(owner) for name, owner in body["aliases"].items()},
        meta=dict(body["meta"].items()),
    )


def step_of(folder: Path) -> int | None:
    """step-500 -> 500; None for any other name."""
    digits = folder.name.removeprefix(STEP_PREFIX)
    return int(digits) if folder.name.startswith(STEP_PREFIX) and digits.isdecimal() and digits.isascii() else None


def replaced_path(folder: Path) -> Path:
    """Where an earlier checkpoint of this name waits while the new one takes its place."""
    return folder.with_name(REPLACED_PREFIX + folder.name)


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
