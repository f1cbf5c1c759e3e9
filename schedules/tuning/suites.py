"""Suites: lists of subjects that stand for what somebody computes, tuned together within one budget."""
from dataclasses import dataclass

from schedules.buckets import bucket_at
from schedules.tuning.subjects import subject_named
from te_defs.workload import PRESETS, Shape


@dataclass(frozen=True)
class Entry:
    """One subject of a suite.

    name    of the subject
    weight  part of the user's time that it stands for, against the others'
    shape   te_defs.workload.Shape that is timed; None: the device's usual one
    """

    name: str
    weight: int
    shape: Shape | None = None

    @property
    def subject(self):
        return subject_named(self.name)

    @property
    def title(self):
        """Name of the folder of its log, of a shape of its own with the lengths behind it."""
        return f"{self.name}@{bucket_at(self.shape)}" if self.shape else self.name


@dataclass(frozen=True)
class Suite:
    """Entries for one kind of device, "cuda" or "cpu"."""

    kind: str
    entries: tuple


#: The suite of all presets: what is shipped for a GPU.
PRESETS_SUITE = "presets"
# Query heads share key heads, except at the usual shapes. Steps have few queries and long caches of keys; they have no fewer queries than
# mma's PACKED_ROWS, since the kernel of fewer queries of grouped heads, which packs these into its rows, has no plans to choose from.
SUITES = {
    # Language models: prompts, long prompts, steps over caches; training.
    "llm": Suite("cuda", (
        Entry("fwd_d128_dv128_f16_causal", 15),
        Entry("fwd_d128_dv128_f16_causal", 10, Shape(1, 32, 8, 16384, 16384)),
        Entry("fwd_d128_dv128_f16_causal", 20, Shape(16, 32, 8, 64, 8192)),
        Entry("fwd_d64_dv64_f16_causal", 10),
        Entry("fwd_d64_dv64_f16_causal", 5, Shape(16, 64, 8, 64, 8192)),
        Entry("fwd_d128_dv128_f16_full", 5),
        Entry("fwd_d64_dv64_f16_full", 5),
        Entry("fwd_d256_dv256_f16_causal", 5),
        Entry("bwd_d128_dv128_f16_causal+any-order", 10),
        Entry("bwd_d64_dv64_f16_causal+any-order", 5),
        Entry("bwd_d128_dv128_f16_causal", 5),
        Entry("bwd_d128_dv128_f16_full+any-order", 5))),
    "cpu": Suite("cpu", (
        Entry("fwd_d64_dv64_f32_causal", 40),
        Entry("fwd_d64_dv64_f32_full", 20),
        Entry("fwd_d64_dv64_f32_causal", 20, Shape(4, 8, 2, 16, 1024)),
        Entry("bwd_d64_dv64_f32_causal", 20))),
    PRESETS_SUITE: Suite("cuda", tuple(Entry(workload.name, 1) for workload in PRESETS.values())),
}
