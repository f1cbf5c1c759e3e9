"""Tuning: MetaSchedule draws plans, workers build them and prove them right before they are timed, the log keeps what was found.

Main process: search (the loop), task (MetaSchedule's view of one space), features, builder, runner, log and records (files).
Worker processes, started by builder and runner: build_worker, run_worker with gate.
"""
