"""How attention is computed: hardware rows, plans, schedules as stories of stages, lowering, tuning and the artefact.

Nothing here reads arguments, environment, working directory or clock: callers pass them in.
"""
