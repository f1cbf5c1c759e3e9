"""Commands: tune, export, run, bench, show. Each parses, calls and prints; what it does is in te_defs and schedules."""
