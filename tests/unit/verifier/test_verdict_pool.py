"""Workers under hostile tasks: hangs, deaths, payloads. Real spawned processes, one pool for most tests."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.verifier import tasks, worker
from services.verifier.pool import Observer, PoolBusy, PoolOptions, PoolStopped, VerdictPool, WorkerStartError
from services.verifier.verdicts import Kind

LIMIT_SECONDS = 2.0
HANGS = "\\boxed{\\binom{1000000000}{500000000}}"
GOOD = tasks.judge_math("\\frac{1}{2}", "\\boxed{0.5}")
WAIT = 60


@pytest.fixture(scope="module")
def replaced():
    return Counter()


@pytest.fixture(scope="module")
def pool(replaced):
    options = PoolOptions(workers=2, limit_seconds=LIMIT_SECONDS, domains=(worker.MATH,), queue_limit=100)

    def count(cause):
        replaced[cause] += 1

    with VerdictPool(options, Observer(replaced=count)) as started:
        yield started


def hanging(number):
    return tasks.judge_math(str(number), HANGS)


def until(condition, seconds=WAIT):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_workers_are_spawned_and_warm_before_the_first_task(pool):
    began = time.monotonic()
    assert pool.submit(tasks.judge_math("x^2", "\\boxed{x \\cdot x}")).result(WAIT).kind is Kind.CORRECT
    assert time.monotonic() - began < LIMIT_SECONDS
    for pid in pool.worker_pids:
        command = " ".join(psutil.Process(pid).cmdline())
        assert "multiprocessing.spawn" in command, "a forked worker shows its parent's command line"


def test_verdicts_are_right_from_any_thread(pool):
    found = []
    thread = threading.Thread(target=lambda: found.append(pool.submit(GOOD).result(WAIT)))
    thread.start()
    thread.join(WAIT)
    assert [v.kind for v in found] == [Kind.CORRECT]


def test_after_many_hanging_answers_a_good_one_is_judged_and_the_pool_keeps_its_size(pool, replaced):
    before = replaced["timeout"]
    bad = [pool.submit(hanging(i)) for i in range(3)]
    good = pool.submit(tasks.judge_math("\\frac{1}{3}", "\\boxed{\\frac{2}{6}}"))
    assert good.result(WAIT).kind is Kind.CORRECT
    for future in bad:
        verdict = future.result(WAIT)
        assert (verdict.kind, verdict.word) == (Kind.NO_VERDICT, "timeout")
    assert replaced["timeout"] == before + 3
    until(lambda: len(pool.worker_pids) == 2)
    mine = [p for p in multiprocessing.active_children() if p.name == "rollwise-verifier-worker"]
    assert len(mine) == 2


def test_a_time_out_is_not_remembered(pool):
    task = hanging(77)
    assert pool.submit(task).result(WAIT).word == "timeout"
    assert pool._recall(task) is None
    assert pool._recall(GOOD) is not None


def test_a_worker_killed_while_it_judges_costs_at_most_its_own_item(pool, replaced):
    # Under load a killed worker may still be warming up, which is counted as a failed start.
    before = replaced["died"] + replaced["failed"]
    until(lambda: len(pool.worker_pids) == 2)
    pids = pool.worker_pids
    stuck = pool.submit(hanging(5))
    time.sleep(0.3)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    others = [pool.submit(tasks.judge_math(str(i), f"\\boxed{{{i}.0}}")) for i in range(20)]
    assert all(f.result(WAIT).kind is Kind.CORRECT for f in others)
    assert stuck.result(WAIT).kind is Kind.NO_VERDICT
    until(lambda: len(pool.worker_pids) == 2)
    assert replaced["died"] + replaced["failed"] > before


def test_an_idle_worker_that_dies_is_replaced(pool):
    old = pool.worker_pids[0]
    os.kill(old, signal.SIGKILL)
    until(lambda: len(pool.worker_pids) == 2 and old not in pool.worker_pids)
    assert pool.problem() is None
    assert pool.submit(tasks.judge_math("2", "\\boxed{\\sqrt{4}}")).result(WAIT).kind is Kind.CORRECT


PAYLOADS = [
    "__import__('os').system('touch {path}')",
    "\\boxed{{__import__('pathlib').Path('{path}').touch()}}",
    "\\boxed{{[__import__('os').getpid(), 2]}}",
    "Answer: exec(\"open('{path}','w')\")",
    "\\boxed{{\\text{{open('{path}','w')}}}}",
    "#### eval(compile('1','','eval'))",
    "$().__class__.__base__.__subclasses__()$",
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload_strings_are_wrong_run_nothing_and_leave_later_verdicts_alone(pool, tmp_path, payload):
    target = tmp_path / "ran"
    verdict = pool.submit(tasks.judge_math("3", payload.format(path=target))).result(WAIT)
    assert verdict.kind is Kind.WRONG
    assert not target.exists()
    assert pool.submit(tasks.judge_math("3", "\\boxed{4}")).result(WAIT).kind is Kind.WRONG
    assert pool.submit(tasks.judge_math("3", "\\boxed{\\sqrt{9}}")).result(WAIT).kind is Kind.CORRECT


async def test_items_not_judged_by_the_deadline_are_no_verdict_and_the_others_stand(pool):
    await pool.judge([GOOD], timeout_seconds=WAIT)
    began = time.monotonic()
    found = await pool.judge([GOOD, hanging(11), hanging(12), hanging(13), hanging(14)], timeout_seconds=0.7)
    assert time.monotonic() - began < LIMIT_SECONDS
    assert found[0].kind is Kind.CORRECT
    assert [(v.kind, v.word) for v in found[1:]] == [(Kind.NO_VERDICT, "timeout")] * 4
    # What nobody waits for any more is not judged either.
    until(lambda: pool.queued == 0, 4 * LIMIT_SECONDS)


async def test_a_full_queue_refuses_and_says_what_to_do(pool):
    with pytest.raises(PoolBusy, match="try again later"):
        await pool.judge([GOOD] * 101, timeout_seconds=5)
    assert (await pool.judge([GOOD], timeout_seconds=30))[0].kind is Kind.CORRECT
    assert await pool.judge([], timeout_seconds=5) == []


def test_a_domain_that_is_not_built_gives_no_verdict(pool):
    verdict = pool.submit(tasks.unsupported("code")).result(WAIT)
    assert verdict.kind is Kind.NO_VERDICT
    assert verdict.reason == "unsupported domain 'code'"


kinds = st.sampled_from(["12", "13", "\\boxed{12}", "", "<think>12", "9**9**9", "\\boxed{", "no answer here at all"])
golds = st.sampled_from(["12", "foo bar", "", "\\frac{24}{2}"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(golds, kinds), max_size=40))
def test_any_mix_gives_exactly_one_verdict_a_task_in_order(pool, mix):
    found = asyncio.run(pool.judge([tasks.judge_math(g, c) for g, c in mix], timeout_seconds=WAIT))
    assert len(found) == len(mix)
    for (gold, completion), verdict in zip(mix, found, strict=True):
        if gold in ("", "foo bar"):
            assert verdict.kind is Kind.NO_VERDICT
        else:
            assert verdict.kind is (Kind.CORRECT if completion in ("12", "\\boxed{12}") else Kind.WRONG)
        assert 0 <= verdict.score <= 1


def test_a_worker_out_of_memory_is_a_fault_and_is_replaced():
    causes = Counter()
    options = PoolOptions(workers=1, limit_seconds=20, memory_bytes=320 << 20, domains=(worker.MATH,), max_tasks=3)
    with VerdictPool(options, Observer(replaced=lambda cause: causes.update([cause]))) as small:
        verdict = small.submit(tasks.judge_math("1" * (100 << 20), "\\boxed{1}")).result(WAIT)
        assert (verdict.kind, verdict.word) == (Kind.NO_VERDICT, "fault")
        assert small.submit(GOOD).result(WAIT).kind is Kind.CORRECT
        for i in range(4):
            assert small.submit(tasks.judge_math(str(i), f"\\boxed{{{i}.0}}")).result(WAIT).kind is Kind.CORRECT
        assert causes["recycled"] >= 1


def test_a_stopped_pool_leaves_no_process_and_refuses_work():
    stopped = VerdictPool(PoolOptions(workers=1, limit_seconds=30, domains=(worker.MATH,)))
    stopped.start()
    pids = stopped.worker_pids
    waiting = [stopped.submit(hanging(i)) for i in range(3)]
    stopped.stop()
    stopped.stop()
    assert [f.result(1).word for f in waiting] == ["fault"] * 3
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(PoolStopped):
        stopped.submit(GOOD)
    assert stopped.problem() is not None


def test_a_worker_that_cannot_start_is_reported_at_start():
    with pytest.raises(WorkerStartError, match="could not be started"):
        VerdictPool(PoolOptions(workers=1, domains=(worker.MATH,), start_seconds=0.01)).start()
    with pytest.raises(ValueError, match="workers"):
        VerdictPool(PoolOptions(workers=0))
