"""Put tuning logs of several machines together: same workload, plan and device are one record, what is of other sources is refused.

    python -m scripts.logs merge logs-of-a logs-of-b --output tuned

Each is a folder as --logs names it. Only logs are taken, no files beside them. Exit codes: 0 done, 1 refused, 2 wrong arguments.
"""
import os
import sys
import tempfile
from pathlib import Path

import tvm
import tvm_ffi

from schedules.tuning.log import MEASURED, RUN, Log, LogError
from schedules.tuning.merge import check, merge, read
from schedules.tuning.nearest import machine_of
from schedules.tuning.records import log_at
from scripts import cli, options


def make_parser():
    parser = options.parser("logs", __doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    command = commands.add_parser("merge", help="put folders of logs together", formatter_class=parser.formatter_class)
    command.add_argument("logs", nargs="+", help="folders of tuning logs")
    command.add_argument("--output", required=True, help="folder for all of them, which must be new")
    return parser


def run(args):
    """The command; an error that `cli.main` turns into an exit code."""
    roots, output = [Path(each).resolve() for each in args.logs], Path(args.output)
    if len(set(roots)) < 2:
        raise cli.UsageError(f"two folders of logs or more are put together, found {', '.join(args.logs)}: name another one")
    if not output.parent.is_dir() or output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise cli.UsageError(f"--output must be a new folder inside one that exists, found {args.output!r}: name another")
    cli.echo(command="logs merge", logs=args.logs, output=args.output)
    places = {}  # (device, name of the log) -> Sources
    for root in roots:
        for place in _places(root):
            places.setdefault((place.slug, place.name), []).append(read(place))
    for sources in places.values():
        check(sources, {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__})
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".merging-") as scratch:
        told = [_put(sources, Path(scratch, "logs")) for sources in places.values()]
        os.replace(Path(scratch, "logs"), output)
    print("\n".join(told), flush=True)


def _places(root):
    """The Logs under a root; LogError where there is none."""
    folders = sorted({path.parent for name in (RUN, MEASURED) for path in root.glob(f"*/*/{name}")})
    if not folders:
        raise LogError(f"a folder of tuning logs was wanted, found none at {root}: correct the path")
    for folder in folders:
        machine = machine_of(folder)
        if machine is None:
            raise LogError(f"{folder} must have a {RUN}, found none: end a session of tune there first")
        yield log_at(folder, machine.arch)


def _put(sources, root):
    """Write Sources together under a root; what came of it, for people."""
    first = sources[0].log
    best = merge(sources, Log(root, first.slug, first.subject, first.arch, first.bucket))
    total = sum(len(source.known) for source in sources)
    plans = len(set().union(*(source.known for source in sources)))
    return (f"{first.slug}/{first.name}: {plans} plans of {len(sources)} logs, {total - plans} duplicates dropped; "
            + ("no best plan, since each log's was refused by another" if best is None else
               f"best {1e3 * best.run['best']['seconds']:.4f} ms by {best.run['best'].get('measured')}, of {best.log.path.parent.parent}"))


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
