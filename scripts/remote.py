"""Tuning over a fleet, as `scripts.tune` sees it: the options, the workers, and the device that they are."""
import argparse
import re
from contextlib import contextmanager

from schedules.arch import ArchError, CpuArch, cuda_arch, gpu_named
from schedules.tuning.fleet import Fleet
from scripts import cli


def address(text):
    """Type of HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"HOST:PORT is wanted, such as 10.0.0.1:9190, found {text!r}")
    return host.strip("[]"), int(port)


def key(text):
    """Type of --key: TVM's servers end it at white space and read a part behind a colon."""
    if not re.fullmatch(r"[\w.-]+", text):
        raise argparse.ArgumentTypeError(f"a word of letters, digits, '-', '_' and '.' is wanted, found {text!r}")
    return text


def add_fleet(parser):
    """--rpc and --key."""
    parser.add_argument("--rpc", type=address, metavar="HOST:PORT", help="tracker of a fleet whose workers measure, which "
                        "python -m scripts.fleet starts; None: measure on this machine")
    parser.add_argument("--key", type=key, help="of the workers that are meant, with --rpc")


@contextmanager
def fleet_of(args):
    """The Fleet of --rpc, --key and --target, whose workers are given back in the end; None without --rpc."""
    if (args.rpc is None) != (args.key is None):
        raise cli.UsageError(f"--rpc and --key name a fleet together, found --rpc {args.rpc} and --key {args.key}: give both or none")
    if args.rpc is None:
        yield None
        return
    wanted = None if args.target in ("auto", "cpu") else _cuda(args.target)
    fleet = Fleet(args.rpc, args.key, lambda facts: _unfit(facts, args.target, wanted), lambda sentence: print(sentence, flush=True))
    try:
        yield fleet
    finally:
        fleet.close()


def device_of(fleet, target):
    """Device that a fleet's workers are, with the row of schedules.arch that --target wants."""
    facts = fleet.facts
    if facts["kind"] == "cpu":
        return cli.Device("cpu", CpuArch(**facts["arch"]), facts["slug"], facts["name"], is_here=False)
    arch = cuda_arch(facts["arch"]["name"] if target == "auto" else target)
    return cli.Device("cuda", arch, facts["slug"], facts["name"], gpu_named(facts["slug"], arch.name, facts["sms"]), is_here=False)


def _cuda(target):
    try:
        return cuda_arch(target)
    except ArchError as error:
        raise cli.UsageError(f"--target is auto, cpu or an architecture; {error}") from error


def _unfit(facts, target, wanted):
    """Why a worker is none for --target: the device must be the one that kernels are tuned for, not one that can run them."""
    fits = target == "auto" or (facts["kind"] == "cpu" if wanted is None else facts["arch"].get("capability") == list(wanted.capability))
    return None if fits else f"a {facts['slug']} ({facts['arch']['name']}) where --target is {target}"
