"""Reading where a rank hangs from faulthandler's dumps."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

from hypothesis import given
from hypothesis import strategies as st

from instrument.launch.watch.stacks import Frame, describe_wait, main_stack, parse_stacks

DUMP = """\
Thread 0x00007f0a (most recent call first):
  File "/env/instrument/launch/ending.py", line 97 in _watch
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f0b (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2799 in recv
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/p2p.py", line 14 in receive_forward
  File "/home/me/train.py", line 30 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "/env/instrument/launch/worker.py", line 200 in _run_script
  File "/env/instrument/launch/worker.py", line 250 in main
"""


def test_the_script_s_thread_is_found_without_the_frames_of_the_launcher() -> None:
    frames = main_stack(parse_stacks(DUMP))
    assert [frame.function for frame in frames] == ["recv", "wrapper", "receive_forward", "<module>"]
    assert frames[3] == Frame("/home/me/train.py", 30, "<module>")


def test_a_wait_is_named_by_the_call_that_the_user_s_own_code_makes() -> None:
    assert describe_wait(main_stack(parse_stacks(DUMP))) == "in recv, called from receive_forward (/home/me/p2p.py:14)"


def test_a_rank_that_works_in_its_own_code_is_named_by_that_line() -> None:
    assert describe_wait((Frame("/home/me/train.py", 3, "spin"),)) == "in spin (/home/me/train.py:3)"


def test_a_dump_without_the_script_says_that_no_stack_could_be_read() -> None:
    assert describe_wait(main_stack(parse_stacks(""))) == "no Python stack could be read"


def test_what_faulthandler_writes_here_is_read() -> None:
    started, release = threading.Event(), threading.Event()

    def linger() -> None:
        started.set()
        release.wait()

    thread = threading.Thread(target=linger)
    thread.start()
    started.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = parse_stacks(file.read())
    release.set()
    thread.join()
    assert any(frame.function == "linger" for frames in threads for frame in frames)
    assert any(frame.function == "test_what_faulthandler_writes_here_is_read" for frames in threads for frame in frames)


@given(st.text())
def test_damaged_dumps_are_read_without_an_error(text: str) -> None:
    assert isinstance(describe_wait(main_stack(parse_stacks(DUMP[:90] + text))), str)


def test_frames_of_hooks_are_not_shown() -> None:
    text = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
        '  File "/x/instrument/adapters/hooks.py", line 94 in observed\n'
        '  File "/home/me/train.py", line 7 in <module>\n'
        '  File "/x/instrument/launch/worker.py", line 200 in run\n'
    )
    assert [frame.function for frame in main_stack(parse_stacks(text))] == ["all_reduce", "<module>"]
