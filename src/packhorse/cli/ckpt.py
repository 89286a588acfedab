"""`packhorse ckpt ...`: what checkpoints there are, whether they are whole, in other files, and models of Hugging Face in and out."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from packhorse.errors import CheckpointError

app = typer.Typer(no_args_is_help=True, help="List, verify, reshard and convert checkpoints.")

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Checkpoint = Annotated[Path | None, typer.Option(metavar="PATH", help="which checkpoint; the newest whole one without it")]
_ROW = "{:<20}  {:>11}  {:<16}  {:<5}  {:>8}  {:>10}"


@app.command("ls")
def list_checkpoints(
    folder: Annotated[Path, typer.Argument(metavar="RUN_OR_FOLDER", help="folder of a run, or a folder of checkpoints")], as_json: AsJson = False
) -> None:
    """List checkpoints, oldest first. Every byte is read to say whether they are whole."""
    from packhorse.checkpoint.inspect import checkpoints_in, inspect
    from packhorse.units import format_bytes

    found, losses = checkpoints_in(folder), _losses(folder)
    rows: list[dict[str, Any]] = []
    if not as_json:
        typer.echo(_ROW.format("checkpoint", "bytes", "saved", "whole", "loss", "validation") if found else f"no checkpoints in {folder}")
    for path in found:
        seen = inspect(path)
        loss = losses.get(seen.step, {}) if seen.step is not None else {}
        rows.append(seen.to_dict() | {"loss": loss.get("step"), "validation_loss": loss.get("eval")})
        if not as_json:
            saved = "-" if seen.saved_s is None else datetime.fromtimestamp(seen.saved_s).strftime("%Y-%m-%d %H:%M")
            shown = ("-" if loss.get(kind) is None else f"{loss[kind]:.4f}" for kind in ("step", "eval"))
            typer.echo(_ROW.format(path.name, format_bytes(seen.num_bytes), saved, "no" if seen.damage else "yes", *shown))
    if as_json:
        typer.echo(json.dumps(rows))


@app.command()
def verify(paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="checkpoints, or runs")], as_json: AsJson = False) -> None:
    """Read every byte of checkpoints, and of all those of runs. Exit code 2 if one is not whole."""
    from packhorse.checkpoint.inspect import checkpoints_in, inspect, is_checkpoint
    from packhorse.units import format_bytes

    rows, damages = [], []
    for path in (inner for outer in paths for inner in ([outer] if is_checkpoint(outer) else _some(checkpoints_in(outer), outer))):
        seen = inspect(path)
        rows.append(seen.to_dict())
        damages += [seen.damage] if seen.damage else []
        if not as_json:
            typer.echo(f"{path}: {'damaged' if seen.damage else f'whole, {format_bytes(seen.num_bytes)}'}")
    if as_json:
        typer.echo(json.dumps(rows))
    if damages:
        raise CheckpointError(damages[0] if len(rows) == 1 else f"of {len(rows)} checkpoints {len(damages)} not whole, the first: {damages[0]}")


@app.command("reshard")
def reshard_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="a checkpoint, saved by any number of ranks")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="checkpoint to write, which does not exist yet")],
    ranks: Annotated[int, typer.Option(metavar="N", help="as how many ranks would have saved it; 1: one file, every tensor in its shape")],
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as N ranks would have saved it. Any number of ranks loads either."""
    from packhorse.checkpoint.reshard import reshard
    from packhorse.units import format_bytes

    num_bytes = reshard(source, out, ranks)
    typer.echo(
        json.dumps({"source": str(source), "out": str(out), "ranks": ranks, "num_bytes": num_bytes})
        if as_json
        else f"{source} written to {out}: {ranks} file{'s' * (ranks > 1)}, {format_bytes(num_bytes)}"
    )


@app.command("to-hf")
def to_hugging_face(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, or one of its checkpoints")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write, which does not exist yet")],
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a run as a folder that from_pretrained loads."""
    from packhorse.checkpoint.hugging_face import export_run

    run, checkpoint = _run_and_checkpoint(run, checkpoint)
    export_run(run, out, checkpoint=checkpoint, say=lambda text: typer.echo(text, err=as_json))
    if as_json:
        typer.echo(json.dumps({"run": str(run), "out": str(out)}))


@app.command("from-hf")
def from_hugging_face(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of a Hugging Face model: config.json and safetensors")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run to begin")],
    as_json: AsJson = False,
) -> None:
    """Begin a run from a Hugging Face model on this machine."""
    from packhorse.checkpoint.hugging_face import import_folder

    import_folder(folder, run, say=lambda text: typer.echo(text, err=as_json))
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "run": str(run)}))


def _run_and_checkpoint(given: Path, checkpoint: Path | None) -> tuple[Path, Path | None]:
    """The run that `given` is, or that it is a checkpoint of, RUN/checkpoints/step-N, which is then the one to use."""
    from packhorse.checkpoint.inspect import is_checkpoint

    if not is_checkpoint(given) or (given / "config.toml").is_file():
        return given, checkpoint
    run = given.absolute().parent.parent
    if checkpoint is not None or not (run / "config.toml").is_file():
        seen = "and --checkpoint names one too" if checkpoint is not None else "and lies in no run"
        raise CheckpointError(f"{given} is a checkpoint, {seen}; give the folder of the run, and the checkpoint with --checkpoint")
    return run, given


def _losses(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> kind of record -> loss, from the metrics of the run that `folder` is, or lies in."""
    from packhorse.train.metrics import read_metrics

    losses: dict[int, dict[str, float]] = {}
    for record in read_metrics(folder / "metrics.jsonl") or read_metrics(folder.absolute().parent / "metrics.jsonl"):
        losses.setdefault(record["step"], {})[record["kind"]] = record["loss"]
    return losses


def _some(found: list[Path], folder: Path) -> list[Path]:
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoints, so there is nothing to verify; give a checkpoint, or the folder of a run")
    return found
