"""`lamina checkpoint inspect | verify | convert | export`: checkpoints looked at and changed without a model."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lamina.checkpoint import converting, folders
from lamina.checkpoint.manifest import Manifest, WholeEntry
from lamina.checkpoint.opening import format_of, open_source
from lamina.checkpoint.source import LaminaSource, Source
from lamina.checkpoint.values import decode
from lamina.errors import CheckpointError, LaminaError, UsageError

Format = Literal["lamina", "torch", "dcp", "hf"]
_OTHERS = {
    "torch": "a file",
    "dcp": "a folder of torch.distributed.checkpoint",
    "hf": "a Hugging Face folder",
    "deepspeed": "a folder of DeepSpeed",
}
_NO_CHECKSUMS = {kind: f"{said}, which has no checksums to compare" for kind, said in _OTHERS.items()}


def main(argv: Sequence[str]) -> int:
    """Run one command; 0 if all is well, 1 if something is wrong with a checkpoint, 2 for a wrong command line."""
    import rich.console
    import tyro

    commands: dict[str, Any] = {"inspect": inspect, "verify": verify, "convert": convert, "export": export}
    try:
        return tyro.extras.subcommand_cli_from_dict(commands, prog="lamina checkpoint", args=list(argv))
    except SystemExit as end:  # help, or arguments that cannot be read
        return end.code if isinstance(end.code, int) else 2
    except LaminaError as error:
        kind, said = type(error).__name__, str(error)
    except OSError as error:  # of the target: what is wrong with a source has been named
        kind, said = "OSError", f"{error.strerror}: {error.filename}" if error.filename is not None else str(error)
    except Exception as error:  # of a format's own library, on files that are not what they say
        kind, said = type(error).__name__, f"{' '.join(str(error).split())[:300]} (`{' '.join(argv)}`)"
    rich.console.Console(stderr=True).print(f"[red]{kind}[/red]: {_plain(said)}", soft_wrap=True)
    return 1


def inspect(path: Path, /, parameters: bool = False) -> int:
    """Show what a checkpoint holds.

    Args:
        path: a checkpoint, or a folder of checkpoints.
        parameters: list every parameter with its shape.
    """
    import rich.console

    console = rich.console.Console()
    if format_of(path) == "lamina" and (found := _inside(path)):
        console.print(_table_of(found))
        return 0
    source, faults = open_source(path), list[str]()
    if isinstance(source, LaminaSource):
        console.print(_summary(path, source.manifest), markup=False, highlight=False, soft_wrap=True)
        faults = folders.faults(source.where, source.manifest)
    else:
        console.print(f"{format_of(path)}, {len(source.tensors)} tensors", highlight=False)
    if parameters:
        console.print(_parameter_table(source))
    if faults:
        raise CheckpointError(f"{path} is not complete: {'; '.join(faults)}")
    return 0


def verify(paths: tuple[Path, ...], /) -> int:
    """Read checkpoints whole and compare every checksum. A folder of checkpoints: all of them, and what is left over.

    Args:
        paths: checkpoints, or folders of checkpoints.
    """
    import rich.console

    if not paths:  # nothing found by a pattern is no success
        raise UsageError("lamina checkpoint verify: give the path of a checkpoint, or of a folder of checkpoints")
    console, wrong = rich.console.Console(), 0
    for path in paths:
        for each in _inside(path) or [path]:
            if (kind := format_of(each)) != "lamina":
                wrong += 1
                console.print(f"[red]unknown[/red] {_plain(str(each))}: {_NO_CHECKSUMS[kind]}", soft_wrap=True)
                continue
            try:
                size_bytes = converting.verify_all(LaminaSource(folders.find(each)))
                console.print(f"[green]whole[/green]   {_plain(str(each))} ({_size(size_bytes)})", soft_wrap=True)
            except CheckpointError as error:
                wrong += 1
                console.print(f"[red]damaged[/red] {_plain(str(each))}: {_plain(str(error))}", soft_wrap=True)
    return 1 if wrong else 0


def convert(source: Path, target: Path, /, to: Format = "lamina") -> int:
    """Write a checkpoint in another format: model, optimizer and extra.

    Args:
        source: a lamina checkpoint, a torch.distributed.checkpoint folder, a file of torch.save, a Hugging Face folder.
        target: a new path.
        to: lamina; torch (one file: model, optimizer, extra); dcp; hf (the model only).
    """
    converting.convert(open_source(source), target, to)
    return 0


def export(source: Path, target: Path, /, dtype: str | None = None, file_bytes: int = 5_000_000_000) -> int:
    """Write the model of a checkpoint as a Hugging Face folder, without a config.

    Args:
        source: a checkpoint of any format that can be read.
        target: a new folder.
        dtype: bf16, fp16, fp32 or fp64; floating tensors are cast to it.
        file_bytes: files are split so that none is larger.
    """
    converting.write_hf(open_source(source), target, dtype=dtype, file_bytes=file_bytes)
    return 0


# -- what is printed


def _inside(path: Path) -> list[Path]:
    """The checkpoints of a folder, complete or not; none if it is a checkpoint itself."""
    if not path.is_dir() or (path / folders.MANIFEST_NAME).exists():
        return []
    return sorted(entry for entry in path.iterdir() if (entry / folders.MANIFEST_NAME).exists())


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _size(size_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError


def _when(manifest: Manifest) -> str:
    return datetime.datetime.fromtimestamp(manifest.created_ns / 1e9).isoformat(" ", "seconds")


def _table_of(paths: Sequence[Path]) -> object:
    import rich.table

    table = rich.table.Table("checkpoint", "written", "ranks", "size", "state")
    for path in paths:
        try:
            manifest = folders.read_manifest(path)
        except CheckpointError:
            table.add_row(path.name, "", "", "", "damaged manifest")
            continue
        state = "hidden" if path.name.startswith(".") else "complete" if folders.complete(path) else "incomplete"
        size = _size(sum(file.size_bytes for file in manifest.files))
        table.add_row(path.name, _when(manifest), str(manifest.world), size, state)
    return table


def _summary(path: Path, manifest: Manifest) -> str:
    by_dtype: Counter[str] = Counter()
    for entry in manifest.parameters.values():
        by_dtype[entry.dtype] += entry.numel
    lines = [
        f"{path}: written {_when(manifest)} by {', '.join(f'{k} {v}' for k, v in manifest.writer.items())}",
        f"from {manifest.strategy} over {manifest.world} ranks, {len(manifest.files)} files, "
        f"{_size(sum(file.size_bytes for file in manifest.files))}",
        f"{len(manifest.parameters)} parameters ("
        + ", ".join(f"{numel:,} elements {dtype}" for dtype, numel in by_dtype.items())
        + f"), {len(manifest.ties)} ties, {len(manifest.buffers)} buffers",
    ]
    if manifest.optimizer is not None:
        optimizer = manifest.optimizer
        keys = sorted({key for s in optimizer.states.values() for key in (*s.split, *s.whole, *s.values)})
        kind = optimizer.kind or "optimizer of no name"
        lines.append(f"{kind}: {len(optimizer.groups)} groups, states {', '.join(keys) or 'none'}")
        lines += [
            f"  group {i}: {len(g.parameters)} parameters, {decode(g.options)}" for i, g in enumerate(optimizer.groups)
        ]
    own = [name for name, entry in manifest.buffers.items() if isinstance(entry, WholeEntry) and entry.file is None]
    lines.append(f"extra {manifest.extra}, random states {'of every rank' if manifest.random else 'none'}")
    if own:
        lines.append(f"buffers of each rank's own: {', '.join(own)}")
    if manifest.pickled:
        lines.append(f"pickled, so that loading runs code: {', '.join(manifest.pickled)}")
    return "\n".join(lines)


def _parameter_table(source: Source) -> object:
    import rich.table

    table = rich.table.Table("name", "shape", "dtype", "pieces")
    for name, stored in source.tensors.items():
        table.add_row(
            _plain(name), str(stored.shape), str(stored.dtype).removeprefix("torch."), str(len(stored.pieces))
        )
    for other, name in source.ties.items():
        table.add_row(_plain(other), f"= {_plain(name)}", "", "")
    return table
