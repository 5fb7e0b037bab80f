"""Functions that the ranks of the pool run, in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from instrument.data.text import Batch, TextData
from instrument.graphed import GraphedStage
from instrument.mesh import Mesh, fit_shape, make_mesh
from instrument.models.gpt import GptStage, cross_entropy
from instrument.models.gpt_config import GptConfig, Recompute, RecomputeMethod, RecomputeModule
from instrument.models.gpt_pipeline import GptPipeline, Wiring, make_gpt_runtime
from instrument.pipeline.megatron_calls import Calls
from instrument.pipeline.p2p import Communicator, Message, TensorSpec
from instrument.pipeline.partition import partition
from instrument.pipeline.runtime import PipelineRuntime
from instrument.pipeline.transport import Mode, make_transport
from instrument.recorder import Recorder
from instrument.route import Route
from instrument.session import Session
from instrument.shared_gpus import let_nccl_share_gpus
from pptrace.marks import SpanKind
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from tests.support.graph_imitation import capturing_on
from tests.support.pool import on_one_rank
from tests.support.profiled import Event, events_of

MICROBATCH_SIZE = 2
SEQUENCE = 4
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One training run, small enough that hundreds fit a minute."""

    schedule: str
    pp: int
    microbatches: int
    dp: int = 1
    chunks: int = 1
    layers: int = 0  # 0: one per stage
    split: tuple[int, ...] | None = None
    tied: bool = False
    mode: Mode = Mode.BATCHED
    negotiated: bool = False
    backend: str = "gloo"  # or "nccl", or "host-staged"
    ahead: int = 0
    calls: Calls = Calls.PLAN
    recompute: Recompute = Recompute.NONE
    method: RecomputeMethod = RecomputeMethod.UNIFORM
    num_layers: int = 1
    modules: tuple[RecomputeModule, ...] = (RecomputeModule.CORE_ATTN,)
    keep: int | None = None  # outstanding microbatches that need not recompute fully
    vocabulary: int = 256
    graphs: bool = False
    rows: tuple[str, ...] = ()  # a plan's cells, rank by rank, in place of the schedule's

    @property
    def wiring(self) -> Wiring:
        device = CPU  # staging works on host tensors too, where there is no GPU
        if self.backend != "gloo" and torch.cuda.is_available():
            device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        route = Route.HOST_STAGED if self.backend == "host-staged" else Route.DIRECT
        return Wiring(device, self.mode, route, self.negotiated, self.ahead, calls=self.calls)

    @property
    def config(self) -> GptConfig:
        layers = self.layers or self.plan.chain_length
        model = GptConfig(layers, hidden=8, heads=2, sequence=SEQUENCE, tied=self.tied, dtype=torch.float64)
        ways = {
            "vocabulary": self.vocabulary,
            "vocabulary_multiple": 128,
            "recompute_method": self.method,
            "recompute_num_layers": self.num_layers,
            "recompute_modules": self.modules,
        }
        return replace(model, recompute=self.recompute, **ways)

    @property
    def plan(self) -> Plan:
        if self.rows:
            return lower(from_rows((row.split() for row in self.rows), self.schedule))
        return lower(build(self.schedule, self.pp, self.microbatches, self.chunks))

    @property
    def cut(self) -> tuple[range, ...]:
        return partition(self.config.layers, self.plan.chain_length, self.split)

    def batch(self, dp_rank: int, step: int = 0) -> Batch:
        return TextData(self.microbatches, MICROBATCH_SIZE, SEQUENCE).batch(step, dp_rank)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one rank in a case. Errors are the largest absolute differences from one process."""

    loss_error: float
    gradient_error: float
    parameters: frozenset[str]
    num_gradients: int
    peak_in_flight: int
    peak_deferred_weight_grads: int


def compare_with_one_process(cases: Sequence[Case]) -> list[Outcome]:
    """Run every case (all of one mesh shape) and compare loss and gradients with one process's."""
    mesh = mesh_of(cases[0])
    return [_compare(case, mesh) for case in cases]


def mesh_of(case: Case) -> Mesh:
    shape = fit_shape(dist.get_world_size(), case.pp, case.dp)
    mirrored = case.plan.num_chains > 1
    if case.wiring.device.type == "cuda":
        torch.cuda.set_device(case.wiring.device)
    if case.backend != "nccl" or not torch.cuda.is_available():
        return make_mesh(shape, "cpu", "gloo", mirrored)
    if torch.cuda.device_count() < shape.world:
        let_nccl_share_gpus(dist.get_rank(), one_node=True)
    return make_mesh(shape, "cuda", "nccl", mirrored)


def runtime_of(case: Case, mesh: Mesh, recorder: Recorder | None = None) -> PipelineRuntime:
    how = {"num_unrecomputed": case.keep, "captures": case.graphs}
    gpt = GptPipeline(case.plan, case.config, case.cut, MICROBATCH_SIZE, **how)
    with capturing_on(case.wiring.device):
        return make_gpt_runtime(mesh, gpt, case.wiring, recorder or Recorder())


def stages_of(runtime: PipelineRuntime) -> list[nn.Module]:
    """The stages of this rank, out of their graphs."""
    return [stage.stage if isinstance(stage, GraphedStage) else stage for stage in runtime.program.stages.values()]


def _compare(case: Case, mesh: Mesh) -> Outcome:
    runtime = runtime_of(case, mesh)
    result = runtime.run(case.batch(mesh.dp_rank).to(case.wiring.device), step=0)
    loss, gradients = reference(case)
    errors = [
        float((parameter.grad.cpu() - gradients[name]).abs().max())
        for stage in stages_of(runtime)
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    ]
    loss_error = 0.0 if result.loss is None else float((result.loss.cpu() - loss).abs())
    names = {name for stage in stages_of(runtime) for name, _ in stage.named_parameters()}
    return Outcome(
        loss_error,
        float(torch.tensor(errors).max()),
        frozenset(names),
        len(errors),
        result.peak_in_flight,
        result.peak_deferred_weight_grads,
    )


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the same model and batch in one process, without any pipeline."""
    return _reference(replace(case.config, recompute=Recompute.NONE), case.microbatches, case.dp)


@on_one_rank
def _reference(config: GptConfig, microbatches: int, dp: int) -> tuple[Tensor, dict[str, Tensor]]:
    model = GptStage(config, range(config.layers))
    if config.tied:
        model.head.projection.weight = model.embedding.tokens.weight
    data = TextData(microbatches, MICROBATCH_SIZE, SEQUENCE)
    batches = [data.batch(0, dp_rank) for dp_rank in range(dp)]
    tokens = torch.cat([batch.tokens.flatten(0, 1) for batch in batches])
    targets = torch.cat([batch.targets.flatten(0, 1) for batch in batches])
    loss = cross_entropy(model(tokens), targets, vocabulary=config.vocabulary)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters(remove_duplicate=False)}
    return loss.detach(), {name: gradient for name, gradient in gradients.items() if gradient is not None}


def train_profiled(case: Case, steps: int) -> list[Event]:
    """Train under PyTorch's profiler; the whole training loop is in the trace."""
    recorder = Recorder()
    mesh = mesh_of(case)
    runtime = runtime_of(case, mesh, recorder)
    optimizer = torch.optim.AdamW(runtime.program.parameters())
    observer = Session(recorder)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in observer.steps(steps):
            with recorder.span(SpanKind.DATA, step):
                batch = case.batch(mesh.dp_rank, step)
            runtime.run(batch, step)
            runtime.optimize(optimizer, step)
    return events_of(profiler)


def outputs_alive(case: Case) -> tuple[list[int], int]:
    """Count the outputs of earlier forwards that still have their data when a forward starts, and those after the step."""
    alive: list[int] = []
    outputs: list[StorageWeakRef] = []

    class Watching(nn.Module):
        def __init__(self, stage: GptStage) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(not output.expired() for output in outputs))
            output: Tensor = self.stage(x)
            outputs.append(StorageWeakRef(output.untyped_storage()))
            return output

    gpt = GptPipeline(case.plan, case.config, case.cut, MICROBATCH_SIZE, Watching)
    runtime = make_gpt_runtime(mesh_of(case), gpt, case.wiring, Recorder())
    runtime.run(case.batch(0), step=0)
    return alive, sum(not output.expired() for output in outputs)


def exchanges(mode: Mode) -> list[list[dict[str, float]]]:
    """The combinations of transfers that Megatron-LM names, on a pipeline of all ranks; what this rank received in each.

    First of shapes that both ends know, then of ones that travel before the tensors.
    """
    mesh = make_mesh(fit_shape(dist.get_world_size()), "cpu", "gloo")
    return [_exchanges(mesh, mode, negotiated) for negotiated in (False, True)]


def _exchanges(mesh: Mesh, mode: Mode, negotiated: bool) -> list[dict[str, float]]:
    plan = lower(build("1f1b", mesh.shape.pp, 1, 1))
    shape = (2, 3, 4)
    spec = TensorSpec(lambda _: [shape], torch.float64, CPU, negotiated)
    p2p = Communicator(mesh, plan, spec, make_transport(mesh, mode, Route.DIRECT, plan, CPU), Recorder())
    stage = mesh.pp_rank

    def call(number: int, *kinds: str) -> dict[str, float]:
        """One exchange of those kinds that have a peer; sends carry 10 · number + stage."""
        actions = [Action(Kind(kind), stage, number) for kind in kinds]
        actions = [action for action in actions if _leads_to_a_stage(plan, action)]
        sent = torch.full(shape, float(10 * number + stage), dtype=torch.float64)
        answers = p2p.exchange([Message(action, (sent,) * action.kind.is_send) for action in actions], 0)
        pairs = zip(actions, answers, strict=True)
        return {str(action.kind): float(tensors[0].mean()) for action, tensors in pairs if tensors is not None}

    seen = [call(0, "RECV_F"), call(0, "SEND_F"), call(1, "RECV_B"), call(1, "SEND_B")]
    seen += [call(2, "SEND_F", "RECV_F"), call(3, "SEND_B", "RECV_B"), call(4, "SEND_F", "SEND_B", "RECV_F", "RECV_B")]
    # The pair that 1F1B's steady phase is made of: one side's call is the other's counterpart.
    pair = [("SEND_F", "RECV_B"), ("SEND_B", "RECV_F")]
    return seen + [call(number, *kinds) for number, kinds in enumerate(pair if stage % 2 == 0 else pair[::-1], 5)]


def _leads_to_a_stage(plan: Plan, action: Action) -> bool:
    to_next = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return (plan.next_stage(action.stage) if to_next else plan.previous_stage(action.stage)) is not None


def mesh_facts() -> dict[str, object]:
    """Groups of a pp=2 × dp=2 mesh as this rank has them."""
    mesh = make_mesh(fit_shape(4, pp=2, dp=2), "cpu", "gloo", mirrored=True)
    groups = {str(axis): (group.group_desc, dist.get_process_group_ranks(group)) for axis, group in mesh.groups.items()}
    if mesh.embedding is not None:
        groups["embd"] = (mesh.embedding.group_desc, dist.get_process_group_ranks(mesh.embedding))
    if mesh.mirror is not None:
        groups["mirror"] = (mesh.mirror.group_desc, dist.get_process_group_ranks(mesh.mirror))
    return {"coordinates": mesh.coordinates, "pp_ranks": mesh.pp_ranks, "groups": groups}


def hang_on_rank_one() -> None:
    """Rank 1 never comes to the barrier."""
    if dist.get_rank() != 1:
        dist.barrier()
    import time

    time.sleep(60)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 raises")
    dist.barrier()


@on_one_rank
def computed_by(_key: str) -> int:
    """The rank that computed it."""
    return dist.get_rank()
