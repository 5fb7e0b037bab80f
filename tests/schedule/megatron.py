"""Megatron-LM's order of calls, written down on its own from ``core/pipeline_parallel/schedules.py``.

Nothing here uses the package under test, so that the two can disagree.
"""

from __future__ import annotations

Calls = list[tuple[str, ...]]


def one_f_one_b_calls(p: int, rank: int, m: int) -> Calls:
    """``forward_backward_pipelining_without_interleaving``: each compute, and each P2P call with its transfers."""
    first, last = rank == 0, rank == p - 1
    num_warmup = min(p - rank - 1, m)
    calls: Calls = []

    def p2p(*transfers: str) -> None:
        missing = ("RECV_F", "SEND_B") * first + ("SEND_F", "RECV_B") * last
        if kept := tuple(f"{rank}{transfer}" for transfer in transfers if transfer[:6] not in missing):
            calls.append(kept)

    def compute(kind: str, mb: int) -> None:
        calls.append((f"{rank}{kind}{mb}",))

    forward = backward = 0
    for _ in range(num_warmup):
        p2p(f"RECV_F{forward}")
        compute("F", forward)
        p2p(f"SEND_F{forward}")
        forward += 1
    num_steady = m - num_warmup
    if num_steady > 0:
        p2p(f"RECV_F{forward}")
    for i in range(num_steady):
        compute("F", forward)
        p2p(f"SEND_F{forward}", f"RECV_B{backward}")
        forward += 1
        compute("B", backward)
        if i == num_steady - 1:
            p2p(f"SEND_B{backward}")
        else:
            p2p(f"SEND_B{backward}", f"RECV_F{forward}")
        backward += 1
    for _ in range(num_warmup):
        p2p(f"RECV_B{backward}")
        compute("B", backward)
        p2p(f"SEND_B{backward}")
        backward += 1
    return calls


def get_schedule_table(num_microbatches: int, num_model_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch_id, model_chunk_id) by virtual microbatch id."""
    table: list[tuple[int, int]] = []
    for min_id in range(0, num_microbatches, group_size):
        is_last = min_id + group_size >= num_microbatches
        ids = range(min_id, num_microbatches if is_last else min_id + group_size)
        table.extend([(mb, chunk) for chunk in range(num_model_chunks) for mb in ids])
    return table


def convert_schedule_table_to_order(num_warmup: int, num_model_chunks: int, table: list[tuple[int, int]]) -> list[int]:
    """Positive: forward of chunk c as c+1; negative: backward of it as −(c+1)."""
    _, chunk_ids = zip(*table, strict=True)
    forward_order = [chunk + 1 for chunk in chunk_ids]
    backward_order = [chunk - num_model_chunks for chunk in chunk_ids]
    order = forward_order[:num_warmup]
    for i in range(num_warmup, len(forward_order)):
        order.append(forward_order[i])
        order.append(backward_order[i - num_warmup])
    if num_warmup > 0:
        order.extend(backward_order[-num_warmup:])
    return order


def num_warmup(p: int, rank: int, m: int, v: int, n: int, combined: bool = False) -> int:
    """``get_pp_rank_microbatches``, interleaved; ``combined`` is ``overlap_moe_expert_parallel_comm``."""
    return min(m * v, (p - rank - 1) * 2 + (v - 1) * n + combined)


def interleaved_row(p: int, rank: int, m: int, v: int, n: int, combined: bool = False) -> list[str]:
    """The compute actions of a rank; microbatches of a chunk come in order, in each direction."""
    row = []
    seen: dict[int, int] = {}
    for code in convert_schedule_table_to_order(num_warmup(p, rank, m, v, n, combined), v, get_schedule_table(m, v, n)):
        mb = seen.get(code, 0)
        seen[code] = mb + 1
        chunk = abs(code) - 1
        row.append(f"{chunk * p + rank}{'F' if code > 0 else 'B'}{mb}")
    return row
