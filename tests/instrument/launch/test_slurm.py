import pytest

from instrument.launch.slurm import first_host, tasks_per_node, torchrun_environ


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu3", "gpu3"),
        ("gpu[003-007,12],login1", "gpu003"),
        ("node-a[1,3-5]", "node-a1"),
        ("rack[2-3]n[07-09]", "rack2n07"),
        ("a,b[1-2]", "a"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_tasks_per_node_are_counted_out() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("") == []


SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODELIST": "gpu[03-06]",
    "SLURM_JOB_ID": "20123",
}


def test_a_task_of_srun_gets_what_torchrun_would_have_set() -> None:
    assert torchrun_environ(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "15123",
    }


def test_what_the_script_was_given_stays() -> None:
    result = torchrun_environ({**SRUN, "MASTER_ADDR": "10.0.0.1", "RANK": "0"})
    assert result.keys() == {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"}


def test_outside_srun_nothing_is_set() -> None:
    assert torchrun_environ({"RANK": "0"}) == {}
    assert torchrun_environ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) == {}  # a batch script, not a task
