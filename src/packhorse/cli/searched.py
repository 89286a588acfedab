"""`packhorse plan CONFIG --gpus N --device NAME`: which strategy, and what it takes; nothing of it needs the devices."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from packhorse.capture.flat_storage import widths_of
from packhorse.device.device import Device, load_device
from packhorse.errors import UserError
from packhorse.search.search import Answer, Priced, Within, confirm, doublings, search, usable_bytes
from packhorse.search.short import Short
from packhorse.search.strategy import Strategy
from packhorse.train.build import GRADIENT_DTYPES, build_model, build_optimizer
from packhorse.train.config import Config
from packhorse.train.config_file import load_config
from packhorse.train.task import named

MOST_SAMPLES = 64  # of a micro-batch of one dp rank that a search looks at
_DAY_S = 86400.0


def short_of(config: Config, device: Device, samples: int) -> Short:
    """The model of a configuration, to be planned a few blocks at a time. Raises what building it raises."""
    model = build_model(config, "meta")
    ids = torch.zeros(samples, config.data.seq_len, dtype=torch.int64)
    widths = widths_of(model, config.precision.compute, GRADIENT_DTYPES[config.precision.gradients])
    host = config.memory.host_budget if config.memory.host_budget is not None else device.host_memory_bytes
    plan, sequence = config.mesh.tensor_plan or None, config.mesh.sequence_parallel
    batch = named(config.model, ids, ids.clone())
    return Short(model, batch, build_optimizer(config, model), None, widths, config.optimizer.clip_norm, device, plan, sequence, host)


def searched(
    path: Path, overrides: Iterable[str], num_ranks: int, device: str, given: bool, say: Callable[[str], None]
) -> tuple[Config, Short, Answer]:
    """The search over strategies, or with `given` the one strategy of the configuration alone. Raises ConfigError and what `search` raises."""
    config = load_config(path, [*overrides, "mesh.dp=1"])
    described = load_device(device)
    short = short_of(config, described, max(MOST_SAMPLES, config.data.micro_batch_size))
    if not given:
        return config, short, search(short, Within(num_ranks, doublings(MOST_SAMPLES), usable_bytes(described)), say)
    tp, memory = config.mesh.tp, config.memory
    if num_ranks % tp:
        raise UserError(f"--gpus is {num_ranks}, and mesh.tp = {tp} of them share a model; give a multiple of {tp}, or another mesh.tp")
    if memory.recompute not in ("none", "blocks") or memory.residency == "auto":
        raise UserError(
            f"--given prices the strategy that the configuration names, the same for every block: memory.recompute is {memory.recompute!r} and "
            f"memory.residency {memory.residency!r}; expected none or blocks, and keep, shard or offload (without --given all of them are tried)"
        )
    dp = num_ranks // tp
    stage = config.mesh.zero_stage if dp > 1 else 0
    strategy = Strategy(dp, tp, stage, config.data.micro_batch_size, memory.recompute, memory.residency)
    one = confirm(short, strategy, usable_bytes(described))
    return config, short, Answer(None if one.why else one, (), (one,) if one.why else ())


def told(config: Config, short: Short, answer: Answer, num_ranks: int, tokens: float | None) -> str:
    """What a person reads."""
    seq_len, device = config.data.seq_len, short.device
    lines = [f"{num_ranks} x {device.name}, {usable_bytes(device) / 1e9:.1f} GB usable of each; {short.depth} blocks, {seq_len} tokens a sample"]
    if answer.best is None:
        lines.append("no strategy fits; the nearest reason of each mesh and stage:")
    else:
        lines += _winner(answer.best, seq_len, num_ranks, tokens, device)
        if answer.nearest:
            lines.append("the next ones:")
        for one in answer.nearest:
            assert one.needs is not None
            share = answer.best.samples_per_s / one.samples_per_s
            lines.append(f"  {one.strategy}: {share:.2f} times as long for a token, peak {one.needs.peak / 1e9:.1f} GB")
        if answer.failures:
            lines.append("what does not fit:")
    lines += [f"  dp {f.strategy.dp} x tp {f.strategy.tp}, stage {f.strategy.stage}: {f.why}" for f in answer.failures]
    return "\n".join(lines)


def _winner(best: Priced, seq_len: int, num_ranks: int, tokens: float | None, device: Device) -> list[str]:
    needs = best.needs
    assert needs is not None
    low, high = (needs.seconds * share for share in device.band)
    rate = best.samples_per_s * seq_len
    lines = [
        f"fastest: {best.strategy}",
        f"  peak of rank 0  {needs.peak / 1e9:.2f} GB: model states {needs.persistent / 1e9:.2f}, arena {needs.arena / 1e9:.2f}, kernels' results at "
        f"most {needs.external / 1e9:.2f}" + (f"; on the host {needs.host / 1e9:.2f} GB" if needs.host else ""),
        f"  a step          {needs.seconds:.2f} s ({low:.2f} to {high:.2f}), {needs.sent / 1e9:.1f} GB sent by a rank",
        f"  tokens          {rate:,.0f} a second, {rate / num_ranks:,.0f} for each device; {needs.flops / needs.seconds / 1e12:.1f} TFLOPs, "
        "recomputation included",
    ]
    if tokens is not None:
        days = tokens / rate / _DAY_S
        least, most = (days * share for share in device.band)
        lines.append(f"  {tokens:.3g} tokens   {days:,.1f} days ({least:,.1f} to {most:,.1f}), {days * 24 * num_ranks:,.0f} device-hours")
    return lines


def figures(answer: Answer, seq_len: int, tokens: float | None, num_ranks: int) -> dict[str, Any]:
    """The same as JSON-able values; bytes as integers."""

    def of(one: Priced) -> dict[str, Any]:
        found: dict[str, Any] = {**one.strategy.__dict__, "why": one.why}
        if one.needs is not None:
            found |= {f"{key}_bytes": round(getattr(one.needs, key)) for key in ("peak", "persistent", "arena", "external", "host", "sent")}
            found |= {"seconds": one.needs.seconds, "tokens_per_s": one.samples_per_s * seq_len}
        return found

    best = None if answer.best is None else of(answer.best)
    if best is not None and tokens is not None:
        best["days"] = tokens / best["tokens_per_s"] / _DAY_S
        best["device_hours"] = best["days"] * 24 * num_ranks
    return {"best": best, "nearest": [of(one) for one in answer.nearest], "failures": [of(one) for one in answer.failures]}


def fewest_ranks(path: Path, overrides: list[str], device: str, say: Callable[[str], None], most: int = 1 << 14) -> tuple[int, Config, Short, Answer]:
    """The smallest power of two of devices on which some strategy fits. Raises UserError if `most` are too few, or more than the topology holds."""
    num_ranks = 1
    while True:
        say(f"{num_ranks} devices")
        config, short, answer = searched(path, overrides, num_ranks, device, False, lambda text: None)
        if answer.best is not None:
            return num_ranks, config, short, answer
        num_ranks *= 2
        if num_ranks > most:
            raise UserError(f"--min-gpus: no strategy fits on {most} x {device}; take a smaller model, shorter samples or a larger device")


def longest(config: Config, best: Strategy, device: Device, say: Callable[[str], None]) -> int:
    """The most tokens of a sample, in doublings, that the strategy fits with one sample on each dp rank."""
    seq_len, strategy = config.data.seq_len, replace(best, samples=1)
    while True:
        longer = replace(config, data=replace(config.data, seq_len=2 * seq_len))
        if confirm(short_of(longer, device, 1), strategy, usable_bytes(device)).why:
            return seq_len
        seq_len *= 2
        say(f"{seq_len} tokens fit")


def largest_batch(short: Short, best: Strategy) -> int:
    """The most samples on each dp rank, in doublings, that the strategy fits."""
    samples, usable = best.samples, usable_bytes(short.device)
    while 2 * samples <= short.samples and not confirm(short, replace(best, samples=2 * samples), usable).why:
        samples *= 2
    return samples
