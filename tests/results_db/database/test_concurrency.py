import subprocess
import sys
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.postgres import upgraded
from tests.kit.store import (
    at_once,
    completed,
    make_campaign,
    make_worker,
    post_outcome,
    take_leases,
)

LEASE_EVERYTHING = """
import sys
from pathlib import Path
from results_db.database.data_dir import DataDir
from results_db.store import Store
from tests.kit.store import take_leases
store = Store(DataDir(Path(sys.argv[1])).database_url)
while leases := take_leases(store, sys.argv[2], 1):
    print(leases[0].trial_id, leases[0].attempt)
"""


def test_processes_that_lease_at_once_never_get_the_same_trial(tmp_path: Path) -> None:
    store = Store.open(upgraded(tmp_path))
    campaign = make_campaign(store)
    trials = [store.trials.add(campaign, Layout(micro_batch_size=n)).id for n in range(1, 31)]
    workers = [make_worker(store, f"w{n}").id for n in range(2)]
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
    with closing(Store.open(upgraded(tmp_path))) as store:
        campaign = make_campaign(store)
        wanted = 20
        ran: Counter[int] = Counter()

        def drive() -> None:
            for number in range(1, wanted + 1):
                store.trials.add(campaign, Layout(micro_batch_size=number))
                store.driver.move_clocks()

        def work(worker_id: str) -> None:
            while store.campaigns.count_trials(campaign)["COMPLETED"] < wanted:
                for lease in take_leases(store, worker_id, 1):
                    ran[lease.trial_id] += 1
                    assert post_outcome(store, lease.trial_id, lease.attempt, completed()).accepted

        workers = [make_worker(store, f"w{n}").id for n in range(3)]
        at_once(drive, *(partial(work, worker) for worker in workers))
        assert len(ran) == wanted
        assert set(ran.values()) == {1}
        places = [trial.ended_seq for trial in store.trials.ended_since(campaign, 0)]
        assert places == list(range(1, wanted + 1))
