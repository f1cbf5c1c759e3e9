"""MetaSchedule's builder: one pool of processes for the whole run. LocalBuilder starts a new one in every batch, and imports TVM anew."""
import concurrent.futures
import itertools
import subprocess
from pathlib import Path

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.support.popen_pool import PopenPoolExecutor

from schedules.space import decisions
from schedules.tuning import build_worker

#: Seconds that one kernel may take to build.
TIMEOUT = 120


@derived_object
class PoolBuilder(ms.builder.PyBuilder):
    """Builds the symbolic kernels of annotated modules; what is in their bodies does not matter.

    workers      number of processes
    toolkit      Toolkit for CUDA, None for CPU kernels
    stub_folder  where the stand-in for a missing driver goes
    folder       where the .so files go; the caller removes it
    """

    def __init__(self, workers, toolkit, stub_folder, folder):
        super().__init__()
        self.workers, self.folder = workers, Path(folder)
        self.spaces = ()
        self.built = {}
        self._numbers = itertools.count()
        # The workers' stderr would mix nvcc's words into the progress lines; what went wrong comes back with the result.
        self._pool = PopenPoolExecutor(workers, TIMEOUT, build_worker.start, (toolkit, stub_folder), stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)

    def build(self, build_inputs):
        futures = [self.begin(entry.mod) for entry in build_inputs]
        return [self.result(future) for future in futures]

    def begin(self, mod, whole=False):
        """Start to build the plan that a module is annotated with; a future for `result`.

        whole  with the twin for scales below zero
        """
        _, family, values = decisions(mod)
        for space in self.spaces:
            plan = type(space.seed)(**values) if space.family.NAME == family else None
            if plan is not None and space.owns(family, plan):
                return self.begin_plan(space, plan, whole)
        raise ValueError(f"the builder was told of {len(self.spaces)} spaces, found a module of none of them: set PoolBuilder.spaces")

    def begin_plan(self, space, plan, whole=False):
        """The same of a plan of a space, which may be plans of whole gradients."""
        path = str(self.folder / f"{next(self._numbers)}.so")
        return self._pool.submit(build_worker.make, build_worker.Job(space, plan, path, whole))

    def declarations(self, spaces):
        """{name of a space: structural hash of its declaration}."""
        futures = {space.name: self._pool.submit(build_worker.declaration, space) for space in spaces}
        return {name: future.result() for name, future in futures.items()}

    def result(self, future):
        """BuilderResult of a future of `begin`; `built` then holds under the artefact's path what the worker found."""
        try:
            built = future.result()
        except TimeoutError:
            built = f"not built within {TIMEOUT} s"
        except (ChildProcessError, concurrent.futures.CancelledError):
            built = "the build process ended"
        if isinstance(built, str):
            return ms.builder.BuilderResult(None, built)
        self.built[built.path] = built
        return ms.builder.BuilderResult(built.path, None)

    def discard(self, path):
        """Remove an artefact that is of no more use."""
        del self.built[path]
        Path(path).unlink(missing_ok=True)

    def close(self):
        """End the processes; those at work finish their kernel first."""
        self._pool.shutdown(wait=True)

