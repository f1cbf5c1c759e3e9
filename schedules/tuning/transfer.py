"""What to try first on a device that has no log of its own: the plans that were best on the nearest one that has. They are built, proved
and timed like any other; only their order comes from there."""
from pathlib import Path
from types import SimpleNamespace

from schedules.arch import CUDA_ARCHS
from schedules.tuning.log import RUN, Log, LogError, check_run, read_json, shape_of

#: Plans of each part that are taken over, the best first.
HINTS = 4


def hints(root, slug, subject, arch, parts):
    """(name of the nearest other device with a log of the subject, {part: [(family name, plan)]} that fit here); (None, {}) without one.

    root   folder of all logs
    slug   name of this device
    arch   row of schedules.arch that kernels are lowered for
    parts  {part: spaces}, as `subject.parts`
    """
    found = []
    for path in sorted(Path(root).glob(f"*/{subject.name}/{RUN}")):
        distance = _distance(path, arch)
        if path.parent.parent.name != slug and distance is not None:
            found.append((distance, path.parent.parent.name))
    for _, other in sorted(found):
        keys = _best_of(root, other, subject, parts)
        if any(keys.values()):
            return other, keys
    return None, {}


def _distance(path, arch):
    """How far another log's target is from this one: steps of compute capability; None where it is of another kind, or cannot be read."""
    try:
        run = read_json(path)
        check_run(path, run)
    except LogError:  # it is that device's tuner who has to say so
        return None
    other = CUDA_ARCHS.get(run["arch"])
    if other is None or arch.kind == "cpu":
        return int(run["arch"] != arch.name) if other is None and arch.kind == "cpu" else None
    (major, minor), (other_major, other_minor) = arch.capability, other.capability
    return abs(10 * (major - other_major) + minor - other_minor)


def _best_of(root, slug, subject, parts):
    """{part: keys of the best plans in a log that fit here}, the winner of the last round first."""
    run = read_json(Path(root) / slug / subject.name / RUN)
    log = Log(root, slug, subject, SimpleNamespace(name=run["arch"]))
    try:
        known, _ = log.read_measured(subject.members(), shape_of(run["shape"]))
    except LogError:
        known = {}
    best = run.get("best") and subject.key_of(run["best"]["family"], run["best"]["plan"])
    own = subject.split(best) if best else {}
    ranking = sorted((key for key, outcome in known.items() if outcome.seconds is not None), key=lambda key: known[key].seconds)

    def fits(key, spaces):
        return any(space.owns(*key) and space.fits(key[1]) for space in spaces)
    return {part: [key for key in dict.fromkeys([*([own[part]] if part in own else []), *ranking]) if fits(key, spaces)][:HINTS]
            for part, spaces in parts.items()}
