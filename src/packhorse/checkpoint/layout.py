"""What lies where in a checkpoint, and the names that belong to one. Reader and writer agree through this file only.

    step-500/manifest.json            {"digest": SHA-256 of "body" as canonical JSON, "body": {...}}
    step-500/tensors.safetensors      of one rank: every tensor once, in its shape
    step-500/rank-0003.safetensors    of several ranks: what rank 3 has saved, each a flat piece of the tensor of that name

Which elements of a tensor are in which file, the manifest says: [first, end) in the order in which they are stored. That is the order of memory, as
its `strides` have it. A tensor that tensor parallel ranks had cut is stored part after part, each in the order of memory and without padding, and
`parts` has which lines of the dim are in which part. Each element is in one file, so where a part or a shard ends does not matter to whoever reads.

A checkpoint is built under `.staging-NAME-PID` beside its place and renamed there when everything is on disk. To replace an earlier
checkpoint of that name, the earlier one is first renamed to `.replaced-NAME`; a reader that finds no NAME looks there, so that at no
instant is there neither.

Version 1 had one file, and no strides and pieces in its manifest. Version 2 has no parts, and is written where there are none.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from packhorse.errors import CheckpointError
from packhorse.graph.ir import Value, contiguous_strides
from packhorse.parallel.part import Part, Ranges, gaps

FORMAT = "packhorse-checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
STEP_PREFIX = "step-"
STAGING_PREFIX = ".staging-"
REPLACED_PREFIX = ".replaced-"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files`: name -> (size_bytes, SHA-256 in hex); `tensors`: name -> (safetensors dtype, shape).

    `aliases`: name of a tied tensor -> the name under which its bytes are stored. `meta`: JSON-able values of the caller. `strides`: name -> strides
    in elements of a tensor that is stored in another order than row by row. `pieces`: name -> (file, first, end), ascending, without gap or overlap.
    `parts`: name -> (dim, ranges of it in each part) of a tensor that is stored part after part.
    """

    files: dict[str, tuple[int, str]]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]
    meta: dict[str, Any]
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pieces: dict[str, tuple[tuple[str, int, int], ...]] = field(default_factory=dict)
    parts: dict[str, tuple[int, tuple[Ranges, ...]]] = field(default_factory=dict)

    def strides_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor, in elements."""
        return self.strides.get(name) or contiguous_strides(self.tensors[name][1])

    def parts_of(self, name: str) -> list[Part]:
        """The parts in which a tensor is stored, in their order; none if it is stored as a whole."""
        if name not in self.parts:
            return []
        (dim, ranges), shape = self.parts[name], self.tensors[name][1]
        widths = [sum(end - start for start, end in those) for those in ranges]
        return [Part(shape, self.strides_of(name), dim, ranges, rank, width) for rank, width in enumerate(widths)]

    def count(self, name: str) -> int:
        """Elements of a tensor."""
        return prod(self.tensors[name][1])

    def pieces_of(self, file: str) -> dict[str, int]:
        """Tensor -> how many of its elements the file holds, if it holds a piece of it."""
        return {name: end - first for name, pieces in self.pieces.items() for where, first, end in pieces if where == file}


def rank_file(rank: int) -> str:
    """What rank `rank` of several saves."""
    return f"rank-{rank:04d}.safetensors"


def is_file_of_ours(name: str) -> bool:
    """A file that a checkpoint has."""
    return name in (MANIFEST, TENSORS) or re.fullmatch(r"rank-\d{4,}\.safetensors", name) is not None


def encode_manifest(manifest: Manifest) -> bytes:
    """Manifest -> the bytes of manifest.json. Raises CheckpointError if `meta` holds something that is not JSON."""
    body = {"format": FORMAT, "version": VERSION} | asdict(manifest)
    if not manifest.parts:
        body = {name: value for name, value in body.items() if name != "parts"} | {"version": 2}
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
    if body.get("version") not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{path} has format version {body.get('version')!r}, and this packhorse reads versions 1 to {VERSION}; "
            "load it with the version of packhorse that wrote it"
        )
    if hashlib.sha256(_canonical(body)).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content; load an earlier checkpoint")
    try:
        return _manifest(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise foreign from error


def check_pieces(manifest: Manifest, path: Path) -> None:
    """Raises CheckpointError naming the first tensor of which the pieces or parts are not each element once, or not in files that are listed."""
    if manifest.pieces.keys() != manifest.tensors.keys():
        name = min(manifest.pieces.keys() ^ manifest.tensors.keys())
        raise CheckpointError(f"{path} does not list the tensors that its files hold: {name!r}; load another checkpoint")
    for name, (dim, ranges) in manifest.parts.items():
        if wrong := gaps(ranges, manifest.tensors[name][1][dim]):
            raise CheckpointError(f"{path}: the parts of {name!r} are not dim {dim} of {manifest.tensors[name][1]}: {wrong}; load another checkpoint")
    for name, pieces in manifest.pieces.items():
        at, files = 0, [file for file, _, _ in pieces]
        if len(set(files)) < len(files) or not set(files) <= manifest.files.keys():
            raise CheckpointError(f"{path}: the pieces of {name!r} are in {files}, expected different files of the checkpoint; load another one")
        for file, first, end in pieces:
            if first != at or end <= first:
                word = "overlaps the one before" if first < at else "leaves a gap" if first > at else "is empty"
                raise CheckpointError(f"{path}: the piece [{first}, {end}) of {name!r} in {file} {word}, which ends at {at}; load another checkpoint")
            at = end
        if at != manifest.count(name):
            raise CheckpointError(f"{path}: the pieces of {name!r} end at element {at} of {manifest.count(name)}; load another checkpoint")


def _manifest(body: dict[str, Any]) -> Manifest:
    """A checksum keeps accidents out, not intent: whoever forges a manifest can compute one, so the types are checked as well."""
    files = {name: (int(size), str(digest)) for name, (size, digest) in body["files"].items()}
    tensors = {name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in body["tensors"].items()}
    if any(dim < 0 for _, shape in tensors.values() for dim in shape):
        raise ValueError("a negative dim")
    aliases = {name: str(owner) for name, owner in body["aliases"].items()}
    meta = dict(body["meta"].items())
    if body["version"] == 1:
        (file,) = files
        whole = {name: ((file, 0, prod(shape)),) for name, (_, shape) in tensors.items() if prod(shape)}
        return Manifest(files, tensors, aliases, meta, {}, {name: whole.get(name, ()) for name in tensors})
    strides = {name: tuple(map(int, strides)) for name, strides in body["strides"].items()}
    if any(len(steps) != len(tensors[name][1]) or not Value(name, "u8", tensors[name][1], steps).is_dense for name, steps in strides.items()):
        raise ValueError("strides that do not fit a shape")
    pieces = {name: tuple((str(file), int(first), int(end)) for file, first, end in found) for name, found in body["pieces"].items()}
    split = body["parts"].items() if body["version"] > 2 else ()
    parts = {name: (int(dim), tuple(tuple((int(a), int(b)) for a, b in those) for those in ranges)) for name, (dim, ranges) in split}
    if not parts.keys() <= tensors.keys() or any(not 0 <= dim < len(tensors[name][1]) for name, (dim, _) in parts.items()):
        raise ValueError("parts of what is not there")
    return Manifest(files, tensors, aliases, meta, strides, pieces, parts)


def step_of(folder: Path) -> int | None:
    """step-500 -> 500; None for any other name."""
    digits = folder.name.removeprefix(STEP_PREFIX)
    return int(digits) if folder.name.startswith(STEP_PREFIX) and digits.isdecimal() and digits.isascii() else None


def replaced_path(folder: Path) -> Path:
    """Where an earlier checkpoint of this name waits while the new one takes its place."""
    return folder.with_name(REPLACED_PREFIX + folder.name)


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
