"""Start what a fleet of tuning machines is made of: TVM's tracker on one, and a worker for each GPU, or on each machine without any.

    python -m scripts.fleet tracker --host 10.0.0.1
    CUDA_VISIBLE_DEVICES=0 python -m scripts.fleet worker --tracker 10.0.0.1:9190 --key h200 --host 10.0.0.2
    python -m scripts.tune --rpc 10.0.0.1:9190 --key h200 --target sm_90a --workload d128_f16_causal

A worker runs whatever it is sent, as the user who started it: TVM's RPC has neither passwords nor encryption. So both listen to this
machine alone, unless --host names an address that others reach, and that belongs into a network of people who are trusted with the machine.
A worker serves one tuner at a time, from the same commit of this project, and needs no compiler. Ctrl-C ends either.
Exit codes: 0 ended by Ctrl-C, 1 failed, 2 wrong arguments.
"""
import functools
import ipaddress
import os
import signal
import sys
import threading

from tvm import rpc
from tvm.rpc.base import TrackerCode

from schedules.lowering.toolkit import ToolkitError, find_toolkit
from schedules.tuning import fleet_link, fleet_worker
from schedules.tuning.fleet import FleetError
from scripts import cli, options, remote

HERE = "127.0.0.1"
TRACKER_PORT, WORKER_PORT, WORKER_PORTS = 9190, 9091, 100
#: Seconds between looks at a worker's server; how often and how long the tracker is asked whether it knows the first one.
LOOK = 1.0
REGISTERED_LOOK, REGISTERED_LOOKS = 0.1, 100


def make_parser():
    parser = options.parser("fleet", __doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    tracker = commands.add_parser("tracker", help="start TVM's tracker", formatter_class=parser.formatter_class)
    tracker.add_argument("--port", type=_port, default=TRACKER_PORT, help="to listen at")
    worker = commands.add_parser("worker", help="serve tuners with this machine's device", formatter_class=parser.formatter_class)
    worker.add_argument("--tracker", type=remote.address, metavar="HOST:PORT", required=True, help="to register with")
    worker.add_argument("--key", type=remote.key, required=True, help="by which tuners ask for workers such as this one")
    worker.add_argument("--target", choices=("auto", "cpu"), default="auto", help="auto: the first GPU that is visible, else the CPU")
    worker.add_argument("--port", type=_port, default=WORKER_PORT, help=f"to listen at; the first free one of {WORKER_PORTS} from here on")
    for command in (tracker, worker):
        command.add_argument("--host", default=HERE, help="address to listen at; other machines reach the default one not at all")
    return parser


def _port(text):
    return remote.address(f"{HERE}:{text}")[1]


def run(args):
    """The command; an exit code, or an error that `cli.main` turns into one."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return {"tracker": track, "worker": work}[args.what](args)


def track(args):
    """Run TVM's tracker until Ctrl-C."""
    try:
        from tvm.rpc.tracker import PopenTrackerServerState
    except ImportError as error:
        raise ToolkitError("TVM's tracker needs tornado, found none: pip install 'apache-tvm[rpc]==0.27.*'") from error
    try:
        # In this process, not in one of its own as rpc.Tracker does it: that one would outlive it when it is killed.
        tracker = PopenTrackerServerState(args.host, args.port, args.port + 1, silent=True)
    except (OSError, ValueError) as error:
        raise _no_address(args, error) from error
    cli.echo(command="fleet tracker", listens=f"{args.host}:{tracker.port}")
    try:
        tracker.thread.join()
    except KeyboardInterrupt:
        os._exit(cli.DONE)  # the tracker's thread knows no other end


def work(args):
    """Serve this machine's device until Ctrl-C."""
    device = cli.find_device(args.target)
    if _loopback(args.host) and not _loopback(args.tracker[0]):
        raise cli.UsageError(f"a worker of the tracker at {args.tracker[0]} must listen where other machines reach it, found --host "
                             f"{args.host}: name an address of this machine")
    try:
        fleet_link.ask_tracker(args.tracker, TrackerCode.SUMMARY)
        server = _registered(args, device)
    except fleet_link.NoTracker as error:
        raise FleetError(f"a tracker was wanted at {args.tracker[0]}:{args.tracker[1]}, found {error}: start python -m scripts.fleet "
                         "tracker there, or correct --tracker") from error
    cli.echo(command="fleet worker", device=device.description, slug=device.slug, target=device.arch.name, key=args.key,
             tracker=":".join(map(str, args.tracker)), listens=f"{args.host}:{server.port}")
    try:
        while not threading.Event().wait(LOOK):
            if not _alive(server):
                server.terminate()
                server = _serve(args, device)
                print(f"the server ended, with its session or for want of a tracker: a new one listens at {args.host}:{server.port}",
                      flush=True)
    except KeyboardInterrupt:
        server.terminate()


def _serve(args, device):
    """TVM's RPC server in a process of its own, registered with the tracker."""
    sms = device.gpu and device.gpu.sms
    facts = fleet_worker.facts_of(device.kind, device.arch, device.slug, device.description, sms, cli.nvidia_driver(device))
    try:
        toolkit = find_toolkit(os.environ) if device.kind == "cuda" else None
    except ToolkitError:
        toolkit = None  # nothing is compiled here; CUDA's runtime library is looked for elsewhere
    try:
        return rpc.Server(args.host, args.port, args.port + WORKER_PORTS, tracker_addr=args.tracker, key=args.key, silent=True,
                          server_init_callback=functools.partial(fleet_worker.offer, facts, toolkit))
    except Exception as error:  # of whatever type it was in that process, with a traceback for a text
        raise _no_address(args, error) from error


def _registered(args, device):
    """The first server, once the tracker lists it; FleetError where it does not, NoTracker."""
    # Sessions work in folders of their own, from which their processes must find the project, and a user's masks.
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(cli.ROOT), *paths])
    server = _serve(args, device)
    for _ in range(REGISTERED_LOOKS):
        told = fleet_link.ask_tracker(args.tracker, TrackerCode.SUMMARY)
        if any(entry["key"] == f"server:{args.key}" and entry["addr"][1] == server.port for entry in told["server_info"]):
            return server
        threading.Event().wait(REGISTERED_LOOK)
    raise FleetError(f"a worker was to be listed by the tracker at {args.tracker[0]}:{args.tracker[1]}, found that it is not: start anew")


def _alive(server):
    """Whether a server takes clients, or has one."""
    try:
        server.proc.send(fleet_worker.listening)
        return server.proc.recv()
    except ChildProcessError:
        return False


def _no_address(args, error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    return FleetError(f"the {args.what} must listen at {args.host}:{args.port}, found that it cannot ({lines[-1] if lines else error!r}): "
                      "name another --host or --port")


def _loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
