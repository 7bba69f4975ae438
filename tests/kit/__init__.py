"""What tests are made of: services, stores, clients, and hostile input. Look here first.

    api             a service in this process (`Api`), its client (`client_of`), a campaign document
    services        `layout-tuner serve` in a process of its own; commands in theirs, and in
                    this one those that are refused before anything starts
    live            a service on a socket in this process, and watchers of its events
    populated       a service with something of everything in it
    persons         persons at browsers, as far as HTTP shows them
    store           campaigns, workers, leases, measurements and outcomes for a store; clocks
    postgres        databases that tests borrow: `sqlite_url`, `postgres_url`, `database_url`
    cheap_campaign  a campaign with cheap probes beside a full one
    campaigns       a campaign as a value
    layouts         a layout that leaves no knob at its default, and grids of layouts
    allocation      what a worker reports of its allocation
    bodies          a valid body of each route that takes JSON
    page            the elements and texts of an HTML page
    terminal        a pseudo-terminal, and what it shows
    waiting         waiting for another process or thread
    worker_loop     a worker in the test's own thread, with its service, trials and probes
    fake_service    a small service that speaks the worker protocol, and does as a test wishes
    fake_launcher   a launcher that does as a test says
    local_ranks     this machine as one node or several, with real ranks; groups and probes there
    side_by_side    several groups of ranks on one node, and what each of them says
    python_process  programs in a Python of their own
    run_warden      the process above a run of the tests that ends what they leave
    odd_values      values that no reasonable client sends, for all fuzzers
    hostile_texts   texts that would become code, or another text
    markdown        the pages of the documentation

Fixtures that the tests of several folders share are in the nearest `conftest.py`: `api`, `http`,
`client` and `command` of a service in this process in tests/api, with `data_dir` and `store` for
tests that start their own; `service`, `store`, `run` and `measured` of a service in a process of
its own in tests/layout_tuner/cli/service; a small `service` with its `client`, `mark`, which finds
whatever processes a test leaves, and `place` for its temporary files in tests/workers; databases in
tests/conftest.py.
"""
