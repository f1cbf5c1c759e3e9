"""What a GPU's own sensors say while kernels are timed: clock and power, by which one sees whether two figures are of the same chip state.

They are read from NVML, the library that comes with the driver. Where it is missing or does not answer, nothing is noted: sensors explain
figures, they make none.
"""
import ctypes
import statistics
import threading
from contextlib import contextmanager

NVML, CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
#: Seconds between readings.
INTERVAL = 0.01
#: (name, NVML's function, what it is asked between device and result, how many of its units are one of ours): clock 1 is that of the SMs.
_READ = (("sm_mhz", "nvmlDeviceGetClockInfo", (1,), 1), ("watts", "nvmlDeviceGetPowerUsage", (), 1000),
         ("celsius", "nvmlDeviceGetTemperature", (0,), 1))


class Sensors:
    """Of the first GPU that CUDA shows.

    nvml, cuda  names of the two libraries
    """

    def __init__(self, nvml=NVML, cuda=CUDA):
        self._nvml, self._device = None, ctypes.c_void_p()
        bus = ctypes.create_string_buffer(32)
        try:
            nvml, cuda = ctypes.CDLL(nvml), ctypes.CDLL(cuda)
            # CUDA and NVML number GPUs in their own ways; both know the place on the bus.
            if cuda.cuInit(0) or cuda.cuDeviceGetPCIBusId(bus, len(bus), 0) or nvml.nvmlInit_v2():
                return
            if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(self._device)) == 0:
                self._nvml = nvml
        except (OSError, AttributeError):  # no library, or an old one
            pass

    def read(self):
        """{"sm_mhz", "watts", "celsius"} as far as they can be told."""
        if self._nvml is None:
            return {}
        found, value = {}, ctypes.c_uint()
        for name, function, what, unit in _READ:
            if getattr(self._nvml, function)(self._device, *what, ctypes.byref(value)) == 0:
                found[name] = value.value / unit
        return found

    @contextmanager
    def watching(self):
        """A list that grows by a reading every few milliseconds while the block runs, by one at least."""
        readings, done = [], threading.Event()

        def watch():
            while True:
                readings.append(self.read())
                if done.wait(INTERVAL):
                    return
        thread = threading.Thread(target=watch, daemon=True)
        if self._nvml is not None:
            thread.start()
        try:
            yield readings
        finally:
            done.set()
            if thread.is_alive():
                thread.join()


def summary(readings):
    """Medians of readings by name, rounded to whole units; empty where there are none."""
    names = dict.fromkeys(name for reading in readings for name in reading)
    return {name: round(statistics.median(reading[name] for reading in readings if name in reading)) for name in names}
