"""The command line. Nothing here imports torch before a command needs it, so `packhorse --help` answers at once.

No option may be the beginning of one of torchrun's (say `--m`): torchrun takes it as its own, even after the script's name.
"""

import io
import json
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from packhorse.cli.benches import NAMES, run_bench
from packhorse.cli.ckpt import app as ckpt_app
from packhorse.cli.said import said_by_another
from packhorse.errors import UserError
from packhorse.reproduce import NAMES as REPRODUCTIONS
from packhorse.reproduce import run_reproduction

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train models bigger than your memory: one captured training step, planned to the byte, then run exactly as planned.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file with the settings of a run")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="override a setting; may be repeated")]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", help="plan for N ranks, without starting them: mesh.dp = N / mesh.tp")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
app.add_typer(ckpt_app, name="ckpt")


@app.command()
def plan(
    config: ConfigPath,
    gpus: Gpus = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="look for the fastest strategy on N of these, such as v100-dgx2")] = None,
    given: Annotated[bool, typer.Option("--given", help="with --device: price the strategy of CONFIG alone")] = False,
    min_gpus: Annotated[bool, typer.Option("--min-gpus", help="with --device: the fewest that will do, in powers of two")] = False,
    max_seq: Annotated[bool, typer.Option("--max-seq", help="with --device: the longest samples that fit, in doublings")] = False,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="with --device: the most samples a rank that fit, in doublings")] = False,
    tokens: Annotated[float | None, typer.Option(metavar="COUNT", help="with --device: days and device-hours for so many tokens")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the memory ledger of one training step, without training; with --device, how best to lay it over many devices."""
    if device is not None:
        _print_search(config, overrides or [], gpus, device, given, min_gpus, max_seq, max_batch, tokens, as_json)
        return
    if given or min_gpus or max_seq or max_batch or tokens is not None:
        raise UserError("--given, --min-gpus, --max-seq, --max-batch and --tokens are about a device: give --device NAME too")
    from packhorse.cli.planned import config_of, largest_peak, plan_of, sizes_of
    from packhorse.train.fits import fit_line, free_bytes
    from packhorse.units import format_bytes

    made = plan_of(config, overrides or [], gpus)
    if as_json:
        typer.echo(json.dumps(made.to_dict()))
        return
    typer.echo(f"{sizes_of(config, overrides or [], gpus)}\n{made}")
    settings = config_of(config, overrides or [], gpus)
    num_ranks, peak = settings.ranks.world_size, made.peak_bytes
    if num_ranks > 1:
        rank, peak, planned = largest_peak(settings)
        looked_at = f"all {num_ranks} ranks" if planned == num_ranks else f"{planned} of the {num_ranks} ranks"
        typer.echo(f"this is rank 0; of {looked_at} " + (f"rank {rank} needs the most: {format_bytes(peak)}" if rank else "none needs more"))
    typer.echo(fit_line(peak, free_bytes(), num_ranks))


def _print_search(
    config: Path,
    overrides: list[str],
    gpus: int | None,
    device: str,
    given: bool,
    min_gpus: bool,
    max_seq: bool,
    max_batch: bool,
    tokens: float | None,
    as_json: bool,
) -> None:
    from packhorse.cli.searched import fewest_ranks, figures, largest_batch, longest, searched, told

    def say(text: str) -> None:
        if sys.stderr.isatty():
            typer.echo(text, err=True)

    if min_gpus and (given or gpus is not None):
        raise UserError("--min-gpus looks for the number of devices and tries every strategy: leave --gpus and --given out")
    if min_gpus:
        num_ranks, settings, short, answer = fewest_ranks(config, overrides, device, say)
    else:
        num_ranks = 1 if gpus is None else gpus
        settings, short, answer = searched(config, overrides, num_ranks, device, given, say)
    found = figures(answer, settings.data.seq_len, tokens, num_ranks) | {"num_ranks": num_ranks}
    lines = [told(settings, short, answer, num_ranks, tokens)]
    if answer.best is not None and max_batch:
        found["max_samples"] = largest_batch(short, answer.best.strategy)
        lines.append(f"most samples a rank with this strategy: {found['max_samples']}")
    if answer.best is not None and max_seq:
        found["max_seq_len"] = longest(settings, answer.best.strategy, short.device, say)
        lines.append(f"longest samples with this strategy, one a rank: {found['max_seq_len']} tokens")
    typer.echo(json.dumps(found) if as_json else "\n".join(lines))
    raise typer.Exit(0 if answer.best is not None else 1)


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(help="auto (newest checkpoint, or afresh), none, or a checkpoint's path")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="the same as --set run.tensorboard=true")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="the same as --set run.wandb=true")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="plan and print everything, train and write nothing")] = False,
    trace_nan: Annotated[bool, typer.Option("--trace-nan", help="name the module where a loss that is not finite begins")] = False,
    as_json: AsJson = False,
) -> None:
    """Train, with the settings of CONFIG. SIGTERM or Ctrl-C saves at the end of the step."""
    from packhorse.train.config_file import load_config

    given = list(overrides or []) + ([f"run.resume={json.dumps(resume)}"] if resume is not None else [])
    given += [f"run.{key}=true" for key, asked in (("tensorboard", tensorboard), ("wandb", wandb)) if asked]
    settings = load_config(config, given)

    import packhorse
    from packhorse.train.console import Console
    from packhorse.train.engine import Engine
    from packhorse.train.start import train as train_config

    console = Console(sys.stdout, as_json=as_json)
    raise typer.Exit(train_config(settings, engine=cast(Engine, packhorse), console=console, dry_run=dry_run, trace_nan=trace_nan))


@app.command()
def explain(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="folder of a run, or a TOML file")],
    stage: Annotated[str, typer.Option("--stage", help="graph, plan or program")] = "plan",
    gpus: Gpus = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print one stage of the pipeline: what was captured, what was decided, or what runs."""
    from packhorse.cli.planned import plan_of
    from packhorse.program.explain import STAGES
    from packhorse.program.explain import explain as explain_plan

    if stage not in STAGES:
        raise UserError(f"--stage is {stage!r}, expected one of {', '.join(STAGES)}")
    text = explain_plan(plan_of(source, overrides or [], gpus), stage)
    typer.echo(json.dumps({"stage": stage, "text": text}) if as_json else text)


@app.command()
def report(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="folder of a run, or a TOML file")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="without it report.html, in the folder of the run or here")] = None,
    gpus: Gpus = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page that opens offline: bytes over the step by category, the arena as time x offset, what is made again."""
    from packhorse.cli.planned import plan_of, sizes_of
    from packhorse.report.measured import measured_of
    from packhorse.report.page import check_target, write_report

    target = out or (source if source.is_dir() else Path()) / "report.html"
    check_target(target)
    title = f"packhorse: {sizes_of(source, overrides or [], gpus)}"
    measured = measured_of(source) if source.is_dir() and not overrides and gpus is None else None  # of this very plan
    made = write_report(plan_of(source, overrides or [], gpus), target, title, measured)
    typer.echo(json.dumps({"path": str(made), "bytes": made.stat().st_size}) if as_json else str(made))


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="what the model continues")],
    tokens: Annotated[int, typer.Option(help="how many tokens at most")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws as the model says, more is wilder")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="draw from so many of the likeliest tokens only")] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 1,
    checkpoint: Annotated[Path | None, typer.Option(metavar="PATH", help="which checkpoint; the newest whole one without it")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with the model of a run."""
    from packhorse.train.sample import load_writer, printable, write

    writer = load_writer(run, checkpoint=checkpoint, overrides=overrides or [], say=lambda text: typer.echo(text, err=True))
    pieces = write(writer, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        facts = {"checkpoint": str(writer.checkpoint), "step": writer.step, "seed": seed, "temperature": temperature, "top_k": top_k}
        typer.echo(json.dumps({"text": "".join(pieces), "prompt": prompt} | facts))
        return
    typer.echo(f"{writer.checkpoint}, seed {seed}", err=True)
    for piece in pieces:
        typer.echo(printable(piece), nl=False)
    typer.echo()


@app.command("config")
def show_config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file; without it all defaults")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print every setting with its meaning, as a TOML file to begin from."""
    from packhorse.train.config import Config
    from packhorse.train.config_file import format_config, load_config

    settings = Config() if config is None else load_config(config, overrides or [])
    typer.echo(json.dumps(settings.to_dict()) if as_json else format_config(settings, explained=True))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Print what matters about this machine, to read or to paste into a report."""
    from packhorse.cli.doctor import describe_machine

    facts = describe_machine()
    typer.echo(json.dumps(facts) if as_json else "\n".join(f"{name:<18}{value}" for name, value in facts.items()))


@app.command()
def calibrate(
    write: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="the device file to write; without it nothing is written")] = None,
    threads: Annotated[int | None, typer.Option(help="threads to compute with; as torch has it without")] = None,
    ranks: Annotated[int | None, typer.Option(help="measure collectives between so many processes of this machine too")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what operators take on this machine (about a minute): seconds a call, a byte, a flop, for plans that recompute."""
    from packhorse.bench.calibrate import run

    raise typer.Exit(run(write, threads, ranks, as_json=as_json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=", ".join(NAMES))],
    as_json: AsJson = False,
) -> None:
    """Run a benchmark. What follows NAME goes to the benchmark itself."""
    raise typer.Exit(run_bench(name, context.args, as_json=as_json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=", ".join(REPRODUCTIONS))],
    as_json: AsJson = False,
) -> None:
    """Reproduce a paper's figures; exit code 1 if one is out of tolerance. What follows NAME goes to the reproduction itself."""
    raise typer.Exit(run_reproduction(name, context.args, as_json=as_json))


def main() -> None:
    """Entry point: a user's error is one paragraph on stderr and exit code 2, without a traceback. Of several ranks one says it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a plot must not end a run whose terminal speaks ASCII
    try:
        app()
    except UserError as error:
        if not said_by_another(error):
            print(f"packhorse: {error}", file=sys.stderr)
        sys.exit(2)
