"""One checkpoint is one file in the safetensors format: tensors, one JSON document, and a checksum over all of it.

Nothing in it can run: there is no pickle. It is written under another name in the same directory, flushed to the
disk and renamed, so that a kill, a full disk or a power cut at any moment leaves the old file or the new one,
whole. Any reader of safetensors can look into it.

    8 bytes    length of the header, little-endian
    header     JSON: dtype, shape and place of each tensor; format and version under ``__metadata__``
    tensors    one after the other, widest numbers first
    document   a tensor of bytes: JSON, see `tree.split`
    sha256     a tensor of 32 bytes: the checksum of everything before it
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egeria_lab.checkpoint.tree import Tree, join, split
from egeria_lab.errors import CheckpointError, EgeriaLabError

FORMAT = "egeria_lab checkpoint"
VERSION = 1
MIGRATIONS: dict[int, Callable[[Tree], Tree]] = {}
"""Version of an old file → a function that brings its tree to the next version."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DOCUMENT, _CHECKSUM = "document", "sha256"
_CHUNK = 1 << 24
_DIGEST_BYTES = 32
_MOST_HEADER_BYTES = 100_000_000
_counter = itertools.count()


def write(path: str | os.PathLike[str], tree: Tree) -> int:
    """Write a tree to a file, whole or not at all; answers with its size in bytes.

    Raises:
        CheckpointError: when it could not be written; a file that was there before is as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     _ = write(Path(place) / "a.ckpt", {"step": 3, "weight": torch.ones(2)})
        ...     read(Path(place) / "a.ckpt")
        {'step': 3, 'weight': tensor([1., 1.])}
    """
    target = Path(path)
    parts = list(_encoded(tree))
    hidden = target.with_name(f".{target.name}.{os.getpid()}.{next(_counter)}.tmp")
    try:
        try:
            _write_whole(hidden, parts)
            os.replace(hidden, target)
        except BaseException:
            with contextlib.suppress(OSError):
                hidden.unlink()
            raise
        _sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {target} ({error.strerror or error}): free some space or choose "
            "another place. What was saved there before is untouched."
        ) from error
    return sum(len(part) for part in parts)


def read(path: str | os.PathLike[str]) -> Tree:
    """The tree in a file; its tensors are on the CPU.

    Raises:
        CheckpointError: when the file is not there, is none of ours, is cut short or damaged, or is of a version
            that cannot be read, with the reason.
    """
    target = Path(path)
    try:
        content = bytearray(target.read_bytes())
    except IsADirectoryError as error:
        raise CheckpointError(f"{target} is a folder; give a checkpoint file, or resume the folder.") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {target}.") from error
    except OSError as error:
        raise CheckpointError(f"{target} cannot be read ({error.strerror or error}).") from error
    header, start = _header(target, content)
    version, tensors = _checked(target, content, header, start)
    try:
        document = json.loads(tensors.pop(_DOCUMENT).numpy().tobytes())
        tree = join(document, tensors)
    except EgeriaLabError as error:
        raise CheckpointError(f"{target} cannot be used: {error}") from error
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"{target} holds a document that cannot be read ({type(error).__name__}).") from error
    return _migrated(target, tree, version)


def _encoded(tree: Tree) -> Iterator[bytes | memoryview]:
    document, tensors = split(tree)
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    text = json.dumps(document, separators=(",", ":")).encode()
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": str(VERSION)}}
    blocks: list[bytes | memoryview] = []
    end = 0

    def add(name: str, dtype: str, shape: list[int], block: bytes | memoryview) -> None:
        nonlocal end
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(block)]}
        end += len(block)
        blocks.append(block)

    for name, tensor in ordered:
        add(f"tensors/{name}", _name_of(name, tensor), list(tensor.shape), _bytes_of(tensor))
    add(_DOCUMENT, "U8", [len(text)], text)
    add(_CHECKSUM, "U8", [_DIGEST_BYTES], bytes(_DIGEST_BYTES))
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    checksum = hashlib.sha256()
    for block in (len(head).to_bytes(8, "little"), head, *blocks[:-1]):
        checksum.update(block)
        yield block
    yield checksum.digest()


def _name_of(name: str, tensor: Tensor) -> str:
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise CheckpointError(
            f"{name} is a tensor of {str(tensor.dtype).removeprefix('torch.')} ({tensor.layout}), which a checkpoint "
            "cannot hold; keep it outside the model and the optimizer."
        )
    return _NAMES[tensor.dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _write_whole(path: Path, parts: list[bytes | memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
    try:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[os.write(descriptor, view[:_CHUNK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    """Make a rename last through a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _header(path: Path, content: bytearray) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(content[:8], "little")
    foreign = CheckpointError(
        f"{path} is no checkpoint of egeria_lab. (Files of torch.save are not read: they can carry code.)"
    )
    if len(content) < 8 or length > _MOST_HEADER_BYTES:
        raise foreign
    if 8 + length > len(content):
        raise foreign if b'"__metadata__"' not in content[:64] else _cut_short(path, len(content), 8 + length)
    try:
        header = json.loads(bytes(content[8 : 8 + length]))
        known = header["__metadata__"]["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise foreign from error
    if not known:
        raise foreign
    return header, 8 + length


def _cut_short(path: Path, there: int, whole: int) -> CheckpointError:
    return CheckpointError(f"{path} is cut short ({there:,} of {whole:,} bytes are there); take another checkpoint.")


def _checked(path: Path, content: bytearray, header: dict[str, Any], start: int) -> tuple[int, dict[str, Tensor]]:
    damaged = CheckpointError(f"{path} is damaged: its checksum is not that of its content; take another checkpoint.")
    try:
        version = int(header["__metadata__"]["version"])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        whole = start + max(int(entry["data_offsets"][1]) for entry in entries.values())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise damaged from error
    if len(content) < whole:
        raise _cut_short(path, len(content), whole)
    digest = hashlib.sha256(memoryview(content)[:-_DIGEST_BYTES]).digest()
    if len(content) != whole or digest != bytes(content[-_DIGEST_BYTES:]):
        raise damaged
    if version > VERSION:
        raise CheckpointError(
            f"{path} was written by a newer version of egeria_lab (format {version}, this one reads up to {VERSION}); "
            "install that version."
        )
    try:
        tensors = {name: _tensor(content, start, entry) for name, entry in entries.items()}
        document = tensors[_DOCUMENT]
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, OverflowError) as error:
        raise damaged from error
    named = {name.removeprefix("tensors/"): x for name, x in tensors.items() if name.startswith("tensors/")}
    return version, {**named, _DOCUMENT: document}


def _tensor(content: bytearray, start: int, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    begin, end = (int(edge) for edge in entry["data_offsets"])
    count = 1
    for size in shape:
        count *= size
    inside = 0 <= begin <= end <= len(content) - start and all(size >= 0 for size in shape)
    if not inside or count * dtype.itemsize != end - begin:
        raise ValueError("a tensor does not fit its place")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    block = bytearray(memoryview(content)[start + begin : start + end])  # of its own: aligned, and free to change
    return torch.frombuffer(block, dtype=dtype, count=count).reshape(shape)


def _migrated(path: Path, tree: Tree, version: int) -> Tree:
    while version < VERSION:
        if version not in MIGRATIONS:
            raise CheckpointError(
                f"{path} was written by an older version of egeria_lab (format {version}) whose checkpoints cannot be "
                f"continued by this one (format {VERSION}); finish that run with the version that began it."
            )
        tree, version = MIGRATIONS[version](tree), version + 1
    return tree
