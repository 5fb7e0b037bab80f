"""Process groups → axes, mesh and pipelines; sends matched with receives and members of collectives with each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from pptrace.axes import MESH_ORDER, WITHIN_STAGE
from pptrace.ingest.common.rank_names import ranks_of
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import CALLS, OPS, empty_table
from pptrace.model.traces import Category
from pptrace.recognise.calls.find_calls import find_calls
from pptrace.recognise.groups.axes import Groups, configured_groups, find_groups
from pptrace.recognise.groups.mesh import mesh_with_groups
from pptrace.recognise.groups.topology import (
    Chain,
    Group,
    KeyedCalls,
    axis_of_description,
    call_keys,
    chains_of,
    edges_of,
    exchanges,
    sizes_of,
)
from pptrace.recognise.groups.usage import When
from pptrace.recognise.infer.locate import groups_of as groups_of_ranks
from pptrace.recognise.messages.comms_from_calls import CALL_COMMS
from pptrace.recognise.messages.kernels_from_plan import match_calls
from pptrace.recognise.messages.match import warn_unmatched
from pptrace.recognise.rank import recognise_rank
from tests.recognise.kineto_calls import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AUTOGRAD_THREAD,
    MAIN_THREAD,
    RECV,
    SEND,
    Rank,
)
from tests.support.analysed import recognise
from tests.support.groups import facts_of_groups, group_columns
from tests.support.tables import table_of

REFERENCE = Path(__file__).parents[4] / "shared" / "reference" / "process_group_descriptions.json"
SCATTER = (
    "c10d::_reduce_scatter_base_",
    "_reduce_scatter_base",
    "nccl:_reduce_scatter_base",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)",
)
ENGINE = "autograd::engine::evaluate_function: MmBackward0"
NAMED = {
    "EMBED": "embd",
    "MP": "tp-pp",
    "TP+DP": "tp-dp",
    "TP+CP": "tp-cp",
    "ETP+EP": "etp-ep",
    "ETP+EP+PP": "etp-ep-pp",
}


@pytest.mark.skipif(not REFERENCE.exists(), reason="the list of frameworks' descriptions is not on this machine")
def test_every_listed_description_names_its_axis() -> None:
    for entry in json.loads(REFERENCE.read_text()):
        result = axis_of_description(entry["example"])
        if entry["dim"] in ("WORLD", "UNKNOWN", "by parent"):
            assert result == "", entry["example"]
        elif entry["dim"] == "by dim name":
            assert result == entry["example"].removeprefix("mesh_")
        elif entry["example"] == "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP":
            assert result == "tp-cp-dp-pp"  # listed as DP; parallel_state.py makes it of whole tp-ep-pp groups
        elif "WITH_CP" in entry["example"] and entry["dim"] == "DP":
            assert result == "dp-cp"
        else:
            assert result == NAMED.get(entry["dim"], entry["dim"].lower().replace("+", "-")), entry["example"]


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_dp_shard_cp", "dp-cp"),
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "tp-cp-dp-pp"),
        ("INTER_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "dp"),
        ("mesh_fsdp", "dp"),
        ("mesh_loss_mesh", "dp-cp"),
        ("mesh_tp:split:3", "tp"),
        ("CONTEXT_PARALLEL_GROUP_GLOO", "cp"),
        ("TENSOR_MODEL_PARALLEL_GROUP:split:0", "tp"),
        ("default_pg", ""),
        ("undefined", ""),
        ("", ""),
        ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "etp-ep-pp"),
        ("EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "edp"),
        ("mesh_ep_shard", "edp"),
        ("mesh_of_wires", ""),
        ("PIPELINE", ""),
    ],
)
def test_descriptions_of_meshes_splits_and_strangers(description: str, axis: str) -> None:
    assert axis_of_description(description) == axis


def test_data_parallelism_is_what_context_parallelism_leaves_of_both_together() -> None:
    both, context = Group("1", "DATA_PARALLEL_GROUP_WITH_CP", (), 8), Group("2", "CONTEXT_PARALLEL_GROUP", (), 2)
    assert sizes_of({both: "dp-cp", context: "cp"}, (), 16) == {"cp": 2, "dp": 4}
    assert not {"cp", "dp"} & sizes_of({both: "dp-cp"}, (), 8).keys()
    replicas = Group("3", "mesh_dp_replicate", (0,), 1)
    assert sizes_of({both: "dp-cp", context: "cp", replicas: "dp"}, (), 16) == {"cp": 2, "dp": 4}


def test_a_line_of_messages_has_two_ends() -> None:
    edges = {(0, 1), (1, 2), (3, 2)}
    assert Chain((0, 1, 2, 3), frozenset(edges), True).ends == {0, 3}
    assert Chain((0, 1, 2, 3), frozenset(edges | {(3, 0)}), True).ends == set()
    assert Chain((0, 1, 2, 3, 4), frozenset(edges | {(1, 4), (4, 2)}), True).ends == set()


def test_neighbours_that_train_send_both_ways() -> None:
    edges = {(8, 1), (1, 8), (1, 2)}
    (chain,) = chains_of({Group("1", "", (), -1): edges}, {}, (), {8, 1}, 9)
    assert (chain.ranks, chain.edges, chain.is_whole) == ((1, 8), {(8, 1), (1, 8)}, True)


def test_an_exchange_goes_both_ways_at_once_between_two_or_one_way_around() -> None:
    """Of three ranks that send both ways, as a pipeline's in its middle, it is none."""
    rows = [{"kind": kind, "group_id": "1", "start_ns": 5, "stream": 7, "clock": "device"} for kind in ("send", "recv")]
    table = table_of(CALLS, rows, -1)
    keyed, group = KeyedCalls(table, *call_keys(0, table)), Group("1", "", (), -1)
    for pairs, is_exchange in (
        ({(0, 1), (1, 0)}, True),
        ({(0, 1), (1, 2), (2, 0)}, True),
        ({(0, 1), (1, 0), (1, 2)}, False),
    ):
        assert (exchanges({0: keyed}, {keyed.keys[0]: group}, {group: pairs}) == {group}) is is_exchange
    alone = KeyedCalls(table.iloc[:1], *call_keys(0, table.iloc[:1]))
    assert not exchanges({0: alone}, {keyed.keys[0]: group}, {group: {(0, 1), (1, 0)}})
    assert [of.is_named for of in (group, Group("", "", (0, 1), 2), Group("", "x", (), 2))] == [True, True, False]


def test_a_message_goes_from_the_rank_that_sends_it() -> None:
    table = table_of(
        CALLS, [{"kind": "send", "peer": 5, "group_id": "1"}, {"kind": "recv", "peer": 4, "group_id": "1"}], -1
    )
    keyed, group = KeyedCalls(table, *call_keys(3, table)), Group("1", "", (), -1)
    (key,) = keyed.keys
    assert edges_of({3: keyed}, {key: group}, {}) == {group: {(3, 5), (4, 3)}}


def groups_of(ranks: Sequence[Rank]) -> Groups:
    made = {rank.rank: rank.trace() for rank in ranks}
    calls = {number: find_calls(trace.events) for number, trace in made.items()}
    return find_groups(calls, {number: trace.distributed for number, trace in made.items()}, {})


def megatron(rank: int, described: bool) -> Rank:
    """A rank of tp 2 × dp 2 × pp 2: activations over tp, half of them and gradients over dp from autograd, messages over pp."""
    job = Rank(rank, {"rank": rank, "world_size": 8})
    tp, dp, pp = rank % 2, rank // 2 % 2, rank // 4
    group = {
        "tp": ("1", "TENSOR_MODEL_PARALLEL_GROUP", (rank - tp, rank - tp + 1)),
        "dp": ("2", "DATA_PARALLEL_GROUP", (rank - 2 * dp, rank - 2 * dp + 2)),
        "pp": ("3", "PIPELINE_MODEL_PARALLEL_GROUP", (rank - 4 * pp, rank - 4 * pp + 4)),
    }

    def args(axis: str, size: int) -> dict[str, object]:
        name, text, ranks = group[axis]
        shown = text if described else "undefined"
        return {"group_id": name, "group_description": shown, "ranks": ranks, "in_bytes": size}

    for layer in range(10):
        at, thread = 100 * layer, AUTOGRAD_THREAD if layer >= 5 else MAIN_THREAD
        if thread == AUTOGRAD_THREAD:
            job.add(Category.CPU_OP, ENGINE, at - 5, at + 15, thread=thread)
        job.call(ALL_REDUCE, at, (at + 20, at + 50), thread, **args("tp", 64))
    peer = group["pp"][2][1 - pp]
    job.call(
        SEND if pp == 0 else RECV, 1200, (1220, 1240), **args("pp", 32), src=peer if pp else -1, dst=-1 if pp else peer
    )
    job.add(Category.CPU_OP, ENGINE, 1400, 1500, thread=AUTOGRAD_THREAD)
    job.call(ALL_REDUCE, 1405, (1420, 1490), AUTOGRAD_THREAD, **args("dp", 4096))
    job.add(Category.CPU_OP, ENGINE, 1600, 1700, thread=AUTOGRAD_THREAD)
    job.call(ALL_REDUCE, 1605, (1620, 1690), AUTOGRAD_THREAD, **args("dp", 1024))
    return job


@pytest.mark.parametrize("described", [True, False])
def test_axes_come_from_descriptions_or_from_the_use_of_groups(described: bool) -> None:
    groups = groups_of([megatron(rank, described) for rank in range(8)])
    by_ranks = {group.ranks: axis for group, axis in groups.axes.items()}
    assert by_ranks[(0, 1)] == by_ranks[(6, 7)] == "tp"
    assert by_ranks[(0, 2)] == by_ranks[(5, 7)] == "dp"
    assert by_ranks[(0, 4)] == by_ranks[(3, 7)] == "pp"
    assert dict(groups.sizes) == {**dict.fromkeys(MESH_ORDER, 1), "tp": 2, "dp": 2, "pp": 2}
    assert groups.pipelines == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert bool(groups.evidence) == (not described)


@pytest.mark.parametrize(
    ("without_group", "when", "axis"),
    [(4, When.IN_FORWARD, "dp"), (5, When.IN_FORWARD, "unknown"), (9, When.BEFORE_UPDATE, "dp")],
)
def test_all_reduces_of_which_as_many_again_that_name_no_group_would_tell_another_axis_tell_none(
    without_group: int, when: When, axis: str
) -> None:
    job = reducing(ALL_REDUCE[3], 5, trains=True, ranks=(0, 2))
    for index in range(without_group):
        job.call(ALL_REDUCE, 2000 + 100 * index, (2020 + 100 * index, 2030 + 100 * index))
    calls = find_calls(job.trace().events).assign(backward=[When.BEFORE_UPDATE] * 5 + [when] * without_group)
    groups = find_groups({0: calls}, {0: job.trace().distributed}, {})
    assert {group.ranks: axis for group, axis in groups.axes.items()}[0, 2] == axis


@pytest.mark.parametrize(("sums", "axis"), [((0, 4), "unknown"), ((), "dp")])
def test_groups_that_gather_and_sum_are_those_of_gradients_where_no_others_are(
    sums: tuple[int, ...], axis: str
) -> None:
    job = reducing(ALL_REDUCE[3], 3, trains=True, ranks=(0, 2))
    job.call(ALL_GATHER, 1000, (1020, 1030), group_id="3", ranks=(0, 2))
    if sums:
        job.call(ALL_REDUCE, 1100, (1120, 1130), group_id="5", ranks=sums)
    job.call(
        (*ALL_REDUCE[:3], "void vllm::cross_device_reduce_1stage(x)"), 1200, (1220, 1230), group_id="1", ranks=(0, 1)
    )
    axes = {group.ranks: axis for group, axis in groups_of([job]).axes.items()}
    assert axes.pop((0, 1)) == "tp"
    assert axes.pop((0, 2)) == axis
    assert axes == ({sums: "dp"} if sums else {})


def test_a_norm_among_gathers_and_scatters_does_not_hide_that_they_are_data_parallel() -> None:
    job = reducing(ALL_REDUCE[3], 1, trains=True, ranks=(0, 2))
    for at in (1000, 1100):
        job.call(ALL_GATHER, at, (at + 20, at + 30), group_id="3", ranks=(0, 2))
        job.call(SCATTER, at + 50, (at + 70, at + 80), group_id="3", ranks=(0, 2))
    calls = find_calls(job.trace().events)
    calls = calls.assign(bytes=np.where(calls["kind"] == "all_reduce", 4, 4096))
    groups = find_groups({0: calls}, {0: job.trace().distributed}, {})
    assert {group.ranks: axis for group, axis in groups.axes.items()} == {(0, 2): "dp"}


@pytest.mark.parametrize("by_use", [True, False])
@pytest.mark.parametrize(
    ("others", "axis"),
    [(("mesh_dp_shard",), "dp"), (("mesh_dp_shard", "mesh_efsdp"), "dp"), (("mesh_dp", "mesh_cp"), None), ((), None)],
)
def test_groups_without_an_axis_of_their_own_are_of_that_of_others_of_the_same_ranks(
    others: Sequence[str], axis: str | None, by_use: bool
) -> None:
    made = dict(enumerate(["mesh_of_losses", "mesh_loss_mesh", *others]))
    facts = facts_of_groups(4, [(0, 1)] * len(made), made)
    calls = {rank: table_of(CALLS, [row_of("all_reduce", 0, (0, 1))], number=-1) for rank in (0, 1)}
    groups = find_groups(calls, facts, {}, by_use=by_use)
    axes = {group.description: group_axis for group, group_axis in groups.axes.items()}
    assert axes["mesh_of_losses"] == axis or "unknown"
    assert axes["mesh_loss_mesh"] == axis or "dp-cp"


def test_what_fsdp_gathers_among_all_ranks_is_data_parallel_though_meshes_of_one_rank_name_other_axes() -> None:
    info = facts_of_groups(2, [(0, 1), (0,), (0,)], {0: "default_pg", 1: "mesh_pp", 2: "mesh_dp_replicate"})[0]
    job = Rank(0, info)
    job.add(Category.CPU_OP, ENGINE, 0, 5, thread=AUTOGRAD_THREAD)
    for at in (100, 200):
        job.add(Category.CPU_OP, "FSDP::all_gather (layers.0)", at - 5, at + 15, thread=MAIN_THREAD)
        job.call(ALL_GATHER, at, (at + 20, at + 30), group_id="0", group_description="default_pg", ranks=(0, 1))
    groups = groups_of([job])
    assert {axis for group, axis in groups.axes.items() if group.id == "0"} == {"dp"}
    assert groups.sizes["dp"] == 2


def test_a_pipeline_of_all_ranks_leaves_their_group_that_of_the_world() -> None:
    job = Rank(0, {"world_size": 2})
    job.call(SEND, 0, (20, 30), group_id="0", group_description="default_pg", ranks=(0, 1), dst=1)
    facts = {0: job.trace().distributed}
    groups = find_groups({0: find_calls(job.trace().events)}, facts, {}, pipelines=[(0, 1)])
    assert list(groups.axes.values()) == ["world"]


def test_the_size_of_an_axis_that_messages_show_stays_where_groups_tell_another_one() -> None:
    mesh = MeshInfo(4, pp=2, pipelines=((0, 2), (1, 3))).with_sizes({"tp": 1, "cp": 2, "dp": 1})
    groups = Groups({}, {}, 4, {"pp": 2}, ())
    sizes = mesh_with_groups(mesh, empty_table(OPS), groups)
    assert [sizes.size_of(axis) for axis in ("tp", "cp", "dp")] == [None, 2, None]


def test_calls_differ_by_whether_an_update_or_a_backward_comes_next() -> None:
    """A call in a forward, one in the engine, one before the update, one behind it; and a message, which is behind it too."""
    job = Rank(0, {"rank": 0, "world_size": 2})
    for at in (0, 200, 400, 600):
        job.add(Category.CPU_OP, "c10d::allreduce_", at, at + 20, thread=MAIN_THREAD)
    job.add(Category.CPU_OP, ENGINE, 190, 300, thread=MAIN_THREAD)
    job.add(Category.ANNOTATION, "Optimizer.step#SGD.step", 500, 550, thread=MAIN_THREAD)
    job.add(Category.CPU_OP, "c10d::send", 700, 720, thread=MAIN_THREAD)
    run = recognise_rank(job.trace())
    (calls, *_), _ = groups_of_ranks([run.with_info(replace(run.info, rank=0))])
    whens = [When.IN_FORWARD, When.IN_ENGINE, When.BEFORE_UPDATE, When.OUTSIDE, When.OUTSIDE]
    assert calls[0]["backward"].tolist() == whens


@pytest.mark.parametrize(
    ("whens", "sizes", "axis"),
    [
        ([When.IN_FORWARD] * 6 + [When.IN_ENGINE] * 6, False, "tp"),
        ([When.IN_FORWARD] * 6 + [When.IN_ENGINE] * 6, True, "tp"),
        ([When.IN_FORWARD] * 2 + [When.IN_ENGINE] * 2, True, "unknown"),
        ([When.BEFORE_UPDATE] * 8 + [When.IN_ENGINE] * 4, False, "dp"),
        ([When.IN_ENGINE] * 12, False, "dp"),
        ([When.OUTSIDE] * 4, True, "dp"),
    ],
)
def test_all_reduces_in_forwards_are_none_of_gradients(whens: list[When], sizes: bool, axis: str) -> None:
    job = reducing(ALL_REDUCE[3], len(whens), trains=True, ranks=(0, 2))
    calls = find_calls(job.trace().events).assign(backward=whens, bytes=4096 if sizes else -1)
    groups = find_groups({0: calls}, {0: job.trace().distributed}, {})
    assert {group.ranks: axis for group, axis in groups.axes.items()} == {(0, 2): axis}


@pytest.mark.parametrize(("tied", "axis"), [([0, 3], "unknown"), ([0, 1, 2, 3], "dp")])
def test_groups_that_leave_out_ranks_are_of_no_axis(tied: list[int], axis: str) -> None:
    """As the two ends of a pipeline, which share embeddings, where no message tells that it is one."""
    jobs = {rank: reducing(ALL_REDUCE[3], 3, True, tuple(tied)).trace() for rank in range(4)}
    calls = {rank: find_calls(trace.events) for rank, trace in jobs.items()}
    facts = facts_of_groups(4, [range(4), tied, [0, 1], [2, 3]]) | {4: {}}
    calls = {rank: table if rank in tied else table.iloc[:0] for rank, table in calls.items()}
    groups = find_groups(calls, {rank: facts[rank] | {"world_size": 8} for rank in range(4)}, {})
    assert {group.ranks: axis for group, axis in groups.axes.items()}[tuple(tied)] == axis


def test_messages_along_no_pipeline_that_is_known_are_a_ring() -> None:
    job = Rank(0, {"world_size": 4})
    for at, (call, end) in enumerate([(SEND, "dst"), (RECV, "src")] * 2):
        job.call(call, 100 * at, (100 * at + 20, 100 * at + 30), group_id="3", ranks=(0, 1), **{end: 1})
    calls, facts = {0: find_calls(job.trace().events)}, {0: job.trace().distributed}
    for pipelines, axis in (((), "pp"), (((0, 1), (2, 3)), "pp"), (((0, 2), (1, 3)), "cp")):
        groups = find_groups(calls, facts, {}, pipelines=pipelines)
        assert {group.ranks: axis for group, axis in groups.axes.items()}[0, 1] == axis


def test_messages_in_the_default_group_show_pipelines_by_who_talks_to_whom() -> None:
    ranks = []
    for rank in range(6):
        job = Rank(rank, {"world_size": 6})
        args = {"group_id": "0", "group_description": "default_pg", "ranks": tuple(range(6))}
        if rank + 2 < 6:
            job.call(SEND, 0, (20, 30), **args, dst=rank + 2)
        if rank >= 2:
            job.call(RECV, 100, (120, 130), **args, src=rank - 2)
        ranks.append(job)
    assert groups_of(ranks).pipelines == ((0, 2, 4), (1, 3, 5))


def test_an_all_to_all_group_is_taken_for_experts_and_two_shapes_of_rank_lists_for_tp_and_dp() -> None:
    job = Rank(0, {"world_size": 8})
    job.call(ALL_TO_ALL, 0, (20, 30), group_id="9", ranks=(0, 1, 2, 3))
    job.call(ALL_TO_ALL, 50, (70, 80), group_id="9", ranks=(0, 1, 2, 3))
    job.add(Category.CPU_OP, ENGINE, 90, 95, thread=AUTOGRAD_THREAD)
    job.call(ALL_GATHER, 100, (120, 130), group_id="5", ranks=(0, 4))
    groups = groups_of([job])
    assert {group.id: axis for group, axis in groups.axes.items()} == {"9": "ep", "5": "dp"}


@pytest.mark.parametrize(("splits", "axis"), [("2,2>2,2", "dp"), ("1,3>2,2", "ep")])
def test_a_group_whose_gradients_are_summed_in_the_backward_is_dp_though_it_has_more_all_to_alls_of_even_parts(
    splits: str, axis: str
) -> None:
    """As DLRM's: embeddings are exchanged among the ranks over which DDP sums the gradients of the other parameters."""
    job = Rank(0, {"world_size": 4})
    for at in range(0, 400, 100):
        job.call(ALL_TO_ALL, at, (at + 20, at + 30), group_id="9", ranks=(0, 1))
    for at in (400, 500):
        job.add(Category.CPU_OP, ENGINE, at - 5, at + 15, thread=AUTOGRAD_THREAD)
        job.call(ALL_REDUCE, at, (at + 20, at + 30), AUTOGRAD_THREAD, group_id="9", ranks=(0, 1), in_bytes=4096 + at)
    calls = find_calls(job.trace().events)
    calls["splits"] = np.where(calls["kind"] == "all_to_all", splits, "")
    groups = find_groups({0: calls}, {0: job.trace().distributed}, {})
    assert list(groups.axes.values()) == [axis]


def test_the_groups_of_distributed_info_tell_the_mesh_of_a_trace_without_calls() -> None:
    config = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 16, "ranks": "[0, 1, 2, ..., 15]"},
        {"pg_name": "1", "pg_desc": "mesh_pp", "pg_size": 4, "ranks": [1, 5, 9, 13]},
        {"pg_name": "2", "pg_desc": "mesh_dp_shard", "pg_size": 2, "ranks": [1, 3]},
        {"pg_name": "3", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": "[0, 1]"},
    ]
    info = {"rank": 1, "world_size": 16, "pg_config": config}
    job = Rank(1, info)
    job.add(Category.CPU_OP, "aten::mm", 0, 10, thread=1)
    mesh = recognise([job.trace()]).mesh
    assert (mesh.num_ranks, mesh.pp, mesh.tp, mesh.dp, mesh.cp) == (16, 4, 2, 2, 1)
    assert configured_groups(info)["3"].ranks == (0, 1)
    assert configured_groups({"pg_config": "damaged"}) == {}
    assert ranks_of("[0, 1, ..., 15]") == ranks_of(None) == ranks_of("[-1]") == ranks_of('["a"]') == ()


def ringed(rank: int, size: int, back: bool) -> Rank:
    """Sends to the next rank and receives from the last one around a ring; with ``back`` the other way too."""
    job = Rank(rank, {"world_size": size})
    args = {"group_id": "6", "group_description": "undefined", "ranks": tuple(range(size))}
    for way in (1, -1) if back else (1,):
        job.call(SEND, 100 + 50 * way, (120, 130), **args, dst=(rank + way) % size)
        job.call(RECV, 110 + 50 * way, (125, 135), **args, src=(rank - way) % size)
    return job


@pytest.mark.parametrize(("back", "axis", "pipelines"), [(False, "cp", ()), (True, "world", ((0, 1, 2, 3),))])
def test_messages_one_way_around_a_ring_are_those_of_no_pipeline(
    back: bool, axis: str, pipelines: tuple[tuple[int, ...], ...]
) -> None:
    groups = groups_of([ringed(rank, 4, back) for rank in range(4)])
    assert (list(groups.axes.values()), groups.pipelines) == ([axis], pipelines)


def test_kernels_that_name_no_group_have_no_axis_but_that_of_their_library() -> None:
    job = Rank(0, {"world_size": 4})
    deep_ep = "void deep_ep::internode::dispatch<8>(x)"
    names = [ALL_REDUCE[3]] * 20 + [ALL_GATHER[3], ALL_TO_ALL[3], deep_ep]
    for index, name in enumerate(names):
        job.kernel(name, 100 * index, 100 * index + 10, 100 * index + 50)
    comms = recognise([job.trace()]).comms
    assert comms.groupby("kind")["axis"].agg(set).to_dict() == {
        "all_reduce": {"unknown"},
        "all_gather": {"unknown"},
        "send_recv": {"unknown"},
        "all_to_all": {"ep"},
    }


def test_one_all_to_all_does_not_tell_the_axis_of_its_group() -> None:
    job = Rank(0, {"world_size": 8})
    job.call(ALL_TO_ALL, 0, (20, 30), group_id="9", ranks=(0, 1, 2, 3))
    assert list(groups_of([job]).axes.values()) == ["unknown"]


def test_descriptions_of_megatron_tell_the_framework_where_no_label_does() -> None:
    named, meshed = recognise([megatron(0, described=True).trace()]), recognise([ringed(0, 4, True).trace()])
    assert (named.framework, meshed.framework) == ("megatron-lm", "unlabelled")
    assert any("names of its process groups (DATA_PARALLEL_GROUP)" in line for line in named.warnings)


def deepspeed(rank: int) -> Rank:
    """A rank of pp 4 × dp 2: groups without descriptions, one all-reduce of gradients a step, messages in the default group."""
    dp, pp = tuple(rank - rank % 2 + index for index in range(2)), tuple(range(rank % 2, 8, 2))
    job = Rank(rank, facts_of_groups(8, (range(8), dp, pp), {0: "default_pg"})[rank])
    job.add(Category.CPU_OP, ENGINE, 90, 95, thread=AUTOGRAD_THREAD)
    for step in range(9):
        for way in (-2, 2):
            peer, at = rank + way, 1000 * step + 50 * (way + 2)
            if peer in pp:
                default = {"group_id": "0", "group_description": "default_pg", "ranks": range(8)}
                job.call(SEND, at, (at + 20, at + 30), **default, dst=peer)
                job.call(RECV, at + 40, (at + 60, at + 70), **default, src=peer)
        at = 1000 * step + 500
        job.call(ALL_REDUCE, at, (at + 20, at + 90), group_id="1", ranks=dp, in_bytes=4096)
    return job


@pytest.mark.parametrize("present", [range(8), (5,), (1, 4)])
def test_messages_of_the_default_group_go_along_the_pipelines_own_group_though_few_ranks_have_a_trace(
    present: Sequence[int],
) -> None:
    groups = groups_of([deepspeed(rank) for rank in present])
    assert dict(groups.sizes) == {**dict.fromkeys(MESH_ORDER, 1), "pp": 4, "dp": 2}
    assert set(groups.pipelines) == {tuple(range(rank % 2, 8, 2)) for rank in present}


def test_who_talks_to_whom_tells_no_pipeline_where_ranks_without_a_trace_may_talk_to_more() -> None:
    ranks = []
    for rank in (0, 1):
        job = Rank(rank, {"world_size": 8})
        default = {"group_id": "0", "group_description": "default_pg", "ranks": range(8)}
        job.call(SEND, 0, (20, 30), **default, dst=rank + 1)
        job.call(RECV, 40, (60, 70), **default, src=rank + 1)
        ranks.append(job)
    groups = groups_of(ranks)
    assert (groups.pipelines, "pp" in groups.sizes) == ((), False)


def test_axes_whose_sizes_do_not_multiply_up_to_the_ranks_are_not_told_but_by_descriptions() -> None:
    job = Rank(0, facts_of_groups(8, [(0, 2, 4, 6)], {0: "mesh_pp"})[0])
    for at in (0, 50):
        job.call(ALL_TO_ALL, at, (at + 20, at + 30), group_id="9", ranks=(0, 1))
    job.add(Category.CPU_OP, ENGINE, 90, 95, thread=AUTOGRAD_THREAD)
    job.call(ALL_REDUCE, 100, (120, 130), group_id="5", ranks=(0, 2, 4), in_bytes=4096)
    groups = groups_of([job])
    assert {group.id: axis for group, axis in groups.axes.items()} == {"0": "pp", "9": "ep", "5": "unknown"}
    assert groups.sizes["pp"] == 4
    assert groups.sizes.get("dp") != 3
    assert any("do not multiply up to 8 ranks" in line for line in groups.evidence)


def reducing(kernel: str, count: int, trains: bool, ranks: tuple[int, ...] = (0, 1)) -> Rank:
    job = Rank(0, {"world_size": 2 if ranks == (0, 1) else 8})
    if trains:
        job.add(Category.CPU_OP, ENGINE, 0, 5, thread=AUTOGRAD_THREAD)
    for index in range(count):
        at = 100 * index + 50
        job.call((*ALL_REDUCE[:3], kernel), at, (at + 20, at + 30), group_id="3", ranks=ranks)
    return job


@pytest.mark.parametrize(
    ("kernel", "trains", "axis"),
    [
        (ALL_REDUCE[3], False, "world"),
        (ALL_REDUCE[3], True, "dp"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(x)", False, "tp"),
    ],
)
def test_all_reduces_are_of_gradients_only_with_a_backward_and_of_tp_by_kernels_that_only_tp_uses(
    kernel: str, trains: bool, axis: str
) -> None:
    assert list(groups_of([reducing(kernel, 3, trains)]).axes.values()) == [axis]


def exchanging(rank: int, size: int, first: bool) -> Rank:
    """Sends to the next rank while it receives from the one before; with ``first`` a message of its own comes before that."""
    job = Rank(rank, {"world_size": size})
    args = {"group_id": "6", "group_description": "undefined", "ranks": tuple(range(size))}
    if first:
        job.call(SEND if rank == 0 else RECV, 0, (20, 30), **args, src=0 if rank else -1, dst=-1 if rank else 1)
    for at in (100, 200):
        job.call(SEND, at, None, **args, dst=(rank + 1) % size)
        job.call(RECV, at + 12, None, **args, src=(rank - 1) % size)
        job.kernel(SEND[3], at + 25, at + 30, at + 40)
    return job


@pytest.mark.parametrize(("first", "pipelines"), [(False, ()), (True, ((0, 1),))])
def test_two_ranks_that_only_ever_send_while_they_receive_are_no_pipeline_for_sure(
    first: bool, pipelines: tuple[tuple[int, ...], ...]
) -> None:
    ranks = [exchanging(rank, 2, first) for rank in range(2)]
    run = recognise([rank.trace() for rank in ranks])
    assert groups_of(ranks).pipelines == pipelines
    assert set(run.comms["axis"]) == ({"pp"} if first else {"unknown"})


def test_messages_of_ranks_without_an_op_whose_peers_are_not_known_are_of_no_axis() -> None:
    jobs = [Rank(rank, {"rank": rank, "world_size": 2}) for rank in range(2)]
    for job in jobs:
        for at in range(3):
            job.add(Category.CPU_OP, "c10d::send", 100 * at, 100 * at + 20, thread=MAIN_THREAD)
            job.add(Category.ANNOTATION, "gloo:send", 100 * at + 5, 100 * at + 18, thread=MAIN_THREAD)
    run = recognise([job.trace() for job in jobs])
    assert run.comms["axis"].tolist() == ["unknown"] * 6


def test_one_rank_of_a_ring_that_never_sends_back_is_of_no_pipeline_for_sure() -> None:
    assert list(groups_of([exchanging(0, 4, first=False)]).axes.values()) == ["world"]
    assert groups_of([exchanging(0, 4, first=False)]).pipelines == ()


def call_comms(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    return table_of(CALL_COMMS, [{"start_ns": at, "group_size": 2} | row for at, row in enumerate(rows)], -1)


def p2p(kind: str, rank: int, peer: int, size: int, **more: object) -> dict[str, object]:
    return {"kind": kind, "axis": "pp", "rank": rank, "peer": peer, "bytes": size, **more}


def test_the_kth_send_meets_the_kth_receive_of_its_pair() -> None:
    rows = [*[p2p("send", 0, 1, 8)] * 2, *[p2p("recv", 1, 0, 8)] * 2, p2p("send", 1, 0, 8)]
    assert match_calls(call_comms(rows), first=5)["match"].tolist() == [5, 6, 5, 6, -1]


def test_ends_of_a_message_that_differ_in_size_do_not_meet() -> None:
    rows = [p2p("send", 0, 1, 8), p2p("send", 0, 1, 9), p2p("recv", 1, 0, 8), p2p("recv", 1, 0, 8)]
    assert set(match_calls(call_comms(rows))["match"]) == {-1}


def test_where_one_side_recorded_more_the_sizes_say_which_belong_together_or_nothing_does() -> None:
    calls = [p2p("send", 0, 1, size) for size in (1, 2, 3, 4)] + [p2p("recv", 1, 0, size) for size in (2, 3)]
    assert match_calls(call_comms(calls))["match"].tolist() == [-1, 0, 1, -1, 0, 1]
    equal = [p2p("send", 0, 1, 8) for _ in range(3)] + [p2p("recv", 1, 0, 8) for _ in range(2)]
    assert set(match_calls(call_comms(equal))["match"]) == {-1}


def test_steps_hold_together_what_sizes_cannot() -> None:
    sends = [p2p("send", 0, 1, 8, step=step) for step in (1, 2, 2)]
    recvs = [p2p("recv", 1, 0, 8, step=step) for step in (2, 2)]
    assert match_calls(call_comms(sends + recvs))["match"].tolist() == [-1, 0, 1, 0, 1]


def test_sequence_numbers_join_members_of_a_collective_though_one_recorded_less() -> None:
    shared = {"kind": "all_reduce", "group": "0,1", "axis": "dp"}
    rows = [{**shared, "rank": rank, "seq": seq} for rank, seq in ((0, 4), (0, 5), (0, 6), (1, 5), (1, 6))]
    assert match_calls(call_comms(rows))["match"].tolist() == [-1, 0, 1, 0, 1]


def test_a_collective_without_all_its_members_stays_unmatched() -> None:
    shared = {"kind": "all_reduce", "group": "0,1,2", "group_size": 3}
    rows = [{**shared, "rank": rank} for rank in (0, 1)]
    assert match_calls(call_comms(rows))["match"].tolist() == [-1, -1]


def test_unmatched_messages_are_listed_with_their_ranks_unless_the_peer_has_no_trace() -> None:
    rows = [p2p("send", 1, 2, 8), p2p("send", 1, 2, 8), p2p("recv", 2, 7, 8)]
    lines = warn_unmatched(call_comms(rows), {1, 2})
    assert lines == ("2 sends (pp) have no matching receive in the peer's trace: 2 of rank 1 to rank 2",)
    in_steps = call_comms(rows).assign(step=[3, -1, 3])  # where there are steps, of theirs alone
    (line,) = warn_unmatched(in_steps, {1, 2})
    assert line.startswith("1 send (pp) has no matching receive")


@pytest.mark.parametrize(
    ("configured", "pipelines"), [([], ((0, 1),)), ([range(4)], ((0, 1),)), ([range(4), (0, 2)], ((0, 2),))]
)
def test_places_in_a_group_that_is_not_named_become_global_ranks(
    configured: list[Sequence[int]], pipelines: tuple[tuple[int, ...], ...]
) -> None:
    facts = facts_of_groups(4, configured, {0: "default_pg", 1: "mesh_pp"})
    jobs = []
    for index, (rank, what) in enumerate(zip(pipelines[0], ("send", "recv"), strict=True)):
        job = Rank(rank, facts[rank])
        event = job.add(Category.CPU_OP, f"c10d::{what}", 0, 10, thread=1)
        job.args.append((event, {"collective": what, "src" if index else "dst": 1 - index}))
        job.add(Category.ANNOTATION, f"gloo:{what}", 2, 40, thread=1)
        jobs.append(job)
    groups = groups_of(jobs)
    assert groups.pipelines == pipelines


def test_a_range_of_gloo_without_its_operator_waits_from_its_start_unless_the_thread_goes_on() -> None:
    job = Rank(0)
    job.add(Category.ANNOTATION, "gloo:all_reduce", 0, 100, thread=1)
    row = find_calls(job.trace().events).iloc[0]
    assert row["posted_ns"] == row["asked_ns"] == row["start_ns"] == row["end_ns"] - 100


@pytest.mark.parametrize(("last", "axis"), [(3, "unknown"), (2, "dp")])
def test_a_group_that_cannot_tile_the_ranks_is_no_axis(last: int, axis: str) -> None:
    """As of the first and last rank of a pipeline, which share embeddings."""
    facts = facts_of_groups(4, [(0, last)])
    groups = groups_of([Rank(rank, facts[rank]) for rank in (0, last)])
    assert set(groups.axes.values()) == {axis}


def test_a_group_without_a_call_has_no_axis_where_calls_were_recorded() -> None:
    """Its ranks alone do not tell: neighbours may be replicas."""
    facts = facts_of_groups(4, [(0, 1), (2, 3), (0, 2), (1, 3)])
    calls = {
        rank: table_of(CALLS, [row_of("all_reduce", 3 + rank % 2, (rank % 2, rank % 2 + 2))], number=-1)
        for rank in facts
    }
    groups = find_groups(calls, facts, dict.fromkeys(facts, 1))
    assert {axis for group, axis in groups.axes.items() if group.ranks in ((0, 1), (2, 3))} == {"unknown"}
    assert "tp" not in groups.sizes


def row_of(kind: str, name: int, ranks: Sequence[int], peer: int = -1) -> dict[str, object]:
    columns = {"kind": kind, "peer": peer, "local_peer": -1, "bytes": 4096, "clock": "host", "backward": 0}
    return columns | group_columns(name, ranks)


def test_groups_of_neighbours_are_links_of_one_pipeline() -> None:
    calls = {}
    for rank in range(4):
        pairs = [(first, (first, first + 1), peer) for first, peer in ((rank - 1, rank - 1), (rank, rank + 1))]
        rows = [row_of(kind, *link) for link in pairs if 0 <= link[2] < 4 for kind in ("send", "recv")]
        calls[rank] = table_of(CALLS, rows, number=-1)
    groups = find_groups(calls, {rank: {"world_size": 4} for rank in range(4)}, dict.fromkeys(range(4), 2))
    assert groups.pipelines == ((0, 1, 2, 3),)
    assert groups.sizes["pp"] == 4


@pytest.mark.parametrize(("members", "axis"), [((0, 3), "embd"), ((0, 1, 2), "unknown"), ((1, 2), "unknown")])
@pytest.mark.parametrize("replicas", [1, 2])
def test_some_ranks_of_one_pipeline_are_no_replicas(members: Sequence[int], axis: str, replicas: int) -> None:
    """Gradients of tied embeddings are summed over both ends."""
    world, calls = 4 * replicas, {}
    for rank in range(world):
        first = rank // 4 * 4
        peers = [peer for peer in (rank - 1, rank + 1) if first <= peer < first + 4]
        rows = [row_of(kind, 0, range(world), peer) for peer in peers for kind in ("send", "recv")]
        if rank - first in members:
            rows.append(row_of("all_reduce", 1 + first, [first + member for member in members]))
        calls[rank] = table_of(CALLS, rows, number=-1)
    groups = find_groups(calls, {rank: {"world_size": world} for rank in calls}, dict.fromkeys(calls, 1))
    assert groups.pipelines == tuple(tuple(range(first, first + 4)) for first in range(0, world, 4))
    assert {group_axis for group, group_axis in groups.axes.items() if len(group.ranks) == len(members)} == {axis}
    assert groups.sizes == {"pp": 4} | (dict.fromkeys(WITHIN_STAGE, 1) if replicas == 1 else {})
    assert not any("multiply up" in line for line in groups.evidence)
