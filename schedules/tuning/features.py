"""What the cost model sees of a candidate: one row with its family, tiles and knobs, alike for all spaces, so that they share one model.

MetaSchedule's own features describe buffer stores, in which choices such as an order of statements or a compiler option do not show.
"""
from dataclasses import fields
from functools import cache

import numpy as np
import tvm
from tvm import s_tir
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

from schedules.space import carried, decisions
from te_defs import script


@derived_object
class KnobFeatures(ms.feature_extractor.PyFeatureExtractor):
    """Features by family and field: a column for each field of each family's plan, and one that says which family it is.

    spaces  the spaces that the model will see
    """

    def __init__(self, spaces):
        super().__init__()
        plans = {space.family.NAME: space.seed for space in spaces}
        keys = [(family, field) for family, plan in plans.items() for field in ("", *(entry.name for entry in fields(plan)))]
        self.columns = {key: column for column, key in enumerate(keys)}

    def extract_from(self, context, candidates):
        return [tvm.runtime.tensor(self.row(candidate.sch.mod)[None, :]) for candidate in candidates]

    def row(self, mod):
        """float32 features of a module that `draw` has annotated; 0 in the columns of other families."""
        _, family, values = decisions(mod)
        row = np.zeros(len(self.columns), np.float32)
        for field, value in {"": 1, **values}.items():
            row[self.columns[family, field]] = value
        return row


def token(space, plan):
    """A small module with the annotations of a scheduled one: what builder and cost model read, without a second of scheduling."""
    sch = s_tir.Schedule(_nothing(), debug_mask=0)
    root = sch.get_sblock("root")
    for key, value in carried(space, plan).items():
        sch.annotate(root, key, value)
    return sch


@cache
def _nothing():
    @script.prim_func(s_tir=True)
    def nothing(a: T.handle):
        A = T.match_buffer(a, (1,))
        for i in T.serial(1):
            with T.sblock("nothing"):
                vi = T.axis.remap("S", [i])
                A[vi] = T.float32(0)
    return tvm.IRModule({"main": nothing})
