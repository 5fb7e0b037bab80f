"""Microbatches of the buffers of DeepSpeed's pipeline engine."""

from __future__ import annotations

import pytest

from instrument.adapters.deepspeed_pipe import LOAD, Buffers


def words(buffers: Buffers, *instructions: tuple[str, int, int | None]) -> list[str]:
    given = [
        (name, {"buffer_id": buffer} | ({} if phase is None else {"phase": phase}))
        for name, buffer, phase in instructions
    ]
    actions = [buffers.action(name, arguments) for name, arguments in given]
    return [
        f"{action}{f'/{buffers.peer(action)}' if action.kind.is_p2p else ''}"
        for action in actions
        if action is not None
    ]


def test_the_last_stage_receives_and_loads_a_microbatch_into_one_buffer() -> None:
    once = (
        ("RecvActivation", 0, None),
        (LOAD, 0, None),
        ("ForwardPass", 0, None),
        ("BackwardPass", 0, None),
        ("SendGrad", 0, None),
    )
    assert words(Buffers(3, 2), *once, *once) == [
        "2RECV_F0/1", "2F0", "2B0", "2SEND_B0/1", "2RECV_F1/1", "2F1", "2B1", "2SEND_B1/1",
    ]  # fmt: skip


def test_the_first_stage_loads_into_a_buffer_while_others_wait_for_their_backwards() -> None:
    assert words(
        Buffers(2, 0),
        (LOAD, 0, None), ("ForwardPass", 0, None), (LOAD, 1, None), ("ForwardPass", 1, None), ("SendActivation", 0, None),
        ("RecvGrad", 0, None), ("BackwardPass", 0, None), (LOAD, 0, None), ("ForwardPass", 0, None), ("BackwardPass", 1, None),
        ("BackwardPass", 0, None),
    ) == ["0F0", "0F1", "0SEND_F0/1", "0RECV_B0/1", "0B0", "0F2", "0B1", "0B2"]  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, ["0F0", "0SEND_F0/1", "3RECV_F0/1", "3F0", "3B0", "3SEND_B0/1", "0RECV_B0/1", "0B0"]),
        (1, ["1RECV_F0/0", "1F0", "2F0", "2SEND_F0/0", "2RECV_B0/0", "2B0", "1B0", "1SEND_B0/0"]),
    ],
)
def test_the_second_phase_of_dualpipe_v_goes_back_to_the_first_rank(rank: int, expected: list[str]) -> None:
    """One microbatch of two over DeepSpeed's DualPipeV: buffers 0 and 1 are of phase 0, 2 and 3 of phase 1."""
    first = [
        (LOAD, 0, None), ("ForwardPass", 0, 0), ("SendActivation", 0, 0), ("RecvActivation", 2, 1), ("ForwardPass", 2, 1),
        ("BackwardPass", 2, 1), ("SendGrad", 2, 1), ("RecvGrad", 0, 0), ("BackwardPass", 0, 0),
    ]  # fmt: skip
    last = [
        ("RecvActivation", 0, 0), ("ForwardPass", 0, 0), ("ForwardPass", 2, 1), ("SendActivation", 2, 1), ("RecvGrad", 2, 1),
        ("BackwardPass", 2, 1), ("BackwardPass", 0, 0), ("SendGrad", 0, 0),
    ]  # fmt: skip
    assert words(Buffers(2, rank), *(last if rank else first)) == expected
