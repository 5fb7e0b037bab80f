"""Tables of messages that do not say which way they go."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from pptrace.ingest import open_inputs
from pptrace.schedule.registry import build
from tests.support.analysed import recognise
from tests.support.extent import by_turns
from tests.support.read import read_traces
from tests.support.synthetic import record

SHAPES = [("1f1b", 3, 4, 1), ("interleaved-1f1b", 2, 4, 2), ("interleaved-1f1b", 4, 4, 2), ("dualpipe-v", 2, 6, 2)]


def table_of(shape: tuple[str, int, int, int], path: Path) -> pd.DataFrame:
    """Write ops and messages as a table without directions; the messages as they are."""
    run = recognise(record(build(*shape), latency=70).traces())
    rows = pd.concat([run.ops, run.comms], ignore_index=True).drop(columns=["direction", "match"])
    whole = {name: "Int64" for name in rows if rows[name].dtype == float}
    rows.astype(whole).to_csv(path, index=False)
    return in_order(run.comms)


def in_order(comms: pd.DataFrame) -> pd.DataFrame:
    p2p = comms[comms["kind"].isin(("send", "recv"))]
    return p2p.sort_values(["rank", "start_ns", "kind", "stage", "microbatch"]).reset_index(drop=True)


@pytest.mark.parametrize(("shape", "names_peers"), by_turns([*SHAPES, SHAPES[1]], [True, False]), ids=str)
def test_messages_without_directions_match_by_their_stages_and_what_is_known_of_their_peers(
    shape: tuple[str, int, int, int], names_peers: bool, tmp_path: Path
) -> None:
    expected = table_of(shape, tmp_path / "ops.csv")
    if not names_peers:
        rows = pd.read_csv(tmp_path / "ops.csv", dtype=str, keep_default_na=False)
        rows.drop(columns=["peer"]).to_csv(tmp_path / "ops.csv", index=False)
    read = in_order(recognise(read_traces(open_inputs([tmp_path / "ops.csv"]), 1).traces).comms)
    assert read["direction"].tolist() == expected["direction"].tolist()
    assert read["peer"].tolist() == expected["peer"].tolist()
    assert (read["match"] >= 0).all()
    ends = read.merge(read, on="match")
    sent = ends[(ends["kind_x"] == "send") & (ends["kind_y"] == "recv")]
    assert (sent["microbatch_x"] == sent["microbatch_y"]).all()
    assert len(sent) == len(read) // 2


def test_one_of_two_messages_that_may_go_either_way_keeps_none(tmp_path: Path) -> None:
    table_of(("interleaved-1f1b", 2, 4, 2), tmp_path / "ops.csv")
    rows = pd.read_csv(tmp_path / "ops.csv")
    between = (rows["rank"] == 1) & (rows["stage"] == 1) & (rows["microbatch"] == 2) & (rows["kind"] == "send")
    assert between.sum() == 2
    left = rows.drop(rows.index[between][1]).astype({name: "Int64" for name in rows if rows[name].dtype == float})
    left.to_csv(tmp_path / "ops.csv", index=False)
    comms = recognise(read_traces(open_inputs([tmp_path / "ops.csv"]), 1).traces).comms
    alone = comms[(comms["rank"] == 1) & (comms["stage"] == 1) & (comms["microbatch"] == 2) & (comms["kind"] == "send")]
    assert alone["direction"].tolist() == [""]
    assert alone["match"].tolist() == [-1]
