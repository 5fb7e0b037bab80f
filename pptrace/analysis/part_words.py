"""Words for the causes and parts of a step, all of them: for the sentence, tables, pictures and findings."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.result import StepReport
from pptrace.analysis.stragglers.alike import LONG_OPS, SLOW_RANK
from pptrace.analysis.stragglers.communication import LATE_MEMBER, LATE_RECEIVES, SLOW_LINK
from pptrace.analysis.stragglers.hosts import GARBAGE_COLLECTION, LATE_LAUNCHES, LATE_OP, LATE_START, PAUSES
from pptrace.analysis.stragglers.sequences import LONG_SEQUENCES
from pptrace.analysis.whole_run import EARLY_RECEIVES, INTERACTION, LATE_OPS, OUTSIDE, UNEQUAL_ROUTES

NOT_HIDDEN = "communication that no compute hides"
RECORD_ALL_RANKS = "record all ranks (the profiler on each; pptrace run: --profile-ranks all)"


class PartWords(Struct, frozen=True):
    """``label`` heads a row or a bar, ``phrase`` is the part in a sentence; ``detail`` says more, "" if there is no more.
    ``advice`` is what to do about it first, behind which the verdict sets ": saves …": it has no colon. Of a cause that may be a
    finding, ``takes`` says where a share of the step goes to, ``takes_at`` the same where most of it is at one place, and
    ``look`` is the finding's advice.
    """

    label: str
    phrase: str
    detail: str = ""
    advice: str = ""
    takes: str = ""
    takes_at: str = ""
    look: str = ""


WORDS: Mapping[str, PartWords] = {
    "compute": PartWords("compute", "compute", "what ops usually take, spread evenly over the ranks"),
    "structural": PartWords("structural", "the fill and drain of the schedule", "ops of a kind at one cost"),
    "imbalance": PartWords(
        "imbalance",
        "stages of unequal cost",
        advice="move layers away from the slowest stage",
        takes="goes to stages of unequal cost",
        takes_at="goes to {place}, which costs more than the others",
        look="the slowest stage sets the pace; move layers away from it (embedding and head count too)",
    ),
    "straggler": PartWords(
        "straggler",
        "ranks slower than their replicas",
        advice="look at the slow rank's host, clocks, neighbours and length of inputs",
        takes="is lost to ranks that are slower than their replicas",
        takes_at="is lost to {place}, which is slower than its replicas",
        look="other ranks run the same stage faster: look at this one's host, clocks, neighbours and length of inputs",
    ),
    "jitter": PartWords(
        "jitter",
        "ops that vary",
        advice="look for noise on the hosts, clock throttling and sequences of uneven length",
        takes="goes to ops of one stage that vary",
        takes_at="goes to ops of one stage that vary, most of them on {place}",
        look="look for noise on the host, clock throttling or sequences of uneven length",
    ),
    "communication": PartWords(
        "communication",
        "exposed communication",
        advice="overlap it with compute, or send fewer bytes",
        takes=f"goes to {NOT_HIDDEN}",
        look="overlap it with compute, or send fewer bytes",
    ),
    "host": PartWords(
        "host",
        "devices waiting for launches",
        advice="launch less and earlier (CUDA graphs or torch.compile, less Python between ops)",
        takes="is device idle time because hosts launch too late",
        takes_at="is device idle time because hosts launch too late, most of it on {place}",
        look="launch less and earlier: CUDA graphs or torch.compile, fewer and larger kernels, less Python between ops",
    ),
    LATE_OPS: PartWords(
        "host",
        "ops that begin late",
        "their inputs were there",
        "look at the Python between ops, sleeps and locks too, and at other work on the machine's cores",
        takes="goes to ops that begin late though their inputs are there",
        takes_at="goes to ops of {place} that begin late though their inputs are there",
        look="look at the Python between ops, sleeps and locks too, and at other work on the machine's cores",
    ),
    LATE_MEMBER: PartWords(
        "late member",
        "collectives waiting for one rank",
        advice="look at that rank's host, clocks and neighbours",
    ),
    LONG_OPS: PartWords(
        "long ops",
        "single ops far longer than usual",
        advice="look for noise on the hosts, clock throttling, warm-up and sequences of uneven length",
    ),
    PAUSES: PartWords(
        "pauses",
        "hosts that stand still now and then",
        advice="look at what that host does then (garbage collection, input, checkpoints, logging)",
    ),
    LATE_START: PartWords(
        "late start",
        "steps that begin late",
        advice="look at what that host does between steps (input, checkpoints, logging)",
    ),
    LATE_OP: PartWords(
        "late op",
        "the same ops late in each step",
        advice="look at what that host does before them (input, evaluation, logging between calls of the schedule)",
    ),
    LATE_LAUNCHES: PartWords(
        "late ops",
        "ops of one rank that begin late",
        advice="look at the Python between ops there, and at other processes on that host",
    ),
    SLOW_RANK: PartWords("slow rank", "a slow rank", advice="look at that rank's host, clocks and neighbours"),
    # Of these reasons the findings' titles are made where they are found (stragglers/), of a link what to do about it too.
    SLOW_LINK: PartWords("slow link", "slow link"),
    UNEQUAL_ROUTES: PartWords(
        "unequal routes",
        "experts with more rows than others",
        advice="balance the routes (auxiliary loss, bias, capacity), or spread the experts that are chosen often",
    ),
    GARBAGE_COLLECTION: PartWords(
        "garbage collection",
        "Python's garbage collection",
        advice="collect garbage on all ranks at once between steps (gc.disable, gc.collect, gc.freeze)",
    ),
    LONG_SEQUENCES: PartWords(
        "long sequences",
        "microbatches of unequal work",
        advice="make microbatches of equal work (pack or sort sequences)",
    ),
    LATE_RECEIVES: PartWords(
        "late receives",
        "receive kernels that run on after the send",
        advice="look at the network, and at what else the receivers' devices run",
    ),
    EARLY_RECEIVES: PartWords(
        "early receives",
        "receives posted before their sender can send",
        "what was posted behind them waited",
        advice="post receives later, as `pptrace whatif --repair-order` orders them",
    ),
    INTERACTION: PartWords(
        "interaction",
        "shared by several causes",
        "comes back only without several",
        advice="see why the ops of that stage take longer, in what stages compute",
    ),
    "unexplained": PartWords(
        "unexplained",
        "unexplained",
        "what neither ops nor transfers show",
        takes="is spent in neither ops nor transfers",
        look=(
            "between ops the ranks did something that no mark covers: launching, Python, waiting for a late receive, messages "
            "that were not recorded; on devices also copies, gaps between kernels that had been launched in time, and what "
            "other processes run on the same device"
        ),
    ),
}
OUTSIDE_WORDS: Mapping[str, tuple[str, str]] = {
    "gradient_sync": (
        "gradient sums that nothing hides",
        "overlap it with the backward (Megatron-LM: --overlap-grad-reduce; DDP does), reduce in lower precision",
    ),
    "parameter_gather": (
        "parameter gathers that nothing hides",
        "overlap it with the next forward (Megatron-LM: --overlap-param-gather; FSDP: prefetching)",
    ),
    "optimizer": ("optimizer", "a fused optimizer"),
    "data": (
        "loading of data",
        "have the next batch ready before its step begins: more workers (num_workers), prefetching, pinned memory, caches",
    ),
    "barrier": ("barrier", "take it out of the loop"),
    "evaluation": ("evaluation", "evaluate less often, or with fewer batches"),
    "checkpoint": ("checkpoint", "write it while training goes on (asynchronous checkpoints), or less often"),
    "logging": ("logging", "log less often; reading a loss (.item()) waits for the device"),
    "garbage_collection": (
        "garbage collection between pipelines",
        "gc.freeze() after the set-up, and collect by hand every many steps",
    ),
    "communication": ("communication between pipelines", "overlap it with compute, or send fewer bytes"),
    "host": (
        "devices waiting for launches between pipelines",
        "launch less and earlier: CUDA graphs or torch.compile, a fused optimizer, less Python between steps",
    ),
    "compute": (
        "compute between pipelines",
        "look at what is computed between pipelines: metrics, clipping, copies",
    ),
    "other": (
        "time between pipelines that no range names",
        "look at what it does between steps: input, logging, checkpoints; pptrace.mark names what no range does",
    ),
    "unrecorded_ranks": (
        "waiting for ranks that are not recorded",
        f"why they come late, and what is won without it, only their traces tell: {RECORD_ALL_RANKS}",
    ),
    "unknown_rank": (
        "waiting for a rank that is not known",
        "these calls have no match in other traces, so that who comes late, and what is won without it, is not known",
    ),
    "overlap": ("pipelines of two steps at once", ""),
}
"""(name, advice) of the parts outside the pipeline; "" of one that is no finding."""
SPREAD_STATE = "its state spread over the replicas (ZeRO, --use-distributed-optimizer)"
"""Further advice on the optimizer where each of several replicas updates all that the others do."""


IDLE_WORDS: Mapping[str, PartWords] = {
    "DATA": PartWords("data", "loading of data", advice=OUTSIDE_WORDS["data"][1], takes="load data"),
    "CHECKPOINT": PartWords(
        "checkpoint", "checkpoint", advice=OUTSIDE_WORDS["checkpoint"][1], takes="write a checkpoint"
    ),
    "LOGGING": PartWords("logging", "logging", advice=OUTSIDE_WORDS["logging"][1], takes="log"),
    "GC": PartWords(
        GARBAGE_COLLECTION,
        GARBAGE_COLLECTION,
        advice=OUTSIDE_WORDS["garbage_collection"][1],
        takes="collect garbage",
    ),
    "EVAL": PartWords("evaluation", "evaluation", advice=OUTSIDE_WORDS["evaluation"][1], takes="evaluate"),
    "GRAD_SYNC": PartWords(
        "gradient sync",
        "the schedule's own reduction of gradients",
        advice="reduce in lower precision; of one replica alone it only copies them: no FSDP or DDP around its stages",
        takes="reduce gradients, as the schedule has them do",
    ),
}
"""Words for what hosts do in ranges of these kinds while their ranks, in steps without a pipeline, have nothing else to do, but
for evaluations, which compute; the label is the cause of its finding.
"""


def words_of_part(step: StepReport, name: str) -> PartWords:
    """The words for a part of a step, as :attr:`StepReport.parts` names it; the name itself of anything else."""
    if name.startswith(OUTSIDE) and (outside := OUTSIDE_WORDS.get(name.removeprefix(OUTSIDE))):
        return PartWords(name.replace("_", " "), *outside[:1])
    if name in _NEGATIVE and (step.parts or {}).get(name, 0) < 0:
        return replace(WORDS[name], detail=_NEGATIVE[name])
    return WORDS.get(LATE_OPS if name == "host" and not step.has_devices else name, PartWords(name, name))


_NEGATIVE = {
    INTERACTION: "counted in several causes",
    "unexplained": "the replay is longer than the run was: times that overlapped in the run follow one another in it",
}
"""The reason why a part is below zero."""


def cause_of_part(step: StepReport, name: str) -> str:
    """The cause that a part belongs to: of a reason its own."""
    return next((cause.cause for cause in step.causes or () if cause.reason == name), name)


def place_of_part(step: StepReport, name: str) -> str:
    """Place of nearly all of a part that has a reason or is outside the pipeline, in brackets; "" if it has none."""
    found = [(cause.where, cause.ns) for cause in step.causes or () if cause.reason == name]
    found += [(part.where, part.ns) for part in step.outside or () if f"{OUTSIDE}{part.part}" == name]
    if not found:
        return ""
    where, most = max(found, key=lambda entry: entry[1])
    return in_brackets(where) if most >= _NEARLY_ALL * sum(ns for _, ns in found) else ""


_NEARLY_ALL = 0.8


def in_brackets(where: Mapping[str, int | str]) -> str:
    """A place in brackets, with a blank before them; "" if nowhere."""
    places = ", ".join(f"{kind} {name}" for kind, name in where.items())
    return f" ({places})" if places else ""


SLOW_RANK_ALIKE = "; a slow rank would look the same: there is one pipeline"
"""End of a finding about a stage where there is one pipeline, and no replica to compare a rank with."""
