"""MetaSchedule's builder: one pool of processes for the whole run. LocalBuilder starts a new one in every batch, and imports TVM anew."""
import concurrent.futures
import itertools
from pathlib import Path

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from schedules.space import decisions
from schedules.tuning import build_worker
from schedules.tuning.processes import Pool
from schedules.tuning.reasons import NOT_BUILT, reason
from schedules.tuning.search import TuneError

#: Seconds that one kernel may take to build.
TIMEOUT = 120
#: What errors say where a disk is full, those of compilers too.
FULL = "No space left on device"


@derived_object
class PoolBuilder(ms.builder.PyBuilder):
    """Builds the symbolic kernels of annotated modules; what is in their bodies does not matter.

    workers      number of processes
    toolkit      Toolkit for CUDA, None for CPU kernels
    stub_folder  where the stand-in for a missing driver goes
    folder       where the .so files go; the caller removes it
    eager        whether what is built is measured before the session asks for it
    """

    eager = False

    def __init__(self, workers, toolkit, stub_folder, folder):
        super().__init__()
        self.workers, self.folder = workers, Path(folder)
        self.spaces = ()
        self.built = {}
        self._numbers = itertools.count()
        # The workers' stderr would mix nvcc's words into the progress lines; what went wrong comes back with the result.
        self._pool = Pool(workers, TIMEOUT, build_worker.start, (toolkit, stub_folder))

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
        """{name of a space: structural hash of its declaration, "none" where it cannot be declared}; TuneError where the processes do not
        say."""
        futures = {space.name: self._pool.submit(build_worker.declaration, space) for space in spaces}
        try:
            return {name: future.result() for name, future in futures.items()}
        except (TimeoutError, ChildProcessError) as error:
            raise TuneError(f"a build process must say what a kernel computes, found {error or 'that it takes too long'}: see to the "
                            "machine's memory and run the same command again") from error

    def result(self, future):
        """BuilderResult of a future of `begin`; `built` then holds under the artefact's path what the worker found. TuneError where the
        disk is full: the plan is not to blame."""
        try:
            built = future.result()
        except TimeoutError:
            built = reason(NOT_BUILT, f"it takes more than {TIMEOUT} s")
        except (ChildProcessError, concurrent.futures.CancelledError):
            built = reason(NOT_BUILT, "the build process ended, and another one too")
        if isinstance(built, str):
            if FULL in built:
                raise TuneError(f"{self.folder.parent} must have room for kernels, found its disk full: free some space or set TMPDIR, and "
                                "run the same command again, which goes on where this one ended")
            return ms.builder.BuilderResult(None, built)
        self.built[built.path] = built
        return ms.builder.BuilderResult(built.path, None)

    def discard(self, path):
        """Remove an artefact that is of no more use."""
        del self.built[path]
        Path(path).unlink(missing_ok=True)

    def close(self):
        """End the processes, whatever they are at."""
        self._pool.close()
