"""Tuning: MetaSchedule draws plans, workers build them and prove them right before they are timed, the log keeps what was found.

What is tuned is a subject: the forward pass of a workload, or its gradients (subjects). Suites list several, which share a budget (rounds).
Main process: search (the loop), several (one loop after the other, for gradients), last_round, task (MetaSchedule's view of one space),
features, builder, runner, log and records (files), nearest (whose plans a device borrows), reasons (why plans are refused).
Worker processes, started by builder and runner through processes: build_worker, run_worker with gate and sensors.
Over a fleet: fleet, fleet_tools (builder and runner), fleet_link (a process for each worker), fleet_worker (at the other machine). merge.
"""
