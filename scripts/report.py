"""Tell what tuning found: a page of HTML for each log, from the log alone.

    python -m scripts.report                                                       # next to each run.json of tuning_logs/
    python -m scripts.report --workload d128_f16_causal --output build/report.html

A page shows the search, what was refused, the limits of the chip, the winner with its loop nest, peers of benchmarks, and all candidates.
It needs no network and no script. No device is needed. Exit codes: 0 done, 1 a page cannot be written, 2 wrong arguments or a log that
cannot be used: then nothing is written.
"""
import sys
from pathlib import Path

from schedules.tuning.log import MEASURED, RUN, LogError, write_text
from scripts import cli, options
from scripts.page import page
from scripts.story import read_story

#: Name of a page in the folder of its log.
REPORT = "report.html"


def write_report(folder):
    """Write the page of the log in a folder into it; its path. LogError where the log cannot be used."""
    write_text(folder / REPORT, page(read_story(folder)))
    return folder / REPORT


def folders_of(logs, names):
    """Folders of all logs under a root, or of those with some names, by device and name; UsageError where one is not there."""
    found = sorted({path.parent for name in (RUN, MEASURED) for path in logs.glob(f"*/*/{name}")})
    there = ", ".join(dict.fromkeys(folder.name for folder in found)) or "none"
    for name in names:
        if name not in {folder.name for folder in found}:
            raise cli.UsageError(f"a tuning log of {name} was wanted, found {there} in {logs}: name one of these, or run scripts.tune")
    if not found:
        raise cli.UsageError(f"tuning logs were wanted, found none in {logs}: run scripts.tune, or name another folder with --logs")
    return [folder for folder in found if not names or folder.name in names]


def name_of(text):
    """Name of a log's folder: of a preset that of its workload, with a bucket where there is one; of gradients their own."""
    workload, *bucket = text.split("@", 1)
    return text if text.startswith("bwd_") else "@".join([cli.parse_workload(workload).name, *bucket])


def make_parser():
    parser = options.parser("report", __doc__)
    options.add_logs(parser)
    parser.add_argument("--workload", nargs="+", default=[], help="a preset such as d64_f32_full, or a log's name such as "
                        "fwd_d192_dv128_f16_causal, d64_f32_full@512x512 or bwd_d128_dv128_f16_full+any-order; none: all logs")
    parser.add_argument("--output", type=Path, default=None, help=f"the file for the page of one log; None: {REPORT} in the log's folder")
    return parser


def run(args):
    logs = cli.log_folder(args.logs)
    folders = folders_of(logs, [name_of(text) for text in args.workload])
    if args.output and len(folders) != 1:
        listed = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in folders)
        raise cli.UsageError(f"--output takes the page of one log, found {listed}: name one with --workload, or leave --output out")
    if args.output and (args.output.is_dir() or not args.output.parent.is_dir()):
        raise cli.UsageError(f"--output must be a file in a folder that exists, found {str(args.output)!r}: correct the path")
    cli.echo(command="report", logs=logs, workload=[folder.name for folder in folders], output=args.output)
    try:
        pages = {args.output or folder / REPORT: page(read_story(folder)) for folder in folders}
    except LogError as error:
        raise cli.UsageError(str(error)) from error
    for path, text in pages.items():
        write_text(path, text)
        print(path)


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
