"""Labels that the names of each framework's ranges give, and names that give none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pptrace.recognise.labels import LabelledAction, read_label
from pptrace.schedule.actions import Kind

REFERENCE = Path(__file__).resolve().parents[3].parent / "shared" / "reference" / "framework_labels.json"
P2P = "megatron.core.pipeline_parallel.p2p_communication."


def actions(name: str) -> list[str]:
    """The actions of a name as text; the stage of a chunk c that is not placed yet is −1−c."""
    label = read_label(name)
    return [] if label is None else [str(action) for action in label.actions]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PP:3SEND_B1", ["3SEND_B1"]),
        ("PP:0F3, seq = 4, op_id = 7, sizes = [[2, 3]]", ["0F3"]),
        ("PP:(2F2;1B0)OVERLAP_F_B", ["(2F2;1B0)OVERLAP_F_B"]),
        ("Backward 3", ["?0B3"]),
        ("F3.0.0", ["?0F3"]),
        ("W12.1.0", ["?1W12"]),
        ("SEND_FORWARD.2.0.0", ["?0SEND_F2"]),
        ("SEND_FORWARD.2.0.0_RECV_BACKWARD.1.1.0", ["?0SEND_F2", "?1RECV_B1"]),
        ("W_clear.1.0", ["?1W"]),
        ("forward chunk 3 (phase0)", ["?0F3"]),
        ("backward chunk 3 (phase1)", ["?1B3"]),
        ("forward chunk 5 (phase0) backward chunk 2 (phase1)", ["(?0F5;?1B2)OVERLAP_F_B"]),
        ("weight chunk", ["?0W"]),
        (P2P + "recv_forward", ["?0RECV_F"]),
        (P2P + "P2PCommunicator.send_forward_recv_backward", ["?0SEND_F", "?0RECV_B"]),
        (P2P + "send_forward_backward_recv_forward_backward", ["?0SEND_F", "?0SEND_B", "?0RECV_F", "?0RECV_B"]),
        ("1F1B", ["(?0F;?0B)OVERLAP_F_B"]),
        ("forward-compute", ["?0F"]),
        ("backward-compute", ["?0B"]),
        ("forward-recv", ["?0RECV_F"]),
        ("backward-send-forward-recv", ["?0SEND_B", "?0RECV_F"]),
        ("forward-backward-send-forward-backward-recv", ["?0SEND_F", "?0SEND_B", "?0RECV_F", "?0RECV_B"]),
        ("DeepSpeedEngine.forward", ["?0F"]),
        ("pipe_send_grad", ["?0SEND_B"]),
    ],
)
def test_a_name_says_its_ops_and_messages(name: str, expected: list[str]) -> None:
    assert actions(name) == expected


@pytest.mark.parametrize(
    ("name", "span", "step"),
    [
        ("ProfilerStep#12", "STEP", 12),
        ("iter_3_17", "STEP", 17),
        ("train_batch_iter", "STEP", None),
        ("Optimizer.step#AdamW.step", "OPTIMIZER", None),
        ("PP:0REDUCE_GRAD", "GRAD_SYNC", None),
        ("sync_gradients_across_dp", "GRAD_SYNC", None),
    ],
)
def test_a_name_says_what_frames_the_ops_of_a_step(name: str, span: str, step: int | None) -> None:
    label = read_label(name)
    assert (label.span, label.step, label.actions) == (span, step, ())


def test_a_stage_that_a_name_does_not_have_is_none_and_its_chunk_stands_apart() -> None:
    flush, named = read_label("W_clear.1.0"), read_label("PP:3F2")
    assert flush.actions == (LabelledAction(Kind.W, stage=None, microbatch=None, chunk=1),)
    assert named.actions == (LabelledAction(Kind.F, stage=3, microbatch=2, chunk=0),)


@pytest.mark.parametrize(
    "name",
    [
        *("PP:", "PP:0X1", "PP:0F", "PP:0UNSHARD", "Forward", "Forward 1 2", "forward 1", "F3.0", "F3.0.0.0"),
        *("SEND_FORWARD.2.0.0_", "forward-", "forward-send-recv", P2P + "send_tokens", "attn forward", "attn(F)"),
        *("transformer_engine._Linear.forward.fc1.gemm", "transformer_engine._Linear.backward.fc1.dgrad_gemm"),
        *("nvte_cublas_gemm_v2", "nccl:send 0->1", "ncclAllReduce", "layer_0f-layer_3b", "x" * 100_000),
        "DistributedDataParallel.forward",
    ],
)
def test_other_names_are_no_ops(name: str) -> None:
    assert actions(name) == []


_OPS = {"F": Kind.F, "B": Kind.B, "I": Kind.I, "W": Kind.W, "SEND_F": Kind.SEND_F, "SEND_B": Kind.SEND_B}
_OPS |= {"RECV_F": Kind.RECV_F, "RECV_B": Kind.RECV_B}


def test_no_name_that_is_known_is_read_as_another_kind_of_op() -> None:
    """Over the catalogue of labels that were found in the frameworks' sources."""
    if not REFERENCE.is_file():
        pytest.skip("the catalogue of labels is not beside this checkout")
    entries = [entry for entry in json.loads(REFERENCE.read_text()) if entry.get("example")]
    assert len(entries) > 200
    read = 0
    for entry in entries:
        label = read_label(str(entry["example"]))
        if label is None or not label.actions:
            continue
        read += 1
        kinds = [action.kind for action in label.actions]
        if entry["op"] in _OPS:
            assert kinds == [_OPS[entry["op"]]], entry["example"]
        else:
            assert entry["op"] in ("F_B_OVERLAP", "P2P_BATCH", "META_EMIT_NVTX_SUFFIX") or entry["op"].startswith(
                "SEND_"
            ), entry["example"]
    assert read > 40
