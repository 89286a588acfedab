"""Ranks of a mesh as threads of one process: what they hold of a model and its optimizer, filled and saved by the code that real ones run."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier as Meeting
from threading import BrokenBarrierError
from types import SimpleNamespace

import torch
from torch import nn

from packhorse.capture.flat_storage import Widths, flat_storage
from packhorse.graph.ir import Graph, Input, Output, Value
from packhorse.parallel.partition import Partition
from packhorse.parallel.split import Sharding
from packhorse.runtime.held import numbers, pieces, stacked
from packhorse.runtime.job import Job, group_structure
from packhorse.runtime.parts import cut_out
from packhorse.runtime.sharded import gathered, own_runs, spread_model
from packhorse.runtime.storage import view
from packhorse.runtime.transport import memory_order

CPU = torch.device("cpu")


class Ranks:
    """The same calls as of packhorse.runtime.ranks.Ranks."""

    def __init__(self, mesh, rank, meeting, table):
        self.mesh, self.rank, self.device, self.meeting, self.table = mesh, rank, CPU, meeting, table

    def exchange(self, own):
        self.table[self.rank] = own
        self.meeting.wait()
        found = list(self.table)
        self.meeting.wait()
        return found

    def all_gather(self, own, tag, axis="world"):
        group = next(group for group in self.mesh.groups(axis) if self.rank in group)
        if len(group) == 1:
            return own.reshape(1, -1)
        everyone = self.exchange(own.clone())
        return torch.stack([everyone[rank] for rank in group])

    def broadcast(self, tensor):
        tensor.copy_(self.exchange(tensor.clone())[0])

    def texts(self, own, tag):
        return self.exchange(own)


def on_mesh(mesh, work):
    """What work(ranks) returns on every rank; the first error that is not one of another's making."""
    meeting, table = Meeting(mesh.world_size, timeout=30), [None] * mesh.world_size

    def one(rank):
        try:
            return work(Ranks(mesh, rank, meeting, table))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(mesh.world_size) as pool:
        jobs = [pool.submit(one, rank) for rank in range(mesh.world_size)]
    errors = [job.exception() for job in jobs if job.exception()]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [job.result() for job in jobs]


class Model(nn.Module):
    """The tensors, in their own memory layouts, as parameters; and one buffer."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))
        self.register_buffer("seen", torch.arange(3.0))


class Rank:
    """What one rank holds. values: name -> parameter; splits: those that are cut; states: name -> (exp_avg, exp_avg_sq, steps taken)."""

    def __init__(self, ranks, stage, values, splits, states, precision=None):
        mesh = ranks.mesh
        self.ranks = ranks
        self.model = Model({name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v) for name, v in values.items()})
        names = list(values)
        groups = [[p for name, p in self.model.named_parameters() if names.index(name) % 2 == odd] for odd in (0, 1)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups if group])
        for name, (first, second, steps) in states.items():
            optimizer.state[getattr(self.model, name)] = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(float(steps))}
        self.units = {name: f"unit.{index // 2}" for index, name in enumerate(names)}
        partition = Partition(stage, mesh.dp, mesh.dp_rank(ranks.rank), self.units)
        sharding = Sharding(mesh.tp, mesh.tp_rank(ranks.rank), splits) if mesh.tp > 1 else None
        inputs = Input(Value("loss", "f32", (), ()), "constant", "seed"), *(Input(Value(name, "f32", (), ()), "batch", name) for name in names)
        micro = Graph("first", inputs, (), (Output("loss", "metric", "loss"), *(Output(name, "grad", name) for name in names)))
        captured = SimpleNamespace(micro=micro, trained=lambda: set(names))
        widths = Widths(precision)
        self.persistent, _ = flat_storage(self.model, optimizer, captured, None, widths, partition, sharding)
        # as lent runs do, they lie somewhere in a larger piece of memory
        self.runs = {run.name: torch.zeros(64 + run.num_bytes, dtype=torch.uint8)[64:] for run in self.persistent.runs}
        parameters = dict(self.model.named_parameters())
        spread_model(self.model, self.persistent, self.runs, ranks)
        job = Job(optimizer, None, widths, None, None, {}, {}, parameters, (), group_structure(optimizer))
        job.import_optimizer_state(self.persistent, self.runs)

    def training_state(self):
        state = pieces(self.persistent, self.runs, self.units, self.ranks.mesh, self.ranks.rank)
        return state | {name: stacked(held, self.ranks.rank) for name, held in self.numbers().items()}, {}

    def load_training_state(self, tensors, meta):
        own, _ = self.training_state()
        for name, piece in own.items():
            piece.take(tensors[name])
        for name, held in self.numbers().items():
            for number, saved in zip(held, own[name].held):
                number.copy_(saved)

    def numbers(self):
        return numbers(self.persistent, self.runs, self.units)

    def whole(self):
        """name -> the parameter, from what all ranks hold."""
        return {name: tensor.clone() for name, tensor in gathered(self.runs, own_runs(self.persistent), self.ranks)}

    def padding(self):
        """Every element that belongs to no tensor: what lies in a part where a plain copy of ones and zeros has zeros."""
        found = []
        for run in self.persistent.runs:
            for slot in run.slots:
                if slot.part is not None:
                    ones = cut_out(torch.ones(slot.part.shape), slot.part)[slot.begin :]
                    held = memory_order(view(self.runs[run.name], slot))
                    found.append(held[ones[: held.numel()] == 0].float())
        return torch.cat(found) if found else torch.zeros(0)
