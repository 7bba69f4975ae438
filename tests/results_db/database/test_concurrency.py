import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from results_db.errors import TrialDuplicateError
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.postgres import upgraded
from tests.kit.store import completed, make_campaign, make_worker

LEASE_EVERYTHING = """
import sys
from pathlib import Path
from results_db.database.data_dir import DataDir
from results_db.store import Store
store = Store(DataDir(Path(sys.argv[1])).database_url)
while leases := store.leases.lease(sys.argv[2], 1):
    print(leases[0].trial_id, leases[0].attempt)
"""


def test_processes_that_lease_at_once_never_get_the_same_trial(tmp_path: Path) -> None:
    store = Store.open(upgraded(tmp_path))
    campaign = make_campaign(store)
    trials = [store.trials.add(campaign, Layout(micro_batch_size=n)).id for n in range(1, 41)]
    workers = [make_worker(store, f"w{n}").id for n in range(3)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEASE_EVERYTHING, str(tmp_path), worker],
            stdout=subprocess.PIPE,
            text=True,
        )
        for worker in workers
    ]
    leased = [line for process in processes for line in process.communicate()[0].splitlines()]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(leased) == sorted(f"{trial} 1" for trial in trials)
    store.close()


def test_threads_that_lease_report_and_write_at_once_lose_nothing(tmp_path: Path) -> None:
    store = Store.open(upgraded(tmp_path))
    campaign = make_campaign(store)
    wanted = 40
    ran: Counter[int] = Counter()
    faults: list[BaseException] = []

    def drive() -> None:
        for number in range(1, wanted + 1):
            store.trials.add(campaign, Layout(micro_batch_size=number))
            store.driver.move_clocks()

    def work(worker_id: str) -> None:
        while store.campaigns.count_trials(campaign)["COMPLETED"] < wanted:
            for lease in store.leases.lease(worker_id, 1):
                ran[lease.trial_id] += 1
                assert store.outcomes.post(lease.trial_id, lease.attempt, completed()).accepted

    def guarded(job: object, *arguments: object) -> None:
        try:
            job(*arguments)  # type: ignore[operator]
        except BaseException as error:
            faults.append(error)
            raise

    workers = [make_worker(store, f"w{n}").id for n in range(4)]
    threads = [threading.Thread(target=guarded, args=(drive,))]
    threads += [threading.Thread(target=guarded, args=(work, worker)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert len(ran) == wanted
    assert set(ran.values()) == {1}
    places = [trial.ended_seq for trial in store.trials.ended_since(campaign, 0)]
    assert places == list(range(1, wanted + 1))
    store.close()


def test_of_two_that_propose_one_layout_one_is_refused(tmp_path: Path) -> None:
    store = Store.open(upgraded(tmp_path))
    campaign = make_campaign(store)
    barrier = threading.Barrier(4)
    answers: list[str] = []

    def propose() -> None:
        barrier.wait(10)
        try:
            store.trials.add(campaign, Layout())
            answers.append("added")
        except TrialDuplicateError:
            answers.append("refused")

    threads = [threading.Thread(target=propose) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == ["added", "refused", "refused", "refused"]
    store.close()
